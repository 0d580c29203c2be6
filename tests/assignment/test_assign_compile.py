"""sliced_assign and at inside compiled code: one graph, and everything as in eager."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.assigned import INDICES, base, plain
from torchguard import sliced_assign, sliced_assign_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


def works(index: Any) -> bool:
    with contextlib.suppress(Exception):
        return plain(base(), index, torch.tensor(1.0)) is not None
    return False


# An integer as a mask (uint8) is on its way out of torch, and warns; compilers never learnt it. A
# boolean of no dims is another result for each value, and masks with a gradient came with 2.10.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
COMPILED = {
    name: index
    for name, index in INDICES.items()
    if works(index)
    and name not in {"uint8", "0-d mask"}
    and not (OLD and ("mask" in name or "booleans" in name))
}
assert len(COMPILED) > 25


def assert_one_graph_is_as_eager(
    indices: Iterable[Any], t: torch.Tensor, values: list[torch.Tensor], **options: Any
) -> None:
    """Results, what is known of requires_grad while it runs, what is, and the gradients."""

    def by(assign: Any) -> Callable[..., tuple[list[torch.Tensor], list[bool]]]:
        def function(t: torch.Tensor, *values: torch.Tensor) -> Any:
            outs = [assign(t, index, v) for index, v in zip(indices, values, strict=True)]
            return outs, [out.requires_grad for out in outs]

        return function

    ends = []
    for function in (torch.compile(by(sliced_assign), fullgraph=True, **options), by(plain)):
        outs, known = function(t, *values)
        # Each with a weight of its own: a wrong gradient of one of them shows in the sum.
        weighted = [(k + 1) * out.sin().sum() for k, out in enumerate(outs)]
        leaves = list({id(each): each for each in (t, *values) if each.requires_grad}.values())
        gradients = torch.autograd.grad(sum(weighted, torch.zeros(())), leaves)
        ends.append((known, [out.requires_grad for out in outs], outs, gradients))
    found, expected = ends
    assert found[:2] == expected[:2]
    torch.testing.assert_close(found[2:], expected[2:])


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "wants_t"), [(False, True), (True, False)])
def test_every_index_in_one_graph(dynamic: bool, wants_t: bool) -> None:
    """One of the two requires grad."""
    # Dynamo itself can't hand a range of symbolic numbers to anything. And what nothing is written
    # to: eager says that it requires grad, and nothing depends on it.
    chosen = [
        index
        for name, index in COMPILED.items()
        if not (dynamic and "range" in name) and (wants_t or base()[index].numel())
    ]
    values = [torch.tensor(5.0, requires_grad=not wants_t)] * len(chosen)
    assert_one_graph_is_as_eager(
        chosen, base(wants_t), values, backend="aot_eager", dynamic=dynamic
    )


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


def test_a_value_with_a_row_for_each_hit_in_one_graph() -> None:
    rows = {name: row for name, row in ROWS.items() if not (OLD and "mask" in name)}
    indices, shapes = zip(*rows.values(), strict=True)
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert_one_graph_is_as_eager(indices, base(), values, backend="aot_eager")


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
    values = [torch.tensor(5.0, requires_grad=True)] * len(names)
    assert_one_graph_is_as_eager([INDICES[name] for name in names], base(), values)


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
