"""Plain ``x[i] = v`` in compiled code under each cure: requires_grad and gradients as in eager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.child_process import output_of
from support.compiled import Counting
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


class Tripled(torch.autograd.Function):
    """Doubles, and triples the gradient; reads requires_grad, as some do to save memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Asking(torch.autograd.Function):
    """Decides by what it reads of requires_grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, needed: bool) -> torch.Tensor:
        ctx.factor = 3 if needed else 0
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad * ctx.factor, None


ROWS, COLS = torch.triu_indices(3, 3, 1)  # the index of 3 x 3 matrices' upper triangles


def skew_symmetric(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3, 3)
    m[:, ROWS, COLS] = v
    known = m.requires_grad
    return m - m.transpose(-2, -1), known


def into_a_view_of_a_view(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(12)
    view = m.view(4, 3)
    view[1:3][0] = v[0]
    return m, m.requires_grad, view.requires_grad


def into_the_base_of_a_view(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3)
    view = m.view(-1)
    m[0] = v[0]
    return m, view.requires_grad


def under_no_grad_inside(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3)
    with torch.no_grad():
        m[0] = v[0]
    first = m.requires_grad
    m[1] = v[1]
    return m, first, m.requires_grad, m.detach().requires_grad


def on_an_input(v: torch.Tensor, m: torch.Tensor) -> tuple[Any, ...]:
    m[0] = v[0]
    return m * 2, m.requires_grad


def a_view_into_a_custom_function(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3)
    m[0][1:] = v[0, 1:]
    return (Tripled.apply(m),)  # type: ignore[no-untyped-call]


def into_a_function_that_asks(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3)
    m[0] = v[0]
    return (Asking.apply(m, m.requires_grad),)  # type: ignore[no-untyped-call]


def in_a_checkpoint(v: torch.Tensor) -> tuple[Any, ...]:
    def part(v: torch.Tensor) -> torch.Tensor:
        m = torch.zeros(2, 3)
        m[0] = v[0]
        return m.sin() * (2 if m.requires_grad else 1)

    return (checkpoint(part, v, use_reentrant=False),)


def nothing_that_requires_grad(v: torch.Tensor) -> tuple[Any, ...]:
    m = torch.zeros(2, 3)
    m[0] = v.detach()[0]
    return m + v, m.requires_grad


def by_other_writes(v: torch.Tensor) -> tuple[Any, ...]:
    first, second, third = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    first.copy_(v)
    second[0].mul_(v[0])
    torch.index_put_(third, (torch.tensor([0]),), v[0])
    return first + second + third, first.requires_grad, second.requires_grad, third.requires_grad


CASES: dict[str, Callable[..., tuple[Any, ...]]] = {
    case.__name__: case
    for case in (
        skew_symmetric, into_a_view_of_a_view, into_the_base_of_a_view,
        under_no_grad_inside, on_an_input, a_view_into_a_custom_function,
        into_a_function_that_asks, in_a_checkpoint, nothing_that_requires_grad, by_other_writes,
    )
}  # fmt: skip
WRONG_EVERYWHERE = (into_a_view_of_a_view, a_view_into_a_custom_function)


def outcome(
    case: Callable[..., tuple[Any, ...]], backend: Any = None, fullgraph: bool = True
) -> tuple[Any, ...]:
    """Results, what was known of requires_grad, what is, and the gradient."""
    function = case
    if backend is not None:
        torch._dynamo.reset()
        function = torch.compile(case, backend=backend, fullgraph=fullgraph)
    v = torch.arange(1.0, 7).view(2, 3).requires_grad_()
    args = (v, torch.zeros(2, 3)) if case is on_an_input else (v,)
    result, *known = function(*args)
    (gradient,) = torch.autograd.grad(result.sin().sum(), v)
    written = [arg.detach().tolist() for arg in args]
    return result.tolist(), known, result.requires_grad, gradient.tolist(), written


@pytest.mark.parametrize("name", CASES)
def test_compiled_is_as_eager_and_the_graph_stays_as_it_is(name: str) -> None:
    case, bare, cured = CASES[name], Counting("eager"), Counting("eager")
    bare_outcome, expected = outcome(case, bare, fullgraph=False), outcome(case)
    with install("setitem"):
        assert outcome(case, cured) == expected
        by_aot = outcome(case, "aot_eager")
    assert by_aot[:3] == expected[:3]
    torch.testing.assert_close(torch.tensor(by_aot[3]), torch.tensor(expected[3]))
    if case is not into_a_function_that_asks:
        if bare.graphs != cured.graphs:  # traced wrongly before: a branch, a backward left out
            assert bare_outcome != expected
        assert len(bare.graphs) == len(cured.graphs)
    if case in WRONG_EVERYWHERE:
        assert bare_outcome != expected


def test_a_leaf_that_requires_grad_raises_as_before() -> None:
    def write(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        m[0] = v
        return m

    with install("setitem"), pytest.raises(RuntimeError, match="leaf"):
        torch.compile(write, backend="eager")(
            torch.zeros(2, requires_grad=True), torch.ones((), requires_grad=True)
        )


def test_a_parameter_made_in_a_graph_keeps_what_dynamo_knows_of_it() -> None:
    def make(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        parameter = nn.Parameter(x.detach().clone())
        return (parameter * x).sum(), parameter.requires_grad

    x = torch.ones(3)
    with install("setitem"):
        loss, known = torch.compile(make, backend="eager")(x)
    assert (loss.item(), known) == (3.0, True)


REPORT = """
import sys, torch, torchguard
def ask(v):
    m = torch.zeros(2, 2)
    m[0][0] = v
    return m, m.requires_grad
def is_right():
    torch.compiler.reset()
    m, known = torch.compile(ask, backend="eager")(torch.ones((), requires_grad=True))
    return known == m.requires_grad
"""

ORDERS = {
    "before Dynamo is imported": """
installation = torchguard.install("setitem")
assert "torch._dynamo" not in sys.modules
print(torchguard.installed())
""",
    "in a hook on its import": """
import wrapt
torchguard.install("resize").uninstall()  # its own hook comes first
made = []
hook = lambda _: made.append(torchguard.install("setitem"))
wrapt.register_post_import_hook(hook, "torch._dynamo")
import torch._dynamo
[installation] = made
print(torchguard.installed())
""",
    "uninstalled while it waits": """
torchguard.install("setitem").uninstall()
import torch._dynamo
assert not is_right()
installation = torchguard.install("setitem")
print(torchguard.installed())
""",
}
REST = """
print(is_right(), torchguard.installed())
installation.uninstall()
print(is_right(), torchguard.installed())
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_installing_works_in_every_order(order: str) -> None:
    lines = output_of(REPORT + ORDERS[order] + REST).splitlines()
    assert lines == ["('setitem',)", "True ('setitem',)", "False ()"]
