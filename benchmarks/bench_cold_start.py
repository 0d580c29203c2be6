"""What a second process has to do again, with and without the plan that the first one saved.

    python benchmarks/bench_cold_start.py --json benchmarks/records/<date>-cold_start-cpu.json

Each start is a process of its own with empty caches of Inductor's, as on another machine of the
same kind. Counted are the runs of the model for the check of the padding, the derivations of
output sizes, the graphs that Inductor compiles, and the runs of the C++ compiler; the seconds,
from a wrapped model to the last bucket's first answer, stand beside.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.models import Decoder, DecoderSize
from benchmarks.processes import in_a_process
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Spread

SIZE = DecoderSize(vocabulary=1000, context=128, width=64, layers=2, heads=2)
BUCKETS = (32, 64, 128)


@dataclass(frozen=True)
class Started:
    """What one way to start took; the counts are of one process."""

    what: str
    device: str
    n: int
    seconds: Spread
    checks: int
    derivations: int
    graphs_compiled: int
    graphs_from_cache: int
    cpp_compilations: int
    target: str | None = None
    verdict: str | None = None


def _counted(owner: Any, name: str, counts: dict[str, int], what: str) -> None:
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        # The preprocessor runs in each process, for a hash of torch's headers.
        counts[what] += " -E " not in str(args[0]) if what == "cpp_compilations" else 1
        return original(*args, **kwargs)

    counts[what] = 0
    setattr(owner, name, counting)


def start(buckets: list[int], read: str | None, write: str | None) -> dict[str, Any]:
    """Wrap a model and call it once for each bucket, in this process."""
    from torchguard import bucketed  # noqa: PLC0415 - what is measured begins here

    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    decorator = "torchguard.bucketing.decorator"
    leak_check = importlib.import_module(f"{decorator}.leak_check")
    shapes = importlib.import_module(f"{decorator}.output_shapes")
    _counted(leak_check, "run_undoing_mutations", counts, "checks")
    _counted(shapes.OutputShapes, "_derive", counts, "derivations")
    builder = importlib.import_module("torch._inductor.cpp_builder")
    _counted(builder, "run_compile_cmd", counts, "cpp_compilations")
    torch.manual_seed(0)
    model = Decoder(SIZE).eval()
    batches = [torch.randint(1, SIZE.vocabulary, (4, size - 5)) for size in buckets]
    given: dict[str, Any] = {"buckets": buckets} if read is None else {"plan": read}
    begun = time.perf_counter()
    with torch.no_grad():
        fast = bucketed(model, dims=({1: "t"},), compile=True, **given)
        for tokens in batches:
            fast(tokens)
    seconds = time.perf_counter() - begun
    found = importlib.import_module("torch._dynamo.utils").counters["inductor"]
    if write is not None:
        fast.save_plan(write)
    return {
        "seconds": seconds,
        "graphs_compiled": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
        "graphs_from_cache": found["fxgraph_cache_hit"],
        **counts,
    }


def run(setting: Setting) -> Results:
    """Start without a plan, save one, and start with it."""
    buckets = list(BUCKETS[:1] if setting.quick else BUCKETS)
    taken: dict[str, list[dict[str, Any]]] = {"without a plan": [], "with the plan": []}
    for _ in range(setting.rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "plan.json")
            for what, arguments in zip(taken, ((None, path), (path, None)), strict=True):
                taken[what].append(in_a_process("bench_cold_start", "start", buckets, *arguments))
    rows = []
    for what, rounds in taken.items():
        row = Started(
            what=what,
            device="cpu",
            n=setting.rounds,
            **{name: max(each[name] for each in rounds) for name in rounds[0] if name != "seconds"},
            seconds=Spread.of([each["seconds"] for each in rounds]),
        )
        if what == "with the plan":
            again = row.checks + row.derivations + row.graphs_compiled + row.cpp_compilations
            verdict = "reached" if not again else f"missed: {again} again"
            row = replace(row, target="nothing is done again", verdict=verdict)
        rows.append(row)
        print(
            f"{what:16} {row.seconds.median:7.1f} s, {row.checks} runs for checks, "
            f"{row.derivations} derivations, {row.graphs_compiled} graphs compiled and "
            f"{row.graphs_from_cache} from the cache, {row.cpp_compilations} runs of the C++ "
            "compiler" + (f": {row.verdict}" if row.verdict else "")
        )
    return {"rows": rows}


BENCHMARK = Benchmark(
    "cold_start",
    "What does a second process do again, with a saved plan and without?",
    run,
    rounds=2,
    quick_rounds=1,
    rounds_of="pairs of processes",
    devices=("cpu",),
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
