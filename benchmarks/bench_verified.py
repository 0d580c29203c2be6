"""What the check costs: the first call, its memory, and every call after it.

Targets: the first call at most 15 % over a plain compile, a later call within 1 us.

Each first call is a process of its own with an empty cache, plain and checked by turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Row, Side, Spread, context, measure, report, write_record
from torchguard import verified_backend

# B batch, T time, D features
B, T, D = 8, 64, 128
ALLOWED_RATIO = 1.15
ALLOWED_NS = 1000
FEW = 20  # graphs in quick mode


def transformer(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a small transformer in training, without dropout, and a batch (B, T, D)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device), torch.randn(B, T, D, device=device)


def tiny(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a graph of two operations, another one for each number."""
    scope: dict[str, Any] = {}
    exec(f"def tiny_{number}(x):\n    return x * {number} + {number}", scope)  # noqa: S102
    function: Callable[[torch.Tensor], torch.Tensor] = scope[f"tiny_{number}"]
    return function


def first_call(
    workload: str, device: str, count: int, *, checked: bool, quick: bool
) -> dict[str, float]:
    """Compile and call in this process; return seconds, processor seconds and peak bytes."""
    # 1,000 graphs through inductor would take an hour of the C++ compiler.
    inner = "inductor" if workload == "transformer" and not quick else "aot_eager"
    backend: Any = verified_backend(inner) if checked else inner
    calls: list[Callable[[], Any]]
    if workload == "transformer":
        model, x = transformer(device)
        calls = [lambda: torch.compile(model, backend=backend)(x).sum().backward()]
    else:
        x = torch.ones(8, device=device)
        functions = [torch.compile(tiny(number), backend=backend) for number in range(count)]
        calls = [functools.partial(function, x) for function in functions]
        torch.compile(tiny(count), backend=inner)(x)  # what is imported lazily
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for call in calls:
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    import resource  # noqa: PLC0415 - POSIX only

    ours = resource.getrusage(resource.RUSAGE_SELF)
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = ours.ru_utime + ours.ru_stime + compilers.ru_utime + compilers.ru_stime
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * ours.ru_maxrss
    return {"seconds": seconds, "processor_seconds": used, "bytes": peak}


def first_calls(
    workload: str, device: str, rounds: int, count: int, *, quick: bool
) -> dict[str, Any]:
    """Measure first calls in processes of their own, plain and checked by turns."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        for checked in (False, True) if number % 2 == 0 else (True, False):
            arguments = ["--first-call", workload, "--device", device, "--count", str(count)]
            arguments += [*(["--checked"] if checked else []), *(["--quick"] if quick else [])]
            found[checked].append(_in_a_process(arguments))
    pairs = list(zip(found[False], found[True], strict=True))
    ratio = Spread.of([one["seconds"] / bare["seconds"] for bare, one in pairs])
    return {
        "id": f"first-{workload}",
        "device": device,
        "n": rounds,
        "plain_seconds": vars(Spread.of([bare["seconds"] for bare, _ in pairs])),
        "checked_seconds": vars(Spread.of([one["seconds"] for _, one in pairs])),
        "ratio": vars(ratio),
        "processor_ratio": vars(
            Spread.of([one["processor_seconds"] / bare["processor_seconds"] for bare, one in pairs])
        ),
        "memory_ratio": vars(Spread.of([one["bytes"] / bare["bytes"] for bare, one in pairs])),
        "target": f"at most {ALLOWED_RATIO} times",
        "verdict": "reached" if ratio.median <= ALLOWED_RATIO else "missed",
    }


def _in_a_process(arguments: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603
            [sys.executable, __file__, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
        )
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def steady(device: str) -> Iterator[Comparison]:
    """Return later calls: a tiny graph, and the transformer."""
    x = torch.ones(8, device=device)
    model, batch = transformer(device)
    model.eval()
    for name, function, value in (("tiny", tiny(2), x), ("transformer", model, batch)):
        bare: Any = torch.compile(_another(function), backend="aot_eager")
        checked: Any = torch.compile(_another(function), backend=verified_backend("aot_eager"))
        with torch.no_grad():
            bare(value)
            checked(value)
        names = {"bare": bare, "checked": checked, "x": value, "no_grad": torch.no_grad()}
        yield Comparison(
            id=f"steady-{name}",
            what="a call after the first",
            baseline=Side("with no_grad: bare(x)", names),
            guarded=Side("with no_grad: checked(x)", names),
        )


def _another(function: Any) -> Any:
    """Return a function with code of its own, so that two compilations don't share a cache."""
    scope: dict[str, Any] = {"function": function}
    exec("def call(x):\n    return function(x)", scope)  # noqa: S102
    return scope["call"]


def main() -> None:
    """Measure on every device there is and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one of them only")
    parser.add_argument("--rounds", type=int, default=7, help="first calls a row (default: 7)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1000, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        values = first_call(
            options.first_call,
            options.device,
            options.count,
            checked=options.checked,
            quick=options.quick,
        )
        print(json.dumps(values))
        return
    record = context("bench_verified")
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if "cuda" not in present:
        record["note"] = "not measured on a GPU yet"
    record["quick"] = options.quick
    record["first_calls"] = []
    rows: list[Row] = []
    for device in [options.device] if options.device else present:
        for workload in ("transformer", "tiny"):
            count = FEW if options.quick else options.count
            rounds = 1 if options.quick else options.rounds
            first = first_calls(workload, device, rounds, count, quick=options.quick)
            record["first_calls"].append(first)
            plain, checked = first["plain_seconds"]["median"], first["checked_seconds"]["median"]
            print(
                f"{first['id']:34} {device:4} {plain:.2f} s -> {checked:.2f} s, "
                f"{first['ratio']['median']:.2f} times "
                f"({first['processor_ratio']['median']:.2f} in processor time), "
                f"memory {first['memory_ratio']['median']:.2f} times: {first['verdict']}",
                flush=True,
            )
        rows += measure(
            steady(device),
            device=device,
            rounds=3 if options.quick else 51,
            block_seconds=0.002 if options.quick else 0.05,
            progress=lambda row: print(report(row), flush=True),
        )
    for row in rows:
        verdict = "reached" if row.added_ns.median <= ALLOWED_NS else "missed"
        print(f"{row.id} {row.device}: {row.added_ns.median:+.0f} ns of {ALLOWED_NS}: {verdict}")
    if options.json is not None:
        write_record(options.json, record, rows)


if __name__ == "__main__":
    main()
