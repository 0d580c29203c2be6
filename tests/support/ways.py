"""The ways to resize: torch's own, and each that torchguard offers, under one interface."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch

import torchguard
from support.kinds import State


class Way(NamedTuple):
    name: str
    scope: Callable[[], AbstractContextManager[Any]]
    resize_: Callable[..., torch.Tensor]
    resize_as_: Callable[..., torch.Tensor]
    set_: Callable[..., torch.Tensor]


def _method(name: str) -> Callable[..., torch.Tensor]:
    """Return what calls the method of this name, looked up when it is called."""
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def _on_torch_resize_as(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.resize_as_(tensor, *args, **kwargs)


METHODS = tuple(map(_method, ("resize_", "resize_as_", "set_")))
BARE = Way("bare", nullcontext, *METHODS)
SAFE = (torchguard.safe_resize_, torchguard.safe_resize_as_, torchguard.safe_set_)
HELPERS = Way("helpers", nullcontext, *SAFE)
INSTALLED = Way("install", torchguard.install, *METHODS)
ON_TORCH = INSTALLED._replace(name="install, torch.resize_as_", resize_as_=_on_torch_resize_as)
GUARDED = Way("guarded", torchguard.guarded, *METHODS)
BOTH = Way("helpers under install", torchguard.install, *SAFE)
WAYS = (HELPERS, INSTALLED, ON_TORCH, GUARDED, BOTH)

each_way = pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])


class Outcome(NamedTuple):
    error: BaseException | None
    result: Any


def ends_the_process(call: Callable[[], Any]) -> bool:
    """Whether a call kills the process it runs in; tried in a copy of this one."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        faulthandler.disable()
        # The threads of the OpenMP pool do not exist in a fork; waiting for them never ends.
        torch.set_num_threads(1)
        outcome_of(call)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != -signal.SIGALRM, "it hung"
    return code < 0


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(None, call())
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt is one of those tried
        return Outcome(error, None)


def differences(before: State, after: State) -> dict[str, tuple[Any, Any]]:
    """What differs between two states, readable in a failing test."""
    return {
        name: (before.get(name), after.get(name))
        for name in {*before, *after}
        if before.get(name) != after.get(name)
    }
