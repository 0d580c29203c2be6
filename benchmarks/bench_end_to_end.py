"""Whole steps of training and of inference, with each guard on and off, by turns.

A decoder of the shape of GPT-2 small (inference: one token more, with keys and values cached by
indexed assignment), convolutions of the shape of ResNet-50, and a tiny perceptron, with random
weights. Each model runs eager and compiled by inductor; each guard compiles for itself. The guard
"none" is the control: it should not differ.
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

from benchmarks.harness import Comparison, Scope, installed, measure, of_its_own
from benchmarks.models import Convolutions, Decoder, DecoderSize
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Row, Table, of_device
from torchguard._torch import graphs_compiled
from torchguard.patching.guards import GUARDS

NONE, ALL = "none", "all"

Call = Callable[..., torch.Tensor]


def scopes(*, quick: bool) -> dict[str, Scope]:
    """Return the scope of each guard by its name, of none, and of all together."""
    each: dict[str, Scope] = {NONE: contextlib.nullcontext}
    each |= {name: installed(name) for name in GUARDS}
    each[ALL] = installed(*GUARDS)
    return {name: scope for name, scope in each.items() if not quick or name in {NONE, ALL}}


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


# Size, batch and tokens of the decoder; depths, channels, batch and side of the convolutions.
OfDecoder = tuple[DecoderSize, int, int]
OfConvolutions = tuple[tuple[int, ...], int, int, int]
Shapes = tuple[OfDecoder, OfConvolutions]
FULL: Shapes = (DecoderSize(), 8, 1024), ((3, 4, 6, 3), 64, 64, 224)
SCALED_DOWN: Shapes = (DecoderSize(4096, 64, 192, 4, 4), 2, 64), ((1, 1, 1, 1), 16, 2, 64)
SMALLEST: Shapes = (DecoderSize(64, 8, 16, 1, 2), 2, 8), ((1,), 4, 2, 16)


def workloads(device: str, *, quick: bool) -> Iterator[Workload]:
    """Yield the models, in training and in inference."""
    torch.manual_seed(0)
    full = device == "cuda" and not quick
    decoder, images = FULL if full else SMALLEST if quick else SCALED_DOWN
    scaled = "" if full else ", scaled down"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    yield from _decoder(f"decoder of the shape of GPT-2 small{scaled}", decoder, device, dtype)
    what = f"convolutions of the shape of ResNet-50{scaled}"
    yield from _convolutions(what, images, device, dtype)
    layers = [nn.Linear(64, 64) for _ in range(3)]  # nearly all of a step is the host's work
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).to(device)
    x = torch.randn(32, 64, device=device)
    yield from _both("perceptron of 3 layers of 64", network, x, lambda y: y.square().mean())


def _decoder(what: str, shape: OfDecoder, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    """Yield a decoder in training, and in inference of one token more."""
    size, batch, length = shape
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
    what: str, shape: OfConvolutions, device: str, dtype: torch.dtype
) -> Iterator[Workload]:
    depths, channels, batch, side = shape
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


def run(setting: Setting) -> Results:
    """Measure every step with every guard; eager ones come first."""
    backend = "eager" if setting.quick else "inductor"
    rows = list[dict[str, Any]]()
    for mode in ("eager", "compiled"):
        for each in workloads(setting.device, quick=setting.quick):
            rows += _measured(each, mode, backend if mode == "compiled" else None, setting)
            torch.compiler.reset()
    return {"rows": rows}


def _measured(
    workload: Workload, mode: str, backend: str | None, setting: Setting
) -> list[dict[str, Any]]:
    plain = workload.prepared(backend)

    def comparisons() -> Iterator[Comparison]:
        for guard, scope in scopes(quick=setting.quick).items():
            with scope():
                before = graphs_compiled()
                step = workload.prepared(backend)
                graphs = graphs_compiled() - before
            compiled = f", {graphs} graphs" if backend else ""
            yield Comparison(
                f"{workload.what}; {workload.phase}, {mode}; {guard}",
                f"{workload.what}; {workload.phase}, {mode}{compiled}",
                {"plain": plain, "step": step},
                "plain()",
                "step()",
                scope,
            )

    return measure(comparisons(), setting, block_seconds=0.03)


def by_guard(record: Row, device: str) -> list[Row]:
    """Return a row for each guard, with its ratio in every step."""
    found: dict[str, dict[str, Any]] = {}
    for row in of_device(record, "rows", device):
        *step, guard = row["id"].split("; ")
        each = found.setdefault(guard, {"guard": guard, "worst": 0.0, "n": row["n"]})
        model = step[0].split()[0]
        each[f"{model}, {step[1]}"] = row["ratio"]["median"]
        if row["ratio"]["median"] > each["worst"]:
            each |= {"worst": row["ratio"]["median"], "worst step": f"{model}, {step[1]}"}
    return list(found.values())


_STEPS = [
    f"{model}, {phase}, {mode}"
    for mode in ("eager", "compiled")
    for model, phases in (
        ("decoder", ("training", "inference of a token")),
        ("convolutions", ("training", "inference")),
        ("perceptron", ("training", "inference")),
    )
    for phase in phases
]
STEPS = Table(
    {"guard": "{guard}", "worst": "{worst:.2f}"} | {step: f"{{{step}:.2f}}" for step in _STEPS},
    lead="A step's time with the guard installed over that of PyTorch alone, medians of {n} rounds "
    "in which both take turns. The guard none is PyTorch twice.",
    rows=by_guard,
)

BENCHMARK = Benchmark(
    "end_to_end",
    "How much longer does a whole step take, of training and of inference, with a guard on?",
    run,
    rounds=11,
    quick_rounds=2,
    needs_triton=True,
    tables=(STEPS,),
)
