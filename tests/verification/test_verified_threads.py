"""Threads that call what is verified leave Dynamo's settings and the logs of others alone."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchguard import install, verified
from torchguard.verification.graph import unlogged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("fresh_reports")

NAMES = ("automatic_dynamic_shapes", "assume_static_by_default")
WAIT = 60.0


def settings() -> list[Any]:
    return [getattr(torch._dynamo.config, name) for name in NAMES]


@pytest.fixture(autouse=True)
def before() -> Iterator[list[Any]]:
    """Put Dynamo's settings back, whatever a test has done to them."""
    found = settings()
    yield found
    for name, value in zip(NAMES, found, strict=True):
        setattr(torch._dynamo.config, name, value)


class Meeting:
    """Two calls at the same time; the one that enters first leaves first."""

    def __init__(self) -> None:
        self._first: threading.Thread | None = None
        self._first_entered, self._second_entered, self._first_left = (
            threading.Event() for _ in range(3)
        )

    def meet(self) -> None:
        if self._first is None:  # a call that compiles, before there are two
            return
        if threading.current_thread() is self._first:
            self._first_entered.set()
            assert self._second_entered.wait(WAIT)
        else:
            self._second_entered.set()
            assert self._first_left.wait(WAIT)

    def call_twice(self, call: Callable[[], object]) -> None:
        call()
        self._first = threading.Thread(target=lambda: (call(), self._first_left.set()))
        self._first.start()
        assert self._first_entered.wait(WAIT)
        call()
        self._first.join()


def function_that(meet: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    untraced = torch.compiler.disable(meet)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        untraced()
        return y

    return doubled


class Doubled(nn.Module):
    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.forward = function_that(meet)


def in_place(module: nn.Module, dynamic: bool) -> nn.Module:
    module.compile(dynamic=dynamic)
    return module


MAKERS: dict[str, Callable[[Callable[[], None], bool], Any]] = {
    "function": lambda meet, dynamic: verified(
        function_that(meet), backend="eager", dynamic=dynamic
    ),
    "module": lambda meet, dynamic: verified(Doubled(meet), backend="eager", dynamic=dynamic),
    "compiled": lambda meet, dynamic: verified(torch.compile(function_that(meet), dynamic=dynamic)),
    "installed": lambda meet, dynamic: torch.compile(function_that(meet), dynamic=dynamic),
    "installed, a decorator": lambda meet, dynamic: torch.compile(dynamic=dynamic)(
        function_that(meet)
    ),
    "installed, a module": lambda meet, dynamic: torch.compile(Doubled(meet), dynamic=dynamic),
    "installed, in place": lambda meet, dynamic: in_place(Doubled(meet), dynamic),
}


@pytest.mark.parametrize(
    ("how", "dynamic"),
    [
        ("function", False),
        ("function", True),
        ("module", False),
        *(pytest.param(how, False, marks=pytest.mark.slow) for how in list(MAKERS)[2:]),
    ],
)
def test_settings_of_dynamo_are_as_before(how: str, dynamic: bool, before: list[Any]) -> None:
    """Up to torch 2.11 two calls at the same time left them changed for the whole process."""
    meeting = Meeting()
    with install("verified") if how.startswith("installed") else contextlib.nullcontext():
        doubled = MAKERS[how](meeting.meet, dynamic)

    def call() -> None:
        assert doubled(torch.ones(3)).tolist() == [2, 2, 2]

    meeting.call_twice(call)
    assert settings() == before


@pytest.mark.parametrize(("dynamic", "graphs"), [(False, 4), (None, 2), (True, 1)])
def test_dynamic_means_what_it_means_to_torch_compile(dynamic: bool | None, graphs: int) -> None:
    """Also for what is compiled behind a graph break."""

    def halved(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x / 2

    checked = verified(halved, backend="eager", dynamic=dynamic)
    for size in (3, 4, 5, 6):
        assert checked(torch.ones(size)).tolist() == [0.5] * size
    assert len(checked.stats().graphs) == graphs


def test_only_this_thread_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch.something")
    with unlogged():
        log.error("this thread")
        other = threading.Thread(target=log.error, args=["another thread"])
        other.start()
        other.join()
    log.error("afterwards")
    assert [record.message for record in caplog.records] == ["another thread", "afterwards"]
