"""Subclasses, modes and tracebacks see under each guard what they see on torch."""

from __future__ import annotations

import traceback
import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchguard
from support.kinds import locked
from support.modes import DispatchMode, FunctionMode
from support.ways import BARE, HELPERS, outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from support.ways import Way

pytestmark = pytest.mark.filterwarnings("ignore")

SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guarded": guarded,
    "guarded, all four": lambda: guarded("resize", "out", "overlap", "checks"),
}
each_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
RECORDED: list[Any] = []


def call_of(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The function by identity, types, args that are no tensors, names of kwargs."""
    return (
        func,
        tuple(types),
        len(args),
        [arg for arg in args if not isinstance(arg, torch.Tensor)],
        sorted(kwargs),
    )


class Recording(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        RECORDED.append(call_of(func, types, args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


SOURCE = torch.zeros(3)
RESIZES: dict[str, Callable[[Way, torch.Tensor], Any]] = {
    "resize_": lambda way, t: way.resize_(t, 2),
    "resize_ with integers": lambda way, t: way.resize_(t, 20, 3),
    "resize_ with a format": lambda way, t: way.resize_(
        t, (1, 2, 3, 4), memory_format=torch.channels_last
    ),
    "resize_as_": lambda way, t: way.resize_as_(t, SOURCE),
    "set_": lambda way, t: way.set_(t),
    "set_ a view": lambda way, t: way.set_(t, SOURCE.untyped_storage(), 1, (2,), (1,)),
}
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: partial(call, BARE) for name, call in RESIZES.items()},
    "add": lambda t: torch.add(t, 1),
    "method add": lambda t: t.add(1),
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(1),
    "setitem": lambda t: t.__setitem__(0, 1),
    "out=": lambda t: torch.add(t, 1, out=t),
    "out= of another": lambda t: torch.add(t, 1, out=torch.empty(4)),
    "linalg out=": lambda t: torch.linalg.norm(t, out=torch.empty(())),
    "property": lambda t: t.T,
    "set data": lambda t: setattr(t, "data", torch.ones(4)),
    "a failure": lambda t: outcome_of(lambda: t.add_(torch.ones(9))),
    "a failing resize_": lambda t: outcome_of(lambda: t.resize_(2**62, 4)),
    "a failing out=": lambda t: outcome_of(lambda: torch.add(t, 1, out=locked([1.0]))),
    "relu": lambda t: torch.nn.functional.relu(t, inplace=True),
    "tensordot": lambda t: torch.tensordot(t, t, 1),
    "norm": torch.norm,
}


def seen_by_a_subclass(
    scope: Callable[[], AbstractContextManager[Any]], call: Callable[[torch.Tensor], Any]
) -> list[Any]:
    tensor = torch.arange(4.0).as_subclass(Recording)
    with scope():
        RECORDED.clear()
        call(tensor)
        return list(RECORDED)


@each_scope
@pytest.mark.parametrize("name", CALLS)
def test_a_subclass_sees_the_calls_it_sees_on_torch(
    name: str, scope: Callable[[], AbstractContextManager[Any]]
) -> None:
    expected = seen_by_a_subclass(nullcontext, CALLS[name])
    assert bool(expected) is not name.startswith("set_")  # which torch shows to nobody
    assert seen_by_a_subclass(scope, CALLS[name]) == expected


@pytest.mark.parametrize("name", RESIZES)
def test_a_subclass_sees_one_call_of_the_same_function_from_a_helper(name: str) -> None:
    expected = seen_by_a_subclass(nullcontext, CALLS[name])
    found = seen_by_a_subclass(nullcontext, lambda t: RESIZES[name](HELPERS, t))
    assert [call[:2] for call in found] == [call[:2] for call in expected]


def _program(x: torch.Tensor, way: Way) -> torch.Tensor:
    y = torch.empty(3)
    torch.add(x, 1, out=y)
    y.mul_(2)
    y[0] = 5
    for stuck in (locked([1.0]), torch.ones(1)):  # what is undone is not shown
        outcome_of(lambda: way.resize_(stuck, 2**62, 4))  # noqa: B023
    outcome_of(lambda: torch.add(torch.ones(3), 1, out=locked([1.0])))
    way.resize_(y, 2)
    way.resize_(y, 3, 3)
    way.resize_as_(y, SOURCE)
    way.set_(torch.ones(3), SOURCE)
    z = torch.nn.functional.relu(y, inplace=True).sum()
    torch._foreach_add_([y], 1)
    return z + y.T.sum()


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@pytest.mark.parametrize("inner", [False, True], ids=["user outside", "user inside"])
@pytest.mark.parametrize("name", [*SCOPES, "helpers"])
def test_a_mode_of_the_user_sees_the_calls_it_sees_on_torch(
    name: str, mode: Any, inner: bool
) -> None:
    seen = []
    for scope, way in (
        (nullcontext, BARE),
        (SCOPES.get(name, nullcontext), HELPERS if name == "helpers" else BARE),
    ):
        users = mode()
        first, second = (scope(), users) if inner else (users, scope())
        with first, second:
            torch.manual_seed(0)
            _program(torch.ones(3), way)
        # A helper spells out arguments that were left out.
        seen.append([call[:2] for call in users.seen] if mode is FunctionMode else users.seen)
    assert len(seen[0]) > 10
    assert seen[1] == seen[0]


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("inner", [False, True], ids=["device outside", "device inside"])
def test_a_device_context_goes_on_working(inner: bool) -> None:
    """And a default device that is set inside stays after the scope."""
    device = torch.device("meta")
    first, second = (guarded(), device) if inner else (device, guarded())
    with first, second:
        assert torch.empty(2).device == device
        assert torch.zeros(2, out=torch.empty(0)).device == device
        assert torch.ones(2).add_(1).device == device
    assert torch.empty(2).device.type == "cpu"
    with guarded():
        torch.set_default_device("meta")
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "meta"


FAILING: dict[str, Callable[[Way], Any]] = {
    "add_": lambda _: torch.ones(2).add_(torch.ones(3)),
    "matmul": lambda _: torch.ones(2).matmul(torch.ones(3)),
    "a bad index": lambda _: torch.index_select(
        torch.ones(3), 0, torch.tensor([0, 99]), out=torch.empty(0)
    ),
    "an output that can't grow": lambda _: torch.add(torch.ones(2), 1, out=locked([1.0])),
    "a number for an output": lambda _: torch.add(torch.ones(2), 1, out=3),  # type: ignore[call-overload]
    "resize_": lambda way: way.resize_(locked([1.0]), 9),
    "resize_ to less than nothing": lambda way: way.resize_(torch.ones(2), -1),
    "resize_ to a letter": lambda way: way.resize_(locked([1.0]), "a"),
    "resize_as_ a number": lambda way: way.resize_as_(locked([1.0]), 3),
    "set_": lambda way: way.set_(locked([1.0]), 3, 4, 5),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_exception_is_torchs_own_and_its_traceback_gains_one_line(name: str) -> None:
    expected = outcome_of(lambda: FAILING[name](BARE)).error
    ways = [(scope, BARE) for scope in SCOPES.values()]
    if name.startswith("resize_ to"):
        ways.insert(0, (nullcontext, HELPERS))  # before a scope has replaced functions
    if name in {"a bad index", "a number for an output", "an output that can't grow"}:
        # "checks" raises its own error, each guard on a path has its line.
        ways.remove((SCOPES["guarded, all four"], BARE))
    for scope, way in ways:
        with scope():
            error = outcome_of(lambda: FAILING[name](way)).error  # noqa: B023
        assert error is not None
        assert (type(error), str(error)) == (type(expected), str(expected))
        assert error.__cause__ is None
        assert error.__context__ is None
        frames = traceback.extract_tb(error.__traceback__)
        # Of a helper its own line, and that of the guard.
        own = sum("torchguard" in frame.filename for frame in frames)
        assert own <= (2 if way is HELPERS else 1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_end_bit_for_bit_where_they_end_outside(name: str) -> None:
    found = []
    for scope in (nullcontext, SCOPES["guarded"], SCOPES["guarded, all four"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = OPTIMIZERS[name](model.parameters())
        x = torch.randn(8, 4)

        def closure() -> float:
            optimizer.zero_grad()  # noqa: B023
            loss = model(x).square().mean()  # noqa: B023
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: B023
            return float(loss.detach())

        with scope(), warnings.catch_warnings():
            warnings.simplefilter("error", torchguard.OverlapWarning)
            for _ in range(3):
                optimizer.step(closure)
        found.append([parameter.tolist() for parameter in model.parameters()])
    assert found[1] == found[2] == found[0]
