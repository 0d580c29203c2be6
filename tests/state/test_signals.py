"""Signals that wait for the end of a block, or of several, in whatever order they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import run_python

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


class Trained:
    """A model, its optimizer and their transaction."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.block = torchguard.transaction(self.model, self.optimizer)

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def arrived() -> Iterator[list[int]]:
    """The signals that the program's own handlers have seen."""
    seen: list[int] = []
    before = {each: signal.signal(each, lambda number, _: seen.append(number)) for each in SIGNALS}
    yield seen
    for each, handler in before.items():
        signal.signal(each, handler)


# Each opens and leaves two blocks; `reach` is called where a step has been made in both.
Reach = Callable[[], None]


def inner_first(g: Trained, d: Trained, reach: Reach) -> None:
    with g.block, d.block:
        d.step()
        g.step()
        reach()


def outer_first(g: Trained, d: Trained, reach: Reach) -> None:
    with g.block, d.block:
        g.step()
        d.step()
        reach()


def nested(g: Trained, d: Trained, reach: Reach) -> None:
    with g.block:
        with d.block:
            d.step()
        g.step()
        with d.block:
            d.step()
            reach()


def tasks(g: Trained, d: Trained, reach: Reach) -> None:
    async def train(each: Trained, *waits: int) -> None:
        with each.block:
            await asyncio.sleep(waits[0])
            each.step()
            for _ in range(waits[1]):
                await asyncio.sleep(0)

    async def both() -> None:
        first = asyncio.ensure_future(train(g, 0, 3))
        second = asyncio.ensure_future(train(d, 0, 9))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reach()
        await asyncio.gather(first, second)

    asyncio.run(both())


def generators(g: Trained, d: Trained, reach: Reach) -> None:
    def loop(each: Trained) -> Iterator[None]:
        while True:
            with each.block:
                each.step()
                yield

    first, second = loop(g), loop(d)
    for each in (first, second, first, second):
        next(each)
    reach()
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]


def left_as_opened(g: Trained, d: Trained, reach: Reach) -> None:
    stacks = [contextlib.ExitStack() for _ in range(2)]
    for stack, each in zip(stacks, (g, d), strict=True):
        stack.enter_context(each.block)
        each.step()
    reach()
    for stack in stacks:
        stack.close()


def one_fails(g: Trained, d: Trained, reach: Reach) -> None:
    with g.block:
        g.step()
        with contextlib.suppress(ZeroDivisionError), d.block:
            d.step()
            raise ZeroDivisionError
        reach()


def rolled_back_inside(g: Trained, d: Trained, reach: Reach) -> None:
    with g.block:
        g.step()
        with contextlib.suppress(ZeroDivisionError), d.block:
            raise ZeroDivisionError
        reach()


def left_by_another_thread(g: Trained, d: Trained, reach: Reach) -> None:
    stack = contextlib.ExitStack()
    stack.enter_context(g.block)
    g.step()
    with d.block:
        d.step()
        reach()
    thread = threading.Thread(target=stack.close)
    thread.start()
    thread.join()


WAYS = [
    inner_first, outer_first, nested, tasks, generators, left_as_opened, one_fails,
    rolled_back_inside, left_by_another_thread,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_each_signal_arrives_once_and_later_ones_do_not_wait(way: Any, arrived: list[int]) -> None:
    """One that comes inside of two blocks waits for the end of both."""
    handlers = list(map(signal.getsignal, SIGNALS))
    g, d = Trained(), Trained()
    inside: list[list[int]] = []

    def reach() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        inside.append(list(arrived))

    way(g, d, reach)
    assert inside == [[]]
    assert arrived == [signal.SIGTERM]
    for each in SIGNALS:
        signal.raise_signal(each)
    assert arrived == [signal.SIGTERM, *SIGNALS]
    if way is not left_by_another_thread:
        assert list(map(signal.getsignal, SIGNALS)) == handlers
    inner_first(g, d, lambda: None)
    assert list(map(signal.getsignal, SIGNALS)) == handlers
    assert g.block.committed
    assert d.block.committed


def test_a_second_one_does_not_wait_for_two_blocks(arrived: list[int]) -> None:
    g, d = Trained(), Trained()
    with g.block, d.block:
        d.step()
        g.step()
        signal.raise_signal(signal.SIGINT)
        assert arrived == []
        signal.raise_signal(signal.SIGINT)
        assert arrived == [signal.SIGINT] * 2
    assert arrived == [signal.SIGINT] * 2


@pytest.mark.parametrize("sets_back", [False, True])
def test_a_handler_that_the_program_sets_inside_of_a_block_stays(
    sets_back: bool, arrived: list[int]
) -> None:
    """Also the one that ``signal.signal`` returned there, which is ours, when no block is open."""
    g, own = Trained(), []
    with g.block:
        g.step()
        mine = lambda number, _: own.append(number)  # noqa: E731
        before = signal.signal(signal.SIGUSR1, mine)
    assert signal.getsignal(signal.SIGUSR1) is mine
    if sets_back:
        signal.signal(signal.SIGUSR1, before)
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
        assert (arrived, own) == (([10], []) if sets_back else ([], [10]))
        with g.block:
            g.step()
        arrived.clear()
        own.clear()


CHILD = """
import os, signal, time, torch, torchguard
from torch import nn

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torchguard.transaction(model, optimizer)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with step:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status)
"""


def test_a_child_that_is_forked_inside_of_a_block_gets_its_signals() -> None:
    assert run_python(CHILD).stdout.split() == ["7"]
