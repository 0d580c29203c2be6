"""bucketed() called by several threads: Dynamo's recompile limit is never reached."""

from __future__ import annotations

import importlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from support.bucketed import Counting, in_time

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.__version__.startswith("2.11."),
        reason="its guards end the process when threads compile, without torchguard too",
    ),
]

_COUNT = 10  # more than the recompile limit, which is 8
_SIZES = [4 * (index + 1) for index in range(_COUNT)]


class _Limits(logging.Handler):
    """Keep what Dynamo logs about its limits."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "limit" in record.getMessage():
            self.said.append(record.getMessage())


@pytest.fixture
def limits() -> Iterator[_Limits]:
    """What Dynamo logs about its limits while the test runs."""
    torch.compiler.reset()
    importlib.import_module("torch._dynamo")
    handler, logger = _Limits(), logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    torch.compiler.reset()


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class _Broken(nn.Module):
    """A model whose blocks Dynamo compiles as frames of their own, shared by all buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _sequential()

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._block(x) * 2


def _in_threads(work: Callable[[int], None], count: int = 8) -> None:
    together = threading.Barrier(count)
    with ThreadPoolExecutor(count, initializer=together.wait) as pool:
        list(pool.map(work, range(count)))


def test_the_limit_is_not_reached(limits: _Limits) -> None:
    """8 threads, 10 buckets: every result is right, and Dynamo says nothing of a limit."""
    backend = Counting()
    model = _Broken().eval()
    wrapped = in_time(model, buckets=_SIZES, compile={"backend": backend})
    wrong = []

    def work(index: int) -> None:
        chance = random.Random(index)  # noqa: S311
        sizes = [size - chance.randint(0, 3) for size in _SIZES]
        chance.shuffle(sizes)
        for size in sizes * 2:
            x = torch.randn(2, size, 4)
            found = wrapped(x)
            if not torch.allclose(found, model(x), atol=1e-5):
                wrong.append(size)

    _in_threads(work)
    assert limits.said == []
    assert wrong == []
    assert len(wrapped.stats().hits) == _COUNT


def test_a_later_call_that_compiles_reaches_no_limit(limits: _Limits) -> None:
    """What a bucket's plan does not know, an input that wants a gradient, compiles anew."""
    backend = Counting()
    wrapped = in_time(_Broken(), buckets=_SIZES, compile={"backend": backend})
    for size in _SIZES:
        wrapped(torch.ones(2, size, 4))
    before = len(backend.graphs)
    for size in _SIZES:
        wrapped(torch.ones(2, size, 4, requires_grad=True))
    assert limits.said == []
    after = len(backend.graphs)
    assert after >= before + _COUNT
    for size in _SIZES:
        wrapped(torch.ones(2, size, 4))
        wrapped(torch.ones(2, size, 4, requires_grad=True))
    assert len(backend.graphs) == after


def test_threads_compile_each_bucket_once(limits: _Limits) -> None:
    """Each mode of a bucket has a function of its own: Dynamo finds its only entry."""
    backend = Counting()
    wrapped = in_time(_sequential(), buckets=_SIZES, compile={"backend": backend})

    def work(index: int) -> None:
        with torch.set_grad_enabled(index % 2 == 0):
            for turn in range(100):
                wrapped(torch.ones(2, _SIZES[(turn + index) % _COUNT], 4))

    _in_threads(work)
    assert limits.said == []
    assert len(backend.graphs) == 2 * _COUNT
