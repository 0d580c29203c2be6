"""A stream of batches whose lengths vary, through a small transformer, in the ways there are.

Each row is a process of its own, whose compiler cache has only what torch prepares once per machine
(precompiled headers, what the CPU can do). It runs the stream twice: from a cold start, with the
checks of ``bucketed``, and in the steady state. Padding by hand lifts the recompile limit.
Compiling takes most of the time.

Then the host's time that ``bucketed`` adds to a call of the compiled function, for 1 to 64 buckets.

Shapes: B batch, T time, D features.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import Comparison, measure, of_its_own
from benchmarks.program import Benchmark, Case, Results, Setting, in_a_process
from benchmarks.tables import Table
from torchguard import Buckets, bucketed
from torchguard._torch import graphs_compiled
from torchguard.bucketing.histogram import batch_maxima

BATCH, FEATURES, LAYERS, HEADS, WORDS = 8, 64, 1, 4, 500
LONGEST = 256
# Of the logarithm of a sequence's length: half are shorter than 55.
MEAN, DEVIATION = 4.0, 0.6
BATCHES = 120
COUNTS = (1, 8, 64)

PHASES = ("forward", "training")
DYNAMIC = {"compile": None, "compile dynamic=True": True}
LADDERS: dict[str, Callable[[], Buckets]] = {
    "by hand: maximum": lambda: Buckets([LONGEST]),
    "by hand: powers of two": lambda: Buckets.powers_of_two(16, LONGEST),
    "by hand: the buckets of fit 8": lambda: fitted(8),
}
OURS_OF: dict[str, int | None] = {"bucketed fit 8": 8, "bucketed, powers of two": None}
"""How many buckets are fitted; None: they are powers of two, as they are needed."""

ROWS = ("eager", *DYNAMIC, *LADDERS, *OURS_OF)


class Model(nn.Module):
    """An encoder that classifies every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, FEATURES)
        sizes = FEATURES, HEADS, 4 * FEATURES
        layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(FEATURES, WORDS)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Take ids (B, T) and padding (B, T), True where nothing is; return (B, T, WORDS)."""
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        scores: torch.Tensor = self.head(hidden)
        return scores


def lengths_of_stream(batches: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw the lengths of every sequence: (batches, B), log-normal."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(MEAN, DEVIATION, (batches, BATCH)).clip(4, LONGEST)
    return drawn.astype(np.int64)


def fitted(count: int) -> Buckets:
    """Fit a ladder to another sample of the same lengths."""
    sample = np.random.default_rng(1).lognormal(MEAN, DEVIATION, 4096).clip(4, LONGEST)
    sizes = batch_maxima(sample.astype(np.int64).tolist(), BATCH, "bench_buckets")
    return Buckets.fit(sizes, count, multiple_of=8, maximum=LONGEST)


def wrapped(
    row: str, model: Model, mode: str | None, backend: str = "inductor"
) -> tuple[Callable[..., Any], Any]:
    """Return what a row calls, and its bucketed module if it has one."""
    options: dict[str, Any] = {"backend": backend} if mode is None else {"mode": mode}
    if row == "eager":
        return model, None
    if row in DYNAMIC:
        return torch.compile(model, dynamic=DYNAMIC[row], **options), None
    if row in LADDERS:
        ladder = LADDERS[row]()
        config: Any = importlib.import_module("torch._dynamo.config")
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, 256)
        compiled: Any = torch.compile(model, dynamic=False, **options)

        def padded(ids: torch.Tensor, padding: torch.Tensor) -> Any:
            length = ids.shape[1]
            if missing := ladder.bucket_for(length) - length:
                ids = functional.pad(ids, (0, missing))
                padding = functional.pad(padding, (0, missing), value=True)
            return compiled(ids, padding)[:, :length]

        return padded, None
    count = OURS_OF[row]
    declared: dict[str, Any] = {} if count is None else {"buckets": fitted(count)}
    module: Any = bucketed(
        model,
        dims={"ids": {1: "t"}, "padding": {1: "t"}},
        **declared,
        mask={"padding": "padding"},
        compile=options,
    )
    return module, module


def run_row(  # noqa: PLR0917 - called in a process of its own, with these as JSON
    row: str, phase: str, device: str, batches: int, mode: str | None, backend: str = "inductor"
) -> dict[str, Any]:
    """Run the stream twice and return what it took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model().to(device)
    model.train(phase == "training")
    lengths = lengths_of_stream(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    stream = []
    for each in lengths:
        longest = int(each.max())
        ids = torch.randint(1, WORDS, (BATCH, longest), generator=generator).to(device)
        padding = (torch.arange(longest) >= torch.from_numpy(each)[:, None]).to(device)
        stream.append((ids, padding))

    def step(call: Callable[..., Any], ids: torch.Tensor, padding: torch.Tensor) -> None:
        if phase == "forward":
            with torch.no_grad():
                call(ids, padding)
        else:
            labels = ids.masked_fill(padding, -100)
            loss = functional.cross_entropy(call(ids, padding).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    passes: list[list[float]] = []
    begun = time.perf_counter()
    call, module = wrapped(row, model, mode, backend)
    with recordings() as recorded:
        for _ in range(2):
            seconds = []
            for ids, padding in stream:
                step(call, ids, padding)
                seconds.append(time.perf_counter() - begun)
                begun = time.perf_counter()
            passes.append(seconds)
    graphs, sizes = graphs_compiled(), [int(each) for each in lengths.max(1)]
    if row in LADDERS:
        sizes = [LADDERS[row]().bucket_for(each) for each in sizes]
    # As stats().waste counts it, with the padding inside of a batch.
    waste = sum(sizes) * lengths.shape[1] / int(lengths.sum()) - 1
    if module is not None:
        waste, graphs = module.stats().waste, module.stats().graphs
    return {
        "total_s": sum(passes[0]),
        "steady_ms": 1e3 * statistics.median(passes[1]),
        "graphs": graphs,
        "recompiles": max(graphs - 1, 0),
        "waste": waste,
        "cuda_graphs": len(recorded),
        "gpu_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
    }


def prepare(device: str) -> None:
    """Compile something; torch then keeps what it prepares once per machine."""
    torch.compile(lambda x: x + 1)(torch.ones(8, device=device))


def streams(setting: Setting, folder: Path) -> Iterator[Case]:
    """Yield every row of every phase: a process of its own, whose cache is only prepared."""
    quick, options, device = setting.quick, setting.options, setting.device
    rows = ["bucketed fit 8"] if quick else list(ROWS)
    if options.rows is not None:  # in the order in which they were named
        parts = options.rows.split(",")
        rows = list(dict.fromkeys(row for part in parts for row in ROWS if part in row))
    phases = [options.phase] if options.phase else PHASES[-1:] if quick else PHASES
    modes = [None, "reduce-overhead"] if device == "cuda" and not quick else [None]
    if options.mode is not None and not quick:
        modes = [None if options.mode == "default" else options.mode]
    backend = "aot_eager" if quick else "inductor"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    process = partial(in_a_process, environment=cache)
    if backend == "inductor":
        process(prepare, device)
    prepared = set(folder.rglob("*"))

    def alone(*row: Any) -> dict[str, Any]:
        for path in sorted(set(folder.rglob("*")) - prepared, reverse=True):  # of earlier rows
            remove = path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink
            remove()
        found: dict[str, Any] = process(run_row, *row)
        return found

    for mode, phase, row in itertools.product(modes, phases, rows):
        if row != "eager" or mode is None:
            batches = 2 if quick else options.batches
            names = {"row": row if mode is None else f"{row}, {mode}", "phase": phase}
            yield names, partial(alone, row, phase, device, batches, mode, backend)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run so little that what is around it shows."""
    return x * 2 + y


def overheads(*, quick: bool) -> Iterator[Comparison]:
    """Compare a call of a compiled function with one of ``bucketed``, exact and padded."""
    for count in COUNTS[:1] if quick else COUNTS:
        sizes = [8 * (index + 1) for index in range(count)]
        call = bucketed(
            add,
            dims={"x": {1: "t"}, "y": {1: "t"}},
            buckets=Buckets(sizes),
            compile={"backend": "eager"},
            check_padding="never",
        )
        exact, short = ((torch.ones(2, n), torch.ones(2, n)) for n in (sizes[-1], sizes[-1] - 1))
        for size in sizes:
            call(torch.ones(2, size), torch.ones(2, size))
        call(*short)
        plain: Any = torch.compile(of_its_own(add), backend="eager", dynamic=False)
        plain(*exact)
        names = {"plain": plain, "call": call, "exact": exact, "short": short, "F": functional}
        padded = "plain(F.pad(short[0], (0, 1)), F.pad(short[1], (0, 1)))[:, :-1]"
        what = f"{count} buckets, "
        exactly = "plain(*exact)", "call(*exact)"
        yield Comparison(f"exact-{count}", what + "exact fit", names, *exactly)
        yield Comparison(f"padded-{count}", what + "padded", names, padded, "call(*short)")


def run(setting: Setting) -> Results:
    """Run the stream in every way, and measure what a call costs more."""
    with tempfile.TemporaryDirectory() as folder:
        found = setting.collect(streams(setting, Path(folder)))
    added = measure(overheads(quick=setting.quick), setting, block_seconds=2e-3, part="overhead")
    return {"rows": found, "overhead": added}


@contextlib.contextmanager
def recordings() -> Iterator[list[None]]:
    """Yield a list that gets an entry with every CUDA graph whose recording begins."""
    begun: list[None] = []
    enter = torch.cuda.graph.__enter__

    def counting(self: Any) -> None:
        begun.append(None)
        enter(self)

    with mock.patch.object(torch.cuda.graph, "__enter__", counting):
        yield begun


BENCHMARK = Benchmark(
    "buckets",
    "How long does a stream of batches of many lengths take, in every way to run it?",
    run,
    rounds=9,
    needs_triton=True,
    options={
        "--batches": {"type": int, "default": BATCHES, "help": "of the stream"},
        "--phase": {"choices": PHASES, "help": "one of them only"},
        "--rows": {"help": "only rows that contain this, or one of several: a,b"},
        "--mode": {"help": "of torch.compile, this one only; 'default' is one"},
    },
    tables=(
        Table(
            {
                "": "{row}",
                "phase": "{phase}",
                "all batches, from cold": "{total_s:.1f} s",
                "a step later": "{steady_ms:.2f} ms",
                "graphs": "{graphs}",
                "recompiles": "{recompiles}",
                "waste": "{waste:percent}",
                "CUDA graphs": "{cuda_graphs}",
                "memory reserved": "{gpu_bytes:bytes}",
            }
        ),
        Table(rows="overhead"),
    ),
)
