"""A stream of batches whose lengths vary, through a small transformer, in the ways there are.

    python benchmarks/bench_buckets.py --json benchmarks/records/<date>-buckets-cpu.json
    python benchmarks/plot_buckets.py benchmarks/records/<date>-buckets-cpu.json

Each row is a process of its own. Its compiler cache has only what torch prepares once per machine
(precompiled headers, what the CPU can do), made before by compiling ``x + 1``. It runs the stream
twice: the first time gives the total from a cold start, checks of ``bucketed`` included; the second
the seconds per step in the steady state. Padding by hand is ``F.pad`` in front of
``torch.compile(dynamic=False)`` with the recompile limit lifted; the row "dynamic=False" keeps
the limit of 8, as it comes, and so runs eager for the lengths after.

The model and the stream are small, because compiling takes most of the time: some 65 graphs per
phase, which is some 1,500 seconds of CPU in all on a machine where compiling one for training takes
14 (about a quarter of an hour on two quiet cores). ``--batches`` makes the stream longer; what
compiling costs is then shared by more of them.

Then the host's time that ``bucketed`` adds to a call, for 1 to 64 buckets, over the compiled
function on inputs padded before; the kernels that pad are measured on their own and not counted.

Shapes: B batch, T time, D features.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, context
from torchguard import Buckets, batch_maxima, bucketed
from torchguard.internals import graphs_compiled

BATCH, FEATURES, LAYERS, HEADS, WORDS = 8, 64, 1, 4, 500
LONGEST = 256
# Of the logarithm of a sequence's length: half are shorter than 55.
MEAN, DEVIATION = 4.0, 0.6
BATCHES = 120
COUNTS = (1, 2, 4, 8, 16, 32, 64)
OVERHEAD_TARGET_US = 15.0
FLATNESS_TARGET = 1.10
STEADY_TARGET = 1.03

PHASES = ("forward", "training")
ROWS = (
    "eager",
    "compile",
    "compile dynamic=True",
    "compile dynamic=False",
    "by hand: maximum",
    "by hand: powers of two",
    "by hand: multiples of 64",
    "by hand: the buckets of fit 8",
    "bucketed fit 4",
    "bucketed fit 8",
    "bucketed fit 16",
    "bucketed auto",
)


class Model(nn.Module):
    """An encoder that classifies every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, FEATURES)
        layer = nn.TransformerEncoderLayer(
            FEATURES, HEADS, 4 * FEATURES, dropout=0.0, batch_first=True
        )
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
    sizes = batch_maxima(sample.astype(np.int64).tolist(), BATCH)
    return Buckets.fit(sizes, count, multiple_of=8, maximum=LONGEST)


def ladder_of(row: str) -> Buckets | None:
    """Return the buckets that a row pads to by hand."""
    return {
        "by hand: maximum": Buckets([LONGEST]),
        "by hand: powers of two": Buckets.powers_of_two(16, LONGEST),
        "by hand: multiples of 64": Buckets.multiples_of(64, LONGEST),
        "by hand: the buckets of fit 8": fitted(8),
    }.get(row)


def wrapped(row: str, model: Model, mode: str | None) -> tuple[Callable[..., Any], Any]:
    """Return what a row calls, and its bucketed module if it has one."""
    options: dict[str, Any] = {} if mode is None else {"mode": mode}
    if row == "eager":
        return model, None
    if row.startswith("compile"):
        dynamic = {"compile": None, "compile dynamic=True": True, "compile dynamic=False": False}
        return torch.compile(model, dynamic=dynamic[row], **options), None
    ladder = ladder_of(row)
    if ladder is not None:
        config: Any = importlib.import_module("torch._dynamo.config")
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, 256)
        compiled = torch.compile(model, dynamic=False, **options)

        def padded(ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            length = ids.shape[1]
            missing = ladder.bucket_for(length) - length
            if missing:
                ids = functional.pad(ids, (0, missing))
                padding = functional.pad(padding, (0, missing), value=True)
            scores: torch.Tensor = compiled(ids, padding)
            return scores[:, :length]

        return padded, None
    kind = row.removeprefix("bucketed ")
    module = bucketed(
        model,
        dims={"ids": {1: "t"}, "padding": {1: "t"}},
        buckets="auto" if kind == "auto" else fitted(int(kind.removeprefix("fit "))),
        mask={"padding": "padding"},
        compile=options or True,
    )
    return module, module


def run_row(row: str, phase: str, device: str, batches: int, mode: str | None) -> dict[str, Any]:
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
    call, module = wrapped(row, model, mode)
    for _ in range(2):
        seconds = []
        for ids, padding in stream:
            step(call, ids, padding)
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
        passes.append(seconds)
    graphs = graphs_compiled()
    useful = int(lengths.max(1).sum())
    ladder = ladder_of(row)
    if module is not None:
        waste = module.stats().waste
        graphs = module.stats().graphs
    elif ladder is not None:
        waste = sum(ladder.bucket_for(int(n)) for n in lengths.max(1)) / useful - 1
    else:
        waste = 0.0
    return {
        "row": row if mode is None else f"{row}, {mode}",
        "phase": phase,
        "device": device,
        "seconds": [round(value, 6) for value in passes[0]],
        "total_s": sum(passes[0]),
        "steady_ms": 1e3 * statistics.median(passes[1]),
        "steady_total_s": sum(passes[1]),
        "graphs": graphs,
        "recompiles": max(graphs - 1, 0),
        "waste": waste,
    }


PREPARE = """
import sys, torch
for device in sys.argv[1:]:
    torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
"""


class Cache:
    """A folder for compiled code, with what torch prepares once per machine.

    Args:
        folder: empty.
        devices: to prepare for.
    """

    def __init__(self, folder: Path, devices: Iterable[str]) -> None:
        self.folder = folder
        self._run("-c", PREPARE, *devices)
        self._prepared = set(folder.rglob("*"))

    def run(self, *arguments: str) -> str:
        """Run Python, and return what it prints; compiled code of earlier runs is gone."""
        for path in sorted(set(self.folder.rglob("*")) - self._prepared, reverse=True):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
        return self._run(*arguments)

    def _run(self, *arguments: str) -> str:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(self.folder)}
        done = subprocess.run(  # noqa: S603 - this very file
            [sys.executable, "-W", "ignore", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{arguments[-1]}: {done.stderr[-2000:]}")
        return done.stdout


def in_process(cache: Cache, *row: Any) -> dict[str, Any]:
    """Run a row, given as :func:`run_row` takes it, in a process of its own."""
    begun = time.perf_counter()
    said = cache.run(__file__, "--row", json.dumps(row))
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return {**result, "process_s": time.perf_counter() - begun}


def stream(
    cache: Cache, phases: Iterable[str], rows: list[str], device: str, batches: int
) -> Iterator[dict[str, Any]]:
    """Run these rows in these phases, and show each."""
    for phase in phases:
        for row in rows:
            modes = [None, "reduce-overhead"] if device == "cuda" and row != "eager" else [None]
            for mode in modes:
                found = in_process(cache, row, phase, device, batches, mode)
                print(
                    f"{found['row']:36} {phase:8} {device:4} {found['total_s']:8.1f} s in all "
                    f"{found['steady_ms']:8.2f} ms a step {found['graphs']:4} graphs "
                    f"waste {100 * found['waste']:5.1f} %",
                    flush=True,
                )
                yield found


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run so little that what is around it shows."""
    return x * 2 + y


def overhead(count: int, rounds: int) -> dict[str, Any]:
    """Measure what ``bucketed`` adds to a call of a compiled function, in microseconds."""
    sizes = [8 * (index + 1) for index in range(count)]
    call = bucketed(
        add,
        dims={"x": {1: "t"}, "y": {1: "t"}},
        buckets=Buckets(sizes),
        compile={"backend": "eager"},
        verify="never",
    )
    for size in sizes:
        for length in (size, size - 1):
            call(torch.ones(2, length), torch.ones(2, length))
    size = sizes[-1]
    exact = (torch.ones(2, size), torch.ones(2, size))
    short = (torch.ones(2, size - 1), torch.ones(2, size - 1))
    plain = torch.compile(add, backend="eager", dynamic=False)
    plain(*exact)
    pad = torch.constant_pad_nd
    ways: dict[str, Callable[[], object]] = {
        "compiled": lambda: plain(*exact),
        "exact": lambda: call(*exact),
        "padded": lambda: call(*short),
        "kernels": lambda: (pad(short[0], (0, 1), 0), pad(short[1], (0, 1), 0)),
    }
    calls = 50
    best = dict.fromkeys(ways, float("inf"))
    added: dict[str, list[float]] = {"exact": [], "padded": []}
    for _ in range(rounds):
        took = {}
        for name, way in ways.items():
            begun = time.perf_counter()
            for _ in range(calls):
                way()
            took[name] = (time.perf_counter() - begun) / calls * 1e6
            best[name] = min(best[name], took[name])
        added["exact"].append(took["exact"] - took["compiled"])
        added["padded"].append(took["padded"] - took["compiled"] - took["kernels"])
    return {
        "buckets": count,
        "compiled_us": best["compiled"],
        "padded_us": best["padded"],
        "added_exact_us": best["exact"] - best["compiled"],
        "added_padded_us": best["padded"] - best["compiled"] - best["kernels"],
        "median_added_exact_us": statistics.median(added["exact"]),
        "median_added_padded_us": statistics.median(added["padded"]),
    }


def verdicts(rows: list[dict[str, Any]], overheads: list[dict[str, Any]]) -> list[str]:
    """Say which targets are reached."""
    worst = max(each["added_padded_us"] for each in overheads)
    ratio = overheads[-1]["padded_us"] / overheads[0]["padded_us"]
    found = [
        _verdict(
            f"adds at most {OVERHEAD_TARGET_US:g} us",
            worst <= OVERHEAD_TARGET_US,
            f"{worst:.1f} us",
        ),
        _verdict("flat within 10 % to 64 buckets", ratio <= FLATNESS_TARGET, f"{ratio:.3f} times"),
    ]
    by_row = {(each["row"], each["phase"], each["device"]): each for each in rows}
    for (row, phase, device), each in by_row.items():
        hand = by_row.get(("by hand: the buckets of fit 8", phase, device))
        if row == "bucketed fit 8" and hand is not None:
            ratio = each["steady_total_s"] / hand["steady_total_s"]
            text = f"{phase}, {device}: steady state within 3 % of padding by hand"
            found.append(_verdict(text, ratio <= STEADY_TARGET, f"{ratio:.3f} times"))
        if device == "cuda" and row == "bucketed fit 8":
            others = [
                other["total_s"]
                for (name, its_phase, its_device), other in by_row.items()
                if its_phase == phase and its_device == device and not name.startswith("bucketed")
            ]
            text = f"{phase}, {device}: total below every other row"
            best = min(others, default=float("inf"))
            found.append(_verdict(text, each["total_s"] < best, f"{each['total_s']:.1f} s"))
    return found


def _verdict(target: str, reached: bool, measured: str) -> str:
    return f"{target}: {'reached' if reached else 'missed'} ({measured})"


def main(arguments: list[str] | None = None) -> None:
    """Measure on every device there is and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one of them only")
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"of the stream (default: {BATCHES})"
    )
    parser.add_argument("--phase", choices=PHASES, help="one of them only")
    parser.add_argument("--rows", help="only rows that contain this")
    parser.add_argument("--quick", action="store_true", help="6 batches: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row is not None:
        print(json.dumps(run_row(*json.loads(options.row))))
        return
    if options.batches < 1:
        parser.error(f"--batches {options.batches}: expected 1 or more")
    record = context("bench_buckets")
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [options.device] if options.device else present
    batches = 6 if options.quick else options.batches
    wanted = [row for row in ROWS if options.rows is None or options.rows in row]
    phases = [options.phase] if options.phase else PHASES
    with tempfile.TemporaryDirectory() as folder:
        compiling = any(row != "eager" for row in wanted)
        cache = Cache(Path(folder), devices if compiling else ())
        rows = [
            found for device in devices for found in stream(cache, phases, wanted, device, batches)
        ]
    torch.set_num_threads(1)
    counts, rounds = (COUNTS[:3], 3) if options.quick else (COUNTS, 200)
    overheads = [overhead(count, rounds) for count in counts]
    for each in overheads:
        print(
            f"{each['buckets']:2} buckets: adds {each['added_exact_us']:.1f} us to an exact fit, "
            f"{each['added_padded_us']:.1f} us to a padded call"
        )
    reached = verdicts(rows, overheads)
    print("\n".join(reached))
    if options.json is not None:
        record["quick"] = options.quick
        if not torch.cuda.is_available():
            record["note"] = "not measured on a GPU yet"
        text = json.dumps(
            {**record, "rows": rows, "overhead": overheads, "targets": reached}, indent=1
        )
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
