"""Ctrl-C at random microseconds of a training step within transaction()."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from support.fault_injection import reference, transaction
from support.small_training import Case, Training, differences, state_of
from torchguard.transactions.block import opened

# 300 in CI; TORCHGUARD_INTERRUPTS=10000 for the long run.
INTERRUPTS = int(os.environ.get("TORCHGUARD_INTERRUPTS", "300"))
CASES = [
    Case("AdamW", "fused", amp=True, later=True),
    Case("AdamW", "loop", amp=True),
    Case("SGD", "foreach", feature="accumulation"),
]


def whole_block(training: Training) -> float:
    """Return the seconds that a step within a transaction takes."""
    began = time.perf_counter()
    with transaction(training):
        training.blocks[-1]()
    return time.perf_counter() - began


class Interrupted(list[Any]):
    def append(self, each: Any) -> None:
        super().append(each)
        raise KeyboardInterrupt


def test_an_interrupt_behind_the_last_call_of_enter_leaves_no_block_open() -> None:
    """There Python handles a signal, and ``__exit__`` is not called."""
    step: Any = transaction(Training(CASES[0]))
    step._blocks = Interrupted()
    with pytest.raises(KeyboardInterrupt), step:
        pytest.fail("the block has begun")
    assert opened == []


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_is_interrupted_is_undone_or_counts(case: Case) -> None:
    # From an alarm, whose handler runs between two bytecodes as that of Ctrl-C does, so that the
    # interrupt comes after microseconds: setitimer has no SIGINT.
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    plain = reference(case)
    span = 1.2 * sorted(whole_block(Training(case)) for _ in range(9))[4]
    chance = random.Random(0)  # noqa: S311
    interrupted = undone = 0
    wrong: list[str] = []
    try:
        tries = INTERRUPTS // len(CASES)
        for number in range(10 * tries):  # on a busy machine an alarm often comes after the block
            if number >= tries and interrupted > tries / 3:
                break
            training = Training(case)
            for block in training.blocks[:-1]:
                block()
            before = state_of(training)
            step = transaction(training)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, span))
                    with step:
                        training.blocks[-1]()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(1e-4)  # one that is on its way arrives here
            except KeyboardInterrupt:
                interrupted += 1
            now = state_of(training)
            if not differences(now, before):
                undone += 1
            elif lost := differences(now, plain.at_commit, plain.end):
                wrong.append(", ".join(lost))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    assert wrong == []
    assert interrupted > tries / 3
    assert undone > 0
