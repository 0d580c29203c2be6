"""Whole steps of training and of inference, with the guards on and off, by turns.

A decoder of the shape of GPT-2 small (inference: one token more, with keys and values cached by
indexed assignment), convolutions of the shape of ResNet-50, and a tiny perceptron, with random
weights. Each model runs eager and compiled by inductor; each scope compiles for itself. "nothing,
once more" is the control: it should not differ. Then the peak of the memory, to the byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import torchguard
from benchmarks.clocks import peak_bytes
from benchmarks.counting import counted
from benchmarks.harness import Scope, installed
from benchmarks.models import Convolutions, Decoder, DecoderSize, Perceptron
from benchmarks.paired import Variant, calls_for, of_its_own, ratios, take_turns
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Interval, Spread
from benchmarks.tables import AIM, Table
from torchguard._torch import graphs_compiled

NOTHING, CONTROL = "nothing", "nothing, once more"
EVERY_GUARD = ("resize", "out", "setitem", "slice_scatter", "verified")


SCOPES: dict[str, Scope] = {
    NOTHING: contextlib.nullcontext,
    CONTROL: contextlib.nullcontext,
    "install()": installed("resize"),
    'install("resize", "out", "setitem")': installed("resize", "out", "setitem"),
    "install(), every guard": installed(*EVERY_GUARD),
    "guarded()": torchguard.guarded,
}
QUICK_SCOPES = (NOTHING, "install(), every guard", "guarded()")
NOT_ON_A_GPU = 'install("resize", "out", "setitem")'  # whose minutes are few

# Aimed at on a GPU: a ratio, or no difference outside the noise.
TARGETS = {"install()": 1.001, "install(), every guard": 1.01}

NARROW = 0.001  # width of a 95 % interval, as a share of the step: the target is no wider
FIRST_ROUNDS, MORE_ROUNDS = 8, 4  # every variant stands first equally often in a multiple of these

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

        def infer() -> None:
            with torch.no_grad():
                computes(*inputs)

        def train(optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            computes(*inputs).backward()
            optimizer.step()

        return infer if optimizer is None else partial(train, optimizer)

    def prepared(self, backend: str | None) -> Callable[[], None]:
        """Return a step that has run, compiled if there is a backend."""
        computes = self.computes
        if backend is not None:
            computes = torch.compile(of_its_own(computes), backend=backend)
        step = self.step(computes)
        for _ in range(3):  # compiles, checks, and allocates what stays
            step()
        return step


# Of the decoder: size, batch, tokens. Of the convolutions: depths, channels, batch, side.
DecoderShape = tuple[DecoderSize, int, int]
ConvolutionsShape = tuple[tuple[int, ...], int, int, int]
Shapes = tuple[DecoderShape, ConvolutionsShape]
FULL: Shapes = (DecoderSize(), 8, 1024), ((3, 4, 6, 3), 64, 64, 224)
SCALED_DOWN: Shapes = (DecoderSize(4096, 64, 192, 4, 4), 2, 64), ((1, 1, 1, 1), 16, 2, 64)
QUICK: Shapes = (DecoderSize(64, 8, 16, 1, 2), 2, 8), ((1,), 4, 2, 16)


def workloads(device: str, *, quick: bool) -> Iterator[Workload]:
    """Yield the models, in training and in inference."""
    torch.manual_seed(0)
    full = device == "cuda" and not quick
    shapes = FULL if full else QUICK if quick else SCALED_DOWN
    what = "{} of the shape of {}" if full else "{}, scaled down from {}"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    yield from workloads_of(what, shapes, device, dtype)


def workloads_of(what: str, shapes: Shapes, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    """Yield the models in these shapes; ``what`` is filled with a model and what it is made of."""
    yield from _decoder(what.format("decoder", "GPT-2 small"), shapes[0], device, dtype)
    yield from _convolutions(what.format("convolutions", "ResNet-50"), shapes[1], device, dtype)
    network, x = Perceptron().to(device), torch.randn(32, 64, device=device)
    perceptron = "tiny perceptron: 3 layers of 64, batch 32, float32"
    yield from _both(perceptron, network, x, lambda scores: scores.square().mean())


def _decoder(what: str, shape: DecoderShape, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    """Yield a decoder in training, and in inference of one token more."""
    size, batch, length = shape
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


def _convolutions(
    what: str, shape: ConvolutionsShape, device: str, dtype: torch.dtype
) -> Iterator[Workload]:
    depths, channels, batch, side = shape
    what += (
        f": stages of {', '.join(map(str, depths))} blocks, {channels} channels, batch {batch}, "
        f"{side} x {side} pixels, {str(dtype).removeprefix('torch.')}"
    )
    network = Convolutions(depths, channels).to(device, dtype)
    images = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    classes = torch.randint(1000, (batch,), device=device)
    yield from _both(
        what, network, images, lambda scores: functional.cross_entropy(scores.float(), classes)
    )


def _both(what: str, network: nn.Module, x: torch.Tensor, loss: Call) -> Iterator[Workload]:
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    network.train()
    yield Workload(what, "training", lambda x: loss(network(x)), (x,), optimizer)
    network.eval()
    yield Workload(what, "inference", lambda x: network(x), (x,), None)  # noqa: PLW0108


class Contest:
    """One workload, eager or compiled, prepared in every scope; rounds can be added to it."""

    def __init__(self, workload: Workload, setting: Setting, *, compiled: bool) -> None:
        self.setting = setting
        mode = "compiled" if compiled else "eager"
        self.names = {"what": workload.what, "phase": workload.phase, "mode": mode}
        device, backend = setting.device, "eager" if setting.quick else "inductor"
        self.variants: list[Variant] = []
        self.graphs: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        here = [name for name in SCOPES if device == "cpu" or name != NOT_ON_A_GPU]
        for name in QUICK_SCOPES if setting.quick else here:
            with SCOPES[name]():
                before = graphs_compiled()
                step = workload.prepared(backend if compiled else None)
                self.graphs[name] = graphs_compiled() - before
                on_gpu = device == "cuda"
                self.peaks[name] = peak_bytes(step) if on_gpu else counted(step, device).peak_bytes
            self.variants.append(Variant(name, step, SCOPES[name]))
        self.calls = calls_for(self.variants[0].step, setting.block_seconds(0.03), device)
        self.seconds: dict[str, list[float]] = {name: [] for name in self.graphs}
        self.again = 0

    def add(self, rounds: int) -> None:
        """Measure so many rounds more."""
        before, done = graphs_compiled(), len(self.seconds[NOTHING])
        found = take_turns(self.variants, rounds, self.calls, self.setting.device, first=done)
        for name, times in found.items():
            self.seconds[name] += times
        self.again += graphs_compiled() - before

    def is_narrow(self) -> bool:
        """Whether every interval is as narrow as the target."""
        intervals = ratios(self.seconds, NOTHING).values()
        return all(each.high - each.low <= NARROW for each in intervals)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each scope, with all rounds so far."""
        for name, interval in ratios(self.seconds, NOTHING).items():
            more = self.peaks[name] - self.peaks[NOTHING]
            aimed = self.setting.device == "cuda" and name in TARGETS
            none = {"target": None, "verdict": None}
            yield {
                **self.names,
                "scope": name,
                "device": self.setting.device,
                "n": len(self.seconds[name]),
                "calls": self.calls,  # steps in a block, of which a round's time is the mean
                "nothing_ms": Spread.of([1e3 * value for value in self.seconds[NOTHING]]),
                "scope_ms": Spread.of([1e3 * value for value in self.seconds[name]]),
                "ratio": interval,
                "graphs": self.graphs[name],  # compiled in this scope before the rounds
                # By all scopes together during the rounds; 0 if none disturbs another.
                "compiled_again": self.again,
                "peak_bytes": self.peaks[name],
                "more_bytes": more,
                **(judged(TARGETS[name], interval, more) if aimed else none),
            }


def judged(allowed: float, ratio: Interval, more_bytes: int) -> dict[str, str]:
    """Return what was aimed at on a GPU, in time and memory, and whether it is reached."""
    if more_bytes > 0:
        verdict = f"missed: {more_bytes} bytes more at the peak"
    elif ratio.high <= allowed:
        verdict = "reached"
    elif ratio.holds_one:
        verdict = "reached: not distinguishable from nothing"
    elif ratio.median <= allowed:
        verdict = "reached by the median; the interval goes beyond"
    else:
        verdict = f"missed: {100 * (ratio.median - allowed):.2f} % more than it allows"
    target = f"at most {100 * (allowed - 1):.3g} % more time, and not one byte"
    return {"target": target, "verdict": verdict}


def run(setting: Setting) -> Results:
    """Measure every workload; with ``--seconds`` until its intervals are narrow.

    Eager ones come first, and then what compiles quickest; what is known already is left out.
    """
    stream, rows = setting.stream, list[dict[str, Any]]()
    timed = stream.seconds is not None
    models = list(workloads(setting.device, quick=setting.quick))
    pairs = [(model, False) for model in models] + [(model, True) for model in models[::-1]]
    known = {(row["what"], row["phase"], row["mode"] == "compiled") for row in stream.known("rows")}
    for number, (workload, compiled) in enumerate(pairs, start=1):
        if (workload.what, workload.phase, compiled) in known:
            continue
        if stream.time_is_up():
            break
        contest = Contest(workload, setting, compiled=compiled)
        contest.add(FIRST_ROUNDS if timed else setting.rounds)
        while timed and not contest.is_narrow() and stream.elapsed() < number / len(pairs):
            contest.add(MORE_ROUNDS)
        rows += setting.kept(contest.rows())
        torch.compiler.reset()
    return {"rows": rows}


BENCHMARK = Benchmark(
    "end_to_end",
    "How much longer does a whole step take, of training and of inference, with the guards on?",
    run,
    rounds=101,
    quick_rounds=2,
    tables=(
        Table(
            {
                "model": "{what}",
                "step": "{phase}, {mode}",
                "with": "{scope}",
                "nothing takes": "{nothing_ms.median:.4g} ms",
                "longer": "{ratio.median:change}",
                "95 %": "[{ratio.low:change}, {ratio.high:change}]",
                "memory": "{more_bytes:+d} B",
                "compiled again": "{compiled_again}",
                "target": AIM,
            },
            lead="The ratio is that of a round, the scope's time over that of nothing in the same "
            "round, with the 95 % interval of a bootstrap of the median. An interval that holds 0 "
            "found no difference. Memory is what a step needs more at its peak.",
        ),
    ),
)
