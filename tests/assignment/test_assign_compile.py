"""sliced_assign and at inside compiled code: one graph, and everything as in eager."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.assigned import INDICES, base, plain
from torchguard import sliced_assign, sliced_assign_

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


Known = tuple[torch.Tensor, bool]


def outcome(function: Callable[..., Known], *args: torch.Tensor) -> Any:
    """The result, what was known of requires_grad while it ran, what is, and the gradients."""
    args = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in args)
    out, known = function(*args)
    leaves = [each for each in args if each.requires_grad]
    gradients: Any = ()
    if out.requires_grad:
        gradients = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    filled = [
        torch.zeros_like(leaf) if each is None else each
        for leaf, each in zip(leaves, gradients, strict=False)
    ]
    return out, known, out.requires_grad, filled


def same(found: Any, expected: Any) -> None:
    assert found[1:3] == expected[1:3]
    torch.testing.assert_close(found[0], expected[0])
    assert found[0].dtype is expected[0].dtype
    torch.testing.assert_close(found[3], expected[3])


def works(index: Any) -> bool:
    with contextlib.suppress(Exception):
        return plain(base(), index, torch.tensor(1.0)) is not None
    return False


# An integer as a mask (uint8) is on its way out of torch, and warns; compilers never learnt it.
COMPILED = {name: index for name, index in INDICES.items() if works(index) and name != "uint8"}
assert len(COMPILED) > 35


def assigning(assign: Any, index: Any) -> Callable[..., Known]:
    def function(t: torch.Tensor, value: torch.Tensor) -> Known:
        out = assign(t, index, value)
        return out, out.requires_grad

    return function


@pytest.mark.parametrize(("dynamic", "wants_t"), [(False, True), (True, False)])
def test_every_index_in_one_graph(dynamic: bool, wants_t: bool) -> None:
    """One of the two requires grad."""
    # Dynamo itself can't hand a range of symbolic numbers to anything. And what nothing is written
    # to: eager says that it requires grad, and nothing depends on it.
    chosen = {
        name: index
        for name, index in COMPILED.items()
        if not (dynamic and "range" in name) and (wants_t or base()[index].numel())
    }

    def by(assign: Any) -> Callable[..., tuple[list[torch.Tensor], list[bool]]]:
        def function(t: torch.Tensor, value: torch.Tensor) -> Any:
            outs = [assign(t, index, value) for index in chosen.values()]
            return outs, [out.requires_grad for out in outs]

        return function

    ends = []
    compiled = torch.compile(
        by(sliced_assign), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for function in (compiled, by(plain)):
        t, value = base(wants_t), torch.tensor(5.0, requires_grad=not wants_t)
        outs, known = function(t, value)
        # Each with a weight of its own: a wrong gradient of one of them shows in the sum.
        weighted = [(k + 1) * out.sin().sum() for k, out in enumerate(outs)]
        [gradient] = torch.autograd.grad(sum(weighted, torch.zeros(())), t if wants_t else value)
        ends.append((outs, known, [out.requires_grad for out in outs], gradient))
    found, expected = ends
    assert found[1:3] == expected[1:3]
    for name, one, other in zip(chosen, found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, msg=name)
    torch.testing.assert_close(found[3], expected[3])


ROWS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mask": (INDICES["mask"], (2, 4)),
    "mask of the whole": (INDICES["mask of the whole"], (3,)),
    "mask of the second dim": (INDICES["mask of the second dim"], (3, 3)),
    "mask of the second dim, one column": (INDICES["mask of the second dim"], (3, 1)),
    "mask and int": (INDICES["mask and int"], (2,)),
    "mask and none": ((None, INDICES["mask"]), (1, 2, 4)),
    "mask, a row for all": (INDICES["mask"], (4,)),
    "mask, more dims than needed": (INDICES["mask"], (1, 1, 4)),
    "0-d of the second dim": ((slice(None), torch.tensor(-1)), (3,)),
    "slice": (slice(0, 2), (2, 4)),
    "separated": (INDICES["separated"], (2, 1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_value_with_a_row_for_each_hit_in_one_graph(name: str) -> None:
    index, shape = ROWS[name]
    value = torch.randn(shape, requires_grad=True)
    compiled = torch.compile(assigning(sliced_assign, index), backend="aot_eager", fullgraph=True)
    same(outcome(compiled, base(), value), outcome(assigning(plain, index), base(), value))


def test_index_and_value_may_come_from_outside_or_inside() -> None:
    def function(t: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> Known:
        out = sliced_assign(t, (index + 0, slice(1, t.shape[1])), value * 2)
        return out, out.requires_grad

    t, index = base(requires_grad=False), torch.tensor([2, 0])
    value = torch.ones(2, 3, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    found, expected = compiled(t, index, value), function(t, index, value)
    assert torch.equal(found[0], expected[0])
    assert found[1] is expected[1] is True


def test_in_place_the_result_and_every_alias_is_right() -> None:
    def function(t: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        out = sliced_assign_(t, (slice(None), [0, 2]), value)
        return out * 2, out.requires_grad

    for backend in ("eager", "aot_eager"):
        t, value = base(requires_grad=False), torch.tensor(5.0, requires_grad=True)
        alias = t.view(-1)
        out, known = torch.compile(function, backend=backend, fullgraph=True)(t, value)
        assert known
        assert torch.equal(t, plain(base(), (slice(None), [0, 2]), 5.0))
        assert torch.equal(alias, t.view(-1))
        assert torch.autograd.grad(out.sum(), value)[0] == 12


# --- export


class Assigning(torch.nn.Module):
    def forward(self, t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sliced_assign(t, (0, [0, 2]), value)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_torchs_operators_alone(strict: bool) -> None:
    args = torch.zeros(3, 4), torch.ones(2)
    program = torch.export.export(Assigning(), args, strict=strict)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called
    assert all(isinstance(target, torch._ops.OpOverload) for target in called)
    assert torch.equal(program.module()(*args), Assigning()(*args))


# --- a sample under inductor


@pytest.mark.slow
def test_a_sample_under_inductor() -> None:
    """In one graph: compiling takes its time."""
    names = ("slice with a step", "mask", "list", "0-d of the second dim", "separated")

    def by(assign: Any) -> Callable[..., Known]:
        def function(t: torch.Tensor, value: torch.Tensor) -> Known:
            results = [assign(t * (k + 1), INDICES[name], value) for k, name in enumerate(names)]
            return torch.stack(results), all(each.requires_grad for each in results)

        return function

    t, value = base(), torch.tensor(5.0, requires_grad=True)
    compiled = torch.compile(by(sliced_assign), fullgraph=True)
    same(outcome(compiled, t, value), outcome(by(plain), t, value))


@pytest.mark.slow
@pytest.mark.parametrize("assign", [sliced_assign, sliced_assign_])
def test_a_tensor_of_one_integer_out_of_bounds_is_no_other_row(assign: Any) -> None:
    """Inductor counts from the end itself, and checks the bounds."""
    compiled = torch.compile(lambda t, i: assign(t, i, 5.0), fullgraph=True)
    assert compiled(torch.zeros(3, 2), torch.tensor(-3))[0].tolist() == [5.0, 5.0]
    for bad in (-7, -5, -4, 3):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            compiled(torch.zeros(3, 2), torch.tensor(bad))


def test_memory_format_with_a_tensor_of_one_integer() -> None:
    def assign(t: torch.Tensor) -> torch.Tensor:
        return sliced_assign(t, torch.tensor(1), 5.0)

    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for t in (image, torch.zeros(3, 4).t(), torch.zeros(3, 4)):
        assert torch.compile(assign, backend="aot_eager")(t).stride() == t.stride()
