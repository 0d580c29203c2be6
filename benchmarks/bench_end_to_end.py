"""Whole steps of training and of inference, with the guards on and off, by turns.

    python benchmarks/bench_end_to_end.py --json benchmarks/records/<date>-end_to_end-cpu.json

A decoder of the shape of GPT-2 small (inference: one token more, with keys and values cached by
indexed assignment), convolutions of the shape of ResNet-50, and a tiny perceptron; weights are
random. On a CPU the two large ones are scaled down; each row says to what. Each model runs eager
and compiled by inductor; each scope compiles for itself, with its guards on.

Scopes take turns within a round (``paired.py``); the ratio of a round is the scope's time over that
of nothing in the same round, and its 95 % interval is a bootstrap of the median. "nothing, once
more" is the control: it should not differ. Then the peak of the memory, to the byte.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torchguard
from benchmarks.counting import counted
from benchmarks.harness import Scope
from benchmarks.models import Convolutions, Decoder, DecoderSize, Perceptron
from benchmarks.paired import Variant, calls_for, ratios, take_turns
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Interval, Spread
from torchguard.internals import graphs_compiled

NOTHING, CONTROL = "nothing", "nothing, once more"
EVERY_GUARD = ("resize", "out", "setitem", "slice_scatter", "verify")


def _installed(*names: str) -> Scope:
    return partial(torchguard.install, *names, only_if_needed=False)


SCOPES: dict[str, Scope] = {
    NOTHING: contextlib.nullcontext,
    CONTROL: contextlib.nullcontext,
    "install()": _installed("resize"),
    'install("resize", "out", "setitem")': _installed("resize", "out", "setitem"),
    "install(), every guard": _installed(*EVERY_GUARD),
    "guarded()": torchguard.guarded,
}
QUICK_SCOPES = (NOTHING, "install(), every guard", "guarded()")

# Aimed at on a GPU: a ratio, or no difference that could be told from none.
TARGETS = {"install()": 1.001, "install(), every guard": 1.01}
TARGETS['install("resize", "out", "setitem")'] = TARGETS["install(), every guard"]

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A step: what it computes may be compiled, what is around it is not."""

    what: str
    phase: str
    computes: Call
    """Takes ``inputs``; returns the loss, or what inference gives."""

    inputs: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer | None

    def step(self, computes: Call) -> Callable[[], None]:
        """Return one step with what computes, compiled or not."""
        optimizer, inputs = self.optimizer, self.inputs
        if optimizer is None:

            def infer() -> None:
                with torch.no_grad():
                    computes(*inputs)

            return infer

        def train() -> None:
            optimizer.zero_grad()
            computes(*inputs).backward()
            optimizer.step()

        return train


@dataclass(frozen=True)
class Paired:
    """One scope against nothing."""

    what: str
    phase: str
    mode: str
    scope: str
    device: str
    n: int
    calls: int
    """Steps in a block, of which a round's time is the mean."""

    nothing_ms: Spread
    scope_ms: Spread
    ratio: Interval
    graphs: int
    """Compiled in this scope before the rounds."""

    compiled_again: int
    """Compiled during the rounds, by all scopes together; 0 if none disturbs another."""

    peak_bytes: int
    more_bytes: int
    """At the peak, over nothing's."""

    target: str | None = None
    verdict: str | None = None


def workloads(device: str, *, quick: bool) -> Iterator[Workload]:
    """Yield the models, in training and in inference."""
    torch.manual_seed(0)
    yield from _decoder(device, quick=quick)
    yield from _convolutions(device, quick=quick)
    yield from perceptron_steps(device)


def _decoder(device: str, *, quick: bool) -> Iterator[Workload]:
    size, batch, length, what = DecoderSize(), 8, 1024, "decoder of the shape of GPT-2 small"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu" or quick:
        size = DecoderSize(vocabulary=4096, context=64, width=192, layers=4, heads=4)
        batch, length, what = 2, 64, "decoder, scaled down from GPT-2 small"
    if quick:
        size = DecoderSize(vocabulary=64, context=8, width=16, layers=1, heads=2)
        length = 8
    yield from decoder_steps(what, size, batch, length, device, dtype)


def decoder_steps(  # noqa: PLR0917 - the shape of a model and of its input
    what: str, size: DecoderSize, batch: int, length: int, device: str, dtype: torch.dtype
) -> Iterator[Workload]:
    """Yield a decoder in training, and in inference of one token more."""
    what += (
        f": {size.layers} layers of {size.width}, {size.vocabulary:,} words, batch {batch}, "
        f"{length} tokens, {str(dtype).removeprefix('torch.')}"
    )
    model = Decoder(size).to(device, dtype)
    ids = torch.randint(size.vocabulary, (batch, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def loss(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids)[:, :-1].flatten(0, 1).float()
        return functional.cross_entropy(scores, ids[:, 1:].flatten())

    yield Workload(what, "training", loss, (ids,), optimizer)
    caches = model.caches(batch)
    position = torch.tensor([length // 2], device=device)

    def token(ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model.advance(ids, caches, position)

    yield Workload(what, "inference of a token", token, (ids[:, :1], position), None)


def _convolutions(device: str, *, quick: bool) -> Iterator[Workload]:
    batch, side, what = 64, 224, "convolutions of the shape of ResNet-50"
    depths: tuple[int, ...] = (3, 4, 6, 3)
    channels = 64
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu" or quick:
        depths, channels, batch, side = (1, 1, 1, 1), 16, 2, 64
        what = "convolutions, scaled down from ResNet-50"
    if quick:
        depths, channels, side = (1,), 4, 16
    yield from convolution_steps(what, depths, channels, batch, side, device, dtype)


def convolution_steps(  # noqa: PLR0917 - the shape of a network and of its input
    what: str,
    depths: tuple[int, ...],
    channels: int,
    batch: int,
    side: int,
    device: str,
    dtype: torch.dtype,
) -> Iterator[Workload]:
    """Yield a residual network in training and in inference."""
    what += (
        f": stages of {', '.join(map(str, depths))} blocks, {channels} channels, batch {batch}, "
        f"{side} x {side} pixels, {str(dtype).removeprefix('torch.')}"
    )
    network = Convolutions(depths, channels).to(device, dtype)
    images = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    classes = torch.randint(1000, (batch,), device=device)
    yield from _both(what, network, images, lambda scores: _wrong(scores, classes))


def _wrong(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.float(), classes)


def perceptron_steps(device: str) -> Iterator[Workload]:
    """Yield the perceptron in training and in inference."""
    network, x = Perceptron().to(device), torch.randn(32, 64, device=device)
    what = "tiny perceptron: 3 layers of 64, batch 32, float32"
    yield from _both(what, network, x, lambda scores: scores.square().mean())


def _both(what: str, network: nn.Module, x: torch.Tensor, loss: Call) -> Iterator[Workload]:
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    network.train()
    yield Workload(what, "training", lambda x: loss(network(x)), (x,), optimizer)
    network.eval()
    yield Workload(what, "inference", lambda x: network(x), (x,), None)  # noqa: PLW0108


def measured(workload: Workload, setting: Setting, *, compiled: bool) -> list[Paired]:
    """Run one workload in every scope, by turns."""
    device, backend = setting.device, "aot_eager" if setting.quick else "inductor"
    names = [name for name in SCOPES if not setting.quick or name in QUICK_SCOPES]
    variants, graphs, peaks = [], {}, {}
    for name in names:
        with SCOPES[name]():
            before = graphs_compiled()
            computes = workload.computes
            if compiled:
                computes = torch.compile(of_its_own(computes), backend=backend)
            step = workload.step(computes)
            for _ in range(3):  # compiles, checks, and allocates what stays
                step()
            graphs[name] = graphs_compiled() - before
            peaks[name] = counted(step, device).peak_bytes
        variants.append(Variant(name, step, SCOPES[name]))
    before = graphs_compiled()
    calls = calls_for(variants[0].step, setting.block_seconds(0.03), device)
    found = take_turns(variants, setting.rounds, calls, device)
    again = graphs_compiled() - before
    intervals = ratios(found, NOTHING)
    rows = []
    for name in names[1:]:
        row = Paired(
            what=workload.what,
            phase=workload.phase,
            mode="compiled" if compiled else "eager",
            scope=name,
            device=device,
            n=setting.rounds,
            calls=calls,
            nothing_ms=Spread.of([1e3 * value for value in found[NOTHING]]),
            scope_ms=Spread.of([1e3 * value for value in found[name]]),
            ratio=intervals[name],
            graphs=graphs[name],
            compiled_again=again,
            peak_bytes=peaks[name],
            more_bytes=peaks[name] - peaks[NOTHING],
        )
        rows.append(_judged(row))
        print(_line(rows[-1]))
    return rows


def of_its_own(function: Any) -> Any:
    """Dynamo keeps its decisions with the code: each scope gets a copy, and compiles for itself."""
    copy = type(function)(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _judged(row: Paired) -> Paired:
    if row.device != "cuda" or row.scope not in TARGETS:
        return row
    allowed = TARGETS[row.scope]
    if row.more_bytes > 0:
        verdict = f"missed: {row.more_bytes} bytes more at the peak"
    elif row.ratio.high <= allowed:
        verdict = "reached"
    elif row.ratio.holds_one:
        verdict = "reached: not distinguishable from nothing"
    elif row.ratio.median <= allowed:
        verdict = "reached by the median; the interval goes beyond"
    else:
        verdict = f"missed: {100 * (row.ratio.median - allowed):.2f} % more than it allows"
    target = f"at most {100 * (allowed - 1):.3g} % more time, and not one byte"
    return replace(row, target=target, verdict=verdict)


def _line(row: Paired) -> str:
    return (
        f"{row.what.partition(':')[0][:24]:24} {row.phase[:9]:9} {row.mode:8} {row.scope:36} "
        f"{row.nothing_ms.median:8.3f} ms {row.ratio.median:.4f} "
        f"[{row.ratio.low:.4f}, {row.ratio.high:.4f}] {row.more_bytes:+d} bytes"
        + (f": {row.verdict}" if row.verdict else "")
    )


def run(setting: Setting) -> Results:
    """Measure every workload, eager and compiled."""
    rows: list[Paired] = []
    for workload in workloads(setting.device, quick=setting.quick):
        for compiled in (False, True):
            rows += measured(workload, setting, compiled=compiled)
            torch.compiler.reset()
    return {"rows": rows}


BENCHMARK = Benchmark(
    "end_to_end",
    "How much longer does a whole step take, of training and of inference, with the guards on?",
    run,
    rounds=101,
    quick_rounds=2,
    rounds_of="rounds per workload",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
