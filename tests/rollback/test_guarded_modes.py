"""guarded(): tensor subclasses, modes and tracebacks see what they see on torch."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support.kinds import locked
from support.modes import DispatchMode, FunctionMode, arguments_counted
from support.scopes import each_scope
from support.ways import outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Recording(torch.Tensor):
    seen: list[Any]  # of the class

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.seen.append(arguments_counted(func, types, args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


Recording.seen = []


RECORDED_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: torch.add(t, 1),
    "method add": lambda t: t.add(1),
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(1),
    "setitem": lambda t: t.__setitem__(0, 1),
    "out=": lambda t: torch.add(t, 1, out=t),
    "out= of another": lambda t: torch.add(t, 1, out=torch.empty(4)),
    "linalg out=": lambda t: torch.linalg.norm(t, out=torch.empty(())),
    "attribute": lambda t: t.shape,
    "property": lambda t: t.T,
    "set data": lambda t: setattr(t, "data", torch.ones(4)),
    "a failure": lambda t: outcome_of(lambda: t.add_(torch.ones(9))),
    "a failing out=": lambda t: outcome_of(lambda: torch.add(t, 1, out=locked([1.0]))),
    "relu": lambda t: torch.nn.functional.relu(t, inplace=True),
    "tensordot": lambda t: torch.tensordot(t, t, 1),
    "norm": torch.norm,
}


@each_scope
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECORDED_CALLS)
def test_a_subclass_sees_the_calls_it_sees_on_torch(
    name: str, scope: Callable[[], AbstractContextManager[Any]]
) -> None:
    seen = []
    for each in (nullcontext, scope):
        tensor = torch.arange(4.0).as_subclass(Recording)
        with each():
            Recording.seen.clear()
            RECORDED_CALLS[name](tensor)
            seen.append(list(Recording.seen))
    assert seen[0]
    assert seen[1] == seen[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECORDED_CALLS)
def test_a_subclass_sees_the_calls_it_sees_on_torch_under_install(name: str) -> None:
    seen = []
    for each in (nullcontext, lambda: torchguard.install("resize", "out")):
        tensor = torch.arange(4.0).as_subclass(Recording)
        with each():
            Recording.seen.clear()
            RECORDED_CALLS[name](tensor)
            seen.append(list(Recording.seen))
    assert seen[1] == seen[0]


def _program(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(3)
    torch.add(x, 1, out=y)
    y.mul_(2)
    y[0] = 5
    y.resize_(2)
    y.resize_(3)
    z = torch.nn.functional.relu(y, inplace=True).sum()
    torch._foreach_add_([y], 1)
    return z + y.T.sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@pytest.mark.parametrize("inner", [False, True], ids=["user outside", "user inside"])
def test_a_mode_of_the_user_sees_the_calls_it_sees_on_torch(mode: Any, inner: bool) -> None:
    seen = []
    for scope in (nullcontext, guarded):
        users = mode()
        first, second = (scope(), users) if inner else (users, scope())
        with first, second:
            torch.manual_seed(0)
            _program(torch.ones(3))
        seen.append(users.seen)
    assert len(seen[0]) > 5
    assert seen[1] == seen[0]


@pytest.mark.parametrize("inner", [False, True], ids=["device outside", "device inside"])
def test_a_device_context_goes_on_working(inner: bool) -> None:
    device = torch.device("meta")
    first, second = (guarded(), device) if inner else (device, guarded())
    with first, second:
        assert torch.empty(2).device == device
        assert torch.zeros(2, out=torch.empty(0)).device == device
        assert torch.ones(2).add_(1).device == device
    assert torch.empty(2).device.type == "cpu"


@pytest.mark.usefixtures("default_device")
def test_a_default_device_set_inside_stays_after_the_scope() -> None:
    with guarded():
        torch.set_default_device("meta")
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "meta"
    torch.set_default_device(None)
    assert torch.empty(1).device.type == "cpu"


def test_a_traceback_gains_one_line_for_each_kind_of_call() -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.ones(2).add_(torch.ones(3)),
        lambda: torch.add(torch.ones(2), 1, out=locked([1.0])),
        lambda: torch.ones(2).matmul(torch.ones(3)),
        lambda: torch.ones(2).resize_(-1),
    )
    for call in calls:
        with guarded():
            error = outcome_of(call).error
        assert error is not None
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "torchguard" in frame.filename]
        assert len(ours) <= 1, ours
