"""verified(against="python"): programs of upstream's issues, and programs that are right."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.miscompiling import against, row
from support.random_programs import attempt, program
from support.slow import slow_except
from support.zoo import ZOO, Architecture
from torchguard import MiscompilationWarning, verified

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- programs that Dynamo traces wrong on some release


class Stale:
    factor = 1.0


class Shared(nn.Module):
    items: list[torch.Tensor] = []  # noqa: RUF012 - that it is shared is the point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Shared.items.append(x)
        return x + 1


def stale_global(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/176851"""
    Stale.factor = 1.0
    function = run(lambda x: x * Stale.factor)
    results = []
    for factor in (1.0, 10.0):
        Stale.factor = factor
        results.append(function(torch.ones(2)))
    return results


def lost_append(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/169253"""
    Shared.items.clear()
    return [run(Shared())(torch.ones(2)), len(Shared.items)]


def lost_in_a_method(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/197896"""
    state: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        class Helper:
            def touch(self) -> None:
                state.append(1)

        Helper().touch()
        return x + 1

    return [run(function)(torch.ones(2)), state]


NOTES: list[int] = []


def lost_in_a_class_of_the_closure(run: Callable[..., Any], kind: str = "method") -> list[Any]:
    """As reported: a class outside of what is compiled has the list in the closure of a method."""
    state: list[int] = []
    NOTES.clear()

    class Base:
        def note(self) -> None:
            state.append(1)

        @staticmethod
        def note_static() -> None:
            state.append(1)

        @classmethod
        def note_class(cls) -> None:
            state.append(1)

        @property
        def noted(self) -> int:
            state.append(1)
            return 1

        def note_global(self) -> None:
            NOTES.append(1)

    class Helper(Base):
        pass

    calls: dict[str, Callable[[], Any]] = {
        "method": lambda: Base().note(),
        "inherited": lambda: Helper().note(),
        "static": lambda: Helper.note_static() or 1,
        "class": lambda: Helper.note_class() or 1,
        "property": lambda: Base().noted,
        "global": lambda: Base().note_global(),
    }
    call = calls[kind]

    def function(x: torch.Tensor) -> torch.Tensor:
        call()
        return x + 1

    compiled = run(function)
    return [*(compiled(torch.ones(2)) for _ in range(3)), list(state), list(NOTES)]


IN_CLASSES = [
    partial(lost_in_a_class_of_the_closure, kind=kind)
    for kind in ("method", "inherited", "static", "class", "property", "global")
]


def grown_while_read(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/175855"""

    def function(x: torch.Tensor) -> torch.Tensor:
        values = [x.sum()]

        def grow_and_read() -> Iterator[torch.Tensor]:
            for item in values:
                if len(values) < 3:
                    values.append(item + 1)
                yield item

        return torch.stack(list(grow_and_read())).sum()

    return [run(function)(torch.ones(1))]


def method_descriptors(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/197811"""

    def make(operation: Any) -> Any:
        def function(x: torch.Tensor, y: torch.Tensor) -> Any:
            return operation(x, y)

        return run(function)

    pair = torch.tensor(6.0), torch.tensor(3.0)
    operations: list[Any] = [torch.Tensor.__add__, torch.Tensor.__mul__]
    return [make(operation)(*pair) for operation in operations]


def tensor_of_size(run: Callable[..., Any]) -> list[Any]:
    """The memory is not written, so the shape is all there is to compare."""
    return [run(lambda x: torch.Tensor(x.size()))(torch.ones(2, 3)).shape]


def identity_decides(run: Callable[..., Any]) -> list[Any]:
    """https://github.com/pytorch/pytorch/issues/196173"""

    class State:
        calls = 0

    first, second = State(), State()

    def function(x: torch.Tensor, state: State) -> torch.Tensor:
        state.calls += 1
        return x * (2 if state is first else 3)

    compiled = run(function)
    return [*(compiled(torch.ones(2), each) for each in (first, second)), first.calls, second.calls]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.sub(x)
        return result


def replaced_module(run: Callable[..., Any]) -> list[Any]:
    """Replaced behind the back of Dynamo."""
    model = Outer()
    compiled = run(model)
    first = compiled(torch.ones(2))
    object.__setattr__(model, "sub", nn.Softmax(0))
    return [first, compiled(torch.ones(2))]


WRONG = [
    stale_global, lost_append, lost_in_a_method, grown_while_read, method_descriptors,
    tensor_of_size, identity_decides, replaced_module, *IN_CLASSES,
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("case", WRONG)
def test_programs_of_upstream_give_what_python_gives(case: Any) -> None:
    """Where this torch is wrong there is a warning, and where it is right there is none."""
    want = case(lambda function: function)
    live = not same(want, case(partial(torch.compile, backend="eager")))
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = case(verified(against="python", every=2, backend="eager"))
    assert same(want, found)
    assert len([w for w in caught if w.category is MiscompilationWarning]) == live


# --- twenty functions that are right


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


FACTORS = {"two": 2.0}


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)[1:].mul_(2)
    return x * 2


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y + x


def breaks_with_writes(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    torch._dynamo.graph_break()
    x.add_(1)
    return x.clone()


def tries(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.shape[0] > 1:
            raise ValueError("long")  # noqa: TRY301 - it is what is tried
    except ValueError:
        return x + 1
    return x


def yields(x: torch.Tensor) -> torch.Tensor:
    def rows() -> Iterator[torch.Tensor]:
        yield from x

    return torch.stack([row + 1 for row in rows()])


def no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return x * y


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: torch.Tensor = x @ x.t()
    return result


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    return y.sin()


WRITES: list[Any] = [in_place, breaks_with_writes]
RIGHT: list[Any] = [
    *(breaks, tries, yields, no_grad, autocast, hooked, *WRITES),
    lambda x: functional.dropout(x, 0.5) * 2,
    lambda x: x + torch.randn_like(x),
    lambda x: x.view(-1)[1:],
    lambda x, *, scale=2.0, **more: x * scale + more.get("bias", 0),
    lambda x: {"a": [x, (x + 1, {"b": x * 2})], "c": Pair(x, x.sin()), "n": 3},
    lambda x: x * 2 if x.shape[0] > 2 else x * 3,
    lambda x: x * 2 if x.sum() > 0 else x * 3,
    lambda x: sum(row * 2 for row in x),
    lambda x: (x * 2, x.sum().item(), x.shape[0]),
    lambda x: x * FACTORS["two"],
    lambda x: (x.argmax(-1), x.sort(-1), x.topk(2, -1)),
    lambda x: (None, x[:0], [], "text", x.dtype, torch.float16),
    lambda x: (x[:1].expand(4, -1), x.t(), x.to(torch.float64)),
]


@pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning")
@pytest.mark.parametrize("gradient", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", RIGHT)
def test_no_false_alarm_on_functions(function: Any, gradient: bool) -> None:
    compiled = against(function, "aot_eager")
    for rows in (3, 3, 2, 5):
        x, other = (torch.linspace(0.5, 1, 3 * rows).view(rows, 3) for _ in range(2))
        x.requires_grad_(gradient and function not in WRITES)
        torch.manual_seed(0)
        compiled(x)
        drawn = torch.get_rng_state()
        with torch.no_grad():
            torch.manual_seed(0)
            function(other)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert torch.equal(x.detach(), other)
    assert row(compiled).status == "verified", row(compiled).reason
    assert row(compiled).checks >= 2


@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_no_false_alarm_on_random_programs() -> None:
    """Dynamo is right about each of them, and what AOTAutograd is wrong about is not its fault."""
    for seed in range(12):
        torch._dynamo.reset()
        made = program(seed)
        compiled: list[Any] = []

        def keep(function: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(verified(against="python", backend="eager")(function))
            return compiled[-1]

        assert attempt(made, keep, sizes=(4, 9)) == [], made.source
        assert all(row(each).status == "verified" for each in compiled), made.source


@pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning")
@pytest.mark.parametrize("architecture", slow_except(ZOO, "residual-convnet"), ids=str)
def test_no_false_alarm_on_models(architecture: Architecture) -> None:
    model = architecture.build(to_compile=True)
    plain = copy.deepcopy(model)
    compiled = verified(against="python", backend="eager")(model)
    for lengths in ([7, 4], [9, 9]):
        batch = architecture.batch(lengths)
        for each in (compiled, plain):
            each.zero_grad()
            architecture.loss(each, copy.deepcopy(batch)).backward()
        pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
        for one, other in pairs:
            if one.grad is not None or other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)
    with contextlib.suppress(AttributeError):
        assert row(compiled).status == "verified", row(compiled).reason
