"""sliced_assign and at inside compiled code: one graph, and everything as in eager."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings

from support.assigned import INDICES, assignments, base, plain
from torchguard import at, sliced_assign, sliced_assign_

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
    try:
        plain(base(), index, torch.tensor(1.0))
    except Exception:  # noqa: BLE001
        return False
    return True


# An integer as a mask (uint8) is on its way out of torch, and warns; compilers never learnt it.
COMPILED = {
    name: index for name, index in INDICES.items() if works(index) and name not in {"uint8"}
}


def assigning(assign: Any, index: Any) -> Callable[..., Known]:
    def function(t: torch.Tensor, value: torch.Tensor) -> Known:
        out = assign(t, index, value)
        return out, out.requires_grad

    return function


@pytest.mark.parametrize("wants_t", [False, True], ids=["value", "tensor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
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
    "mask": (torch.tensor([True, False, True]), (2, 4)),
    "mask of the whole": (torch.arange(12).view(3, 4) % 5 == 0, (3,)),
    "mask of the second dim": ((slice(None), torch.tensor([True, False, True, True])), (3, 3)),
    "mask of the second dim, one column": (
        (slice(None), torch.tensor([True, False, True, True])),
        (3, 1),
    ),
    "mask and int": ((torch.tensor([True, False, True]), 0), (2,)),
    "mask and none": ((None, torch.tensor([True, False, True])), (1, 2, 4)),
    "mask, a row for all": (torch.tensor([True, False, True]), (4,)),
    "mask, more dims than needed": (torch.tensor([True, False, True]), (1, 1, 4)),
    "0-d of the second dim": ((slice(None), torch.tensor(-1)), (3,)),
    "slice": (slice(0, 2), (2, 4)),
    "separated": ((torch.tensor([0, 1]), None, torch.tensor([1, 2])), (2, 1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_value_with_a_row_for_each_hit_in_one_graph(name: str) -> None:
    index, shape = ROWS[name]
    value = torch.randn(shape, requires_grad=True)
    compiled = torch.compile(assigning(sliced_assign, index), backend="aot_eager", fullgraph=True)
    expected = outcome(assigning(plain, index), base(), value)
    same(outcome(compiled, base(), value), expected)


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


OPERATIONS = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_at_in_one_graph(operation: str) -> None:
    def function(t: torch.Tensor, value: torch.Tensor) -> Known:
        first = getattr(at(t)[:, 1:3], operation)(value)
        out = getattr(at(first)[[0, 2]], operation)(value)
        return out + at(t)[0].get(), out.requires_grad

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        value = torch.tensor(2.5, requires_grad=True)
        t = base(requires_grad=False)
        same(outcome(compiled, t, value), outcome(function, t, value))


@settings(max_examples=60)
@given(assignments())
def test_what_hypothesis_draws_is_right_while_tracing(
    case: tuple[torch.Tensor, Any, Any],
) -> None:
    t, index, value = case
    try:
        expected = outcome(assigning(plain, index), t, value)
    except Exception:  # noqa: BLE001
        return
    if t.is_complex():
        return
    torch._dynamo.reset()
    compiled = torch.compile(assigning(sliced_assign, index), backend="eager", fullgraph=True)
    same(outcome(compiled, t, value), expected)


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


SAMPLE = ("slice with a step", "mask", "list", "0-d of the second dim", "separated")


@pytest.mark.slow
def test_a_sample_under_inductor() -> None:
    """In one graph: compiling takes its time."""

    def by(assign: Any) -> Callable[..., Known]:
        def function(t: torch.Tensor, value: torch.Tensor) -> Known:
            results = [assign(t * (k + 1), INDICES[name], value) for k, name in enumerate(SAMPLE)]
            return torch.stack(results), all(each.requires_grad for each in results)

        return function

    compiled = torch.compile(by(sliced_assign), fullgraph=True, dynamic=True)
    for wants in ((False, True), (True, True)):
        t, value = base(wants[0]), torch.tensor(5.0, requires_grad=wants[1])
        same(outcome(compiled, t, value), outcome(by(plain), t, value))


@pytest.mark.slow
def test_a_sample_of_what_hypothesis_draws_under_inductor() -> None:
    cases: list[tuple[torch.Tensor, Any, Any]] = []

    @settings(max_examples=40)
    @given(assignments())
    def draw(case: tuple[torch.Tensor, Any, Any]) -> None:
        t, index, value = case
        if t.is_complex() or not value.is_floating_point() or not t.numel():
            return
        try:
            plain(t, index, value)
        except Exception:  # noqa: BLE001
            return
        cases.append(case)

    draw()
    chosen = cases[:: max(1, len(cases) // 8)]

    def by(assign: Any) -> Callable[..., torch.Tensor]:
        def function(*tensors: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            for (t, value), (_, index, _) in zip(pairs, chosen, strict=True):
                total = total + assign(t, index, value).sin().sum()
            return total

        return function

    def run(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        tensors = [
            each.detach().clone().requires_grad_() for t, _, value in chosen for each in (t, value)
        ]
        total = function(*tensors)
        gradients = torch.autograd.grad(total, tensors, allow_unused=True)
        return [
            total.detach(),
            *(
                torch.zeros_like(each) if gradient is None else gradient
                for each, gradient in zip(tensors, gradients, strict=True)
            ),
        ]

    assert len(chosen) >= 5
    torch.testing.assert_close(
        run(torch.compile(by(sliced_assign), fullgraph=True)), run(by(plain)), rtol=1e-5, atol=1e-5
    )


def test_the_tables_hold_enough() -> None:
    assert len(COMPILED) > 35
    assert len(list(itertools.chain(ROWS, SAMPLE))) > 15
