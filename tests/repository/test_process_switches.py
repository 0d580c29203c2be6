"""Threads that use torchguard at once leave the switches of the process as they were."""

from __future__ import annotations

import contextlib
import threading
import warnings

import torch

import torchguard


class Waits:
    """A state that two threads put back at the same time."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: object) -> None:
        self._both.wait()


def fail_in_a_step(both: threading.Barrier) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchguard.transaction(model, optimizer, also=(Waits(both),))
    for _ in range(20):
        with contextlib.suppress(KeyError), step:
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError


def test_two_threads_that_roll_back_at_once_leave_the_filters_alone() -> None:
    fail_in_a_step(threading.Barrier(1))  # what it imports has filters of its own
    before = list(warnings.filters)
    both = threading.Barrier(2, timeout=30)
    threads = [threading.Thread(target=fail_in_a_step, args=[both]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
    assert warnings.filters == before


def test_threads_that_refuse_to_compile_leave_the_stance_as_it_was() -> None:
    """Each scope of torch's set_stance restores what it found, the other thread's."""
    inside, left = threading.Event(), threading.Event()

    def first() -> None:
        with torchguard.no_recompile():
            inside.wait(20)
        left.set()

    def second() -> None:
        with torchguard.no_recompile():
            inside.set()
            left.wait(20)
            refused.append(fails())

    def fails() -> bool:
        try:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        except RuntimeError:
            return True
        return False

    refused: list[bool] = []
    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
        if each is threads[0]:
            inside.wait(0.2)  # until it is in its scope
    for each in threads:
        each.join()
    assert refused == [True]
    assert not fails()
