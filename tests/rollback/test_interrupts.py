"""A signal handler that raises in the middle of an undo: the undo is finished all the same."""

from __future__ import annotations

import contextlib
import random
import signal
import time
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from torchguard import install, rollback_on_error, safe_resize_
from torchguard.errors import TorchGuardWarning
from torchguard.state import process, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

HUGE = 2**58


class Interrupt(BaseException):
    pass


def _in_a_block(tensor: torch.Tensor) -> None:
    with rollback_on_error(tensor):
        tensor.resize_(HUGE)


def _in_a_block_with_data(tensor: torch.Tensor) -> None:
    with rollback_on_error(tensor, data=True):
        tensor.add_(1)
        tensor.resize_(HUGE)


class Way(NamedTuple):
    call: Callable[[torch.Tensor], Any]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    data: bool = False


WAYS = {
    "safe_resize_": Way(lambda t: safe_resize_(t, HUGE)),
    "install, resize_": Way(lambda t: t.resize_(HUGE), install),
    "install, resize_as_": Way(lambda t: t.resize_as_(torch.empty(1).expand(HUGE)), install),
    "install, set_": Way(
        lambda t: t.set_(torch.empty(1).untyped_storage(), 0, (HUGE,), (1,)), install
    ),
    "install, out=": Way(
        lambda t: torch.add(torch.ones(1).expand(HUGE), 1, out=t), lambda: install("out")
    ),
    "rollback_on_error": Way(_in_a_block),
    "rollback_on_error with data": Way(_in_a_block_with_data, data=True),
}


def _tensor() -> torch.Tensor:
    return torch.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))


@pytest.mark.parametrize("name", WAYS)
def test_an_interrupt_waits_until_every_step_of_the_rollback_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes before each step that restores a part of a tensor, in turn."""
    way = WAYS[name]
    steps: list[bool] = []
    place = 0

    def step(*args: Any, **options: Any) -> None:
        steps.append(False)
        if len(steps) == place:
            signal.raise_signal(signal.SIGINT)
            steps[-1] = True
        original(*args, **options)

    original = tensors.warn_if_refused
    monkeypatch.setattr("torchguard.state.tensors.warn_if_refused", step)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with way.scope():
            while True:
                place += 1
                steps.clear()
                tensor = _tensor()
                with pytest.raises((KeyboardInterrupt, RuntimeError, IndexError)) as caught:
                    way.call(tensor)
                interrupted = any(steps)
                assert (caught.type is KeyboardInterrupt) is interrupted
                with torch._C.DisableTorchFunction():
                    assert tuple(tensor.shape) == (3, 4)
                    assert tensor.untyped_storage().nbytes() == 48
                    assert not way.data or tensor.tolist() == _tensor().tolist()
                    assert torch.is_grad_enabled()
                if not interrupted:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    assert place > 1


def test_a_signal_that_comes_before_the_first_is_deferred_is_raised_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: int) -> None:
        raise Interrupt

    monkeypatch.setattr(process, "_get_handler", interrupted)
    done: list[str] = []
    with pytest.raises(Interrupt):
        process.roll_back(done.append, "restored")
    assert done == ["restored"]


@pytest.mark.parametrize("name", [name for name in WAYS if "rollback_on_error" not in name])
def test_an_interrupt_at_any_moment_of_a_failing_call_leaves_the_tensor_whole(name: str) -> None:
    """Also one that comes while PyTorch's function runs: Python raises it in front of the undo."""
    way, chance = WAYS[name], random.Random(0)  # noqa: S311

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    arrived = 0
    try:
        with way.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(400):
                tensor = _tensor()
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1e-4))
                    with contextlib.suppress(RuntimeError):
                        way.call(tensor)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(1e-4)  # one that is on its way arrives here
                except Interrupt:
                    arrived += 1
                with torch._C.DisableTorchFunction():
                    assert tuple(tensor.shape) == (3, 4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert arrived > 20


def test_a_step_that_torch_refuses_is_a_warning() -> None:
    def refused() -> None:
        raise RuntimeError("no memory")

    with pytest.warns(TorchGuardWarning, match=r"^torchguard: could not: no memory\. See http\S+$"):
        tensors.warn_if_refused(refused, failure="could not")


def test_a_deferred_signal_arrives_where_the_handler_of_an_earlier_one_raises() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    before_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        deferred = process.DeferredSignals()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            deferred.restore_handlers()
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGINT, before_int)
    assert arrived == [signal.SIGUSR1]
