"""Threads that use torchguard at once leave the switches of the process as they were."""

from __future__ import annotations

import threading

import torch

from torchguard._torch import stance


def test_threads_that_refuse_to_compile_leave_the_stance_as_it_was() -> None:
    """Each scope of torch's set_stance restores what it found, the other thread's."""
    inside, left = threading.Event(), threading.Event()

    def first() -> None:
        with stance("fail_on_recompile"):
            inside.wait(20)
        left.set()

    def second() -> None:
        with stance("fail_on_recompile"):
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
