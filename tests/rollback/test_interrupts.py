"""A signal handler that raises in the middle of an undo: the undo is finished all the same."""

from __future__ import annotations

import dis
import random
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from torchguard import guarded, install, rollback_on_error, safe_resize_
from torchguard.rollback import interrupts, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

HUGE = 2**58
CALLS = 400  # a stress test of 10,000 each found none; before, a third to two thirds were spoiled


class Interrupt(BaseException):
    pass


class Late(Exception):  # noqa: N818  as a library for timeouts names it
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
    "guarded, resize_": Way(lambda t: t.resize_(HUGE), guarded),
    "guarded, index_copy_ with data": Way(
        lambda t: t.index_copy_(0, torch.tensor([0, 7]), torch.ones(2, 4)),
        lambda: guarded(data=True),
        data=True,
    ),
    "rollback_on_error": Way(_in_a_block),
    "rollback_on_error with data": Way(_in_a_block_with_data, data=True),
}


def _tensor() -> torch.Tensor:
    return torch.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))


def _span(way: Way) -> float:
    """How long a failing call and its undo take, in seconds."""
    times = []
    for _ in range(30):
        tensor = _tensor()
        begin = time.perf_counter()
        with pytest.raises((RuntimeError, IndexError)):
            way.call(tensor)
        times.append(time.perf_counter() - begin)
    return sorted(times)[15]


def _spoiled(way: Way, error: type[BaseException]) -> tuple[int, list[str]]:
    """Count the calls that were interrupted, and list what they have left behind."""

    # The kernel may hand the signal to another thread, which comes to it after the timer is off.
    is_on = False

    def handler(*_: object) -> None:
        if is_on:
            raise error

    interrupted, spoiled = 0, []
    chance = random.Random(0)  # noqa: S311
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with way.scope():
            span = 1.3 * _span(way)
            for _ in range(CALLS):
                tensor = _tensor()
                found: BaseException | None = None
                try:
                    try:
                        is_on = True
                        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, span))
                        way.call(tensor)
                    except (error, RuntimeError, IndexError) as caught:
                        found = caught
                    finally:
                        is_on = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except error:
                    pass  # came too late
                interrupted += isinstance(found, error)
                with torch._C.DisableTorchFunction():
                    state = tuple(tensor.shape), tensor.untyped_storage().nbytes()
                    if state != ((3, 4), 48):
                        spoiled.append(f"shape and bytes {state}")
                    elif way.data and tensor.tolist() != _tensor().tolist():
                        spoiled.append("elements")
                    if not torch.is_grad_enabled():
                        spoiled.append("grad mode")
                        torch.set_grad_enabled(True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return interrupted, spoiled


TIMEOUTS = ("safe_resize_", "rollback_on_error with data")


@pytest.mark.parametrize(
    ("name", "error"), [*((name, Interrupt) for name in WAYS), *((name, Late) for name in TIMEOUTS)]
)
def test_an_undo_is_finished_before_the_interrupt_is_raised(
    name: str, error: type[BaseException]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        interrupted, spoiled = _spoiled(WAYS[name], error)
    assert interrupted > CALLS / 4
    assert spoiled == []
    assert [each.message for each in caught if each.category is RuntimeWarning] == []


def test_the_interrupt_says_what_it_has_interrupted() -> None:
    rounds: list[str] = []

    def undo() -> None:
        rounds.append("again")
        if len(rounds) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise RuntimeError("out of memory")  # noqa: TRY301
        except RuntimeError:
            interrupts.finish(undo)
            raise
    assert len(rounds) == 2
    assert str(caught.value.__context__) == "out of memory"


def _uncovered_jumps(code: CodeType) -> Iterator[str]:
    """Yield the functions that loop inside of ``with`` where an interrupt would skip ``__exit__``.

    The jump back of a loop checks for signals, and CPython 3.12 and 3.13 leave that of a loop that
    ends with an ``if`` out of the exception table: https://github.com/python/cpython/issues/130279
    """
    instructions = list(dis.get_instructions(code))
    table = list(dis._parse_exception_table(code))  # type: ignore[attr-defined]
    covered = {offset for entry in table for offset in range(entry.start, entry.end)}
    jumps = [each for each in instructions if each.opname == "JUMP_BACKWARD"]
    for place, handler in enumerate(instructions[2:]):
        if handler.opname == "WITH_EXCEPT_START":
            begins = {each.offset for each in instructions[place : place + 3]}
            entries = [entry for entry in table if entry.target in begins]
            first, last = min(e.start for e in entries), max(e.end for e in entries)
            if any(first <= j.argval < j.offset < last for j in jumps if j.offset not in covered):
                yield f"{code.co_filename}: {code.co_name}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _uncovered_jumps(constant)


@pytest.mark.skipif(not hasattr(dis, "_parse_exception_table"), reason="Python 3.10 has no table")
def test_no_loop_of_an_undo_can_leave_a_with_statement_without_its_exit() -> None:
    files = Path(snapshot.__file__).parent.glob("*.py")
    codes = [compile(path.read_text(encoding="utf-8"), path.name, "exec") for path in files]
    assert [each for code in codes for each in _uncovered_jumps(code)] == []


def test_what_torch_refuses_twice_is_a_warning_and_the_next_step_is_taken() -> None:
    def refused() -> None:
        raise RuntimeError("no memory")

    with pytest.warns(RuntimeWarning, match=r"^could not: no memory$"):
        interrupts.retry_or_warn(refused, failure="could not")


def test_a_large_copy_is_put_back_once_however_often_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    original = snapshot.original_copy_

    def copy_(*args: Any) -> Any:
        copies.append(len(rounds))
        return original(*args)

    monkeypatch.setattr(snapshot, "original_copy_", copy_)
    tensor = torch.ones(3)
    saved = snapshot.capture(tensor, data=True)
    tensor.zero_()
    rounds = [KeyboardInterrupt, KeyboardInterrupt]

    def undo() -> None:
        saved.restore()
        while rounds:
            raise rounds.pop()

    with pytest.raises(KeyboardInterrupt):
        interrupts.finish(undo)
    assert copies == [2]
    assert tensor.tolist() == [1, 1, 1]
    tensor.zero_()  # a snapshot may be restored again
    saved.restore()
    assert copies == [2, 0]
    assert tensor.tolist() == [1, 1, 1]


def test_a_deferred_signal_arrives_where_the_handler_of_an_earlier_one_raises() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    before_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        deferred = interrupts.DeferredSignals()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            deferred.restore_handlers()
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGINT, before_int)
    assert arrived == [signal.SIGUSR1]
