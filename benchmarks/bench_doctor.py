"""Which of the known defects torch has here, and whether the guards close them.

    python benchmarks/bench_doctor.py --json benchmarks/records/<date>-doctor-cuda.json

This is ``python -m torchguard doctor`` with a record. Rows that need a GPU come first. Nothing is
timed; on a CPU the page of compatibility has the doctor's table for each version of torch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.program import Benchmark, Results, Setting
from torchguard.defects.catalog import built_in
from torchguard.defects.doctor import DoctorProgress, Row, doctor

# What asks for a GPU, or does something else on one.
ON_A_GPU = ("cudagraph-shapes", "pad-reduction", "pad-dynamic")
QUICK = ("resize-locked", "optimizer-partial")  # compile nothing


@dataclass(frozen=True)
class Found:
    """A row of the doctor's table."""

    id: str
    device: str
    bare: str
    detail: str
    guarded: str
    guarded_detail: str
    guards: tuple[str, ...]
    verdict: str | None
    target: str | None = "closed, or detected, where it is live"


def found(row: Row, device: str) -> Found:
    """Turn a row of the doctor into a result; a verdict is for live defects that have a guard."""
    judged = row.live and bool(row.guards)
    return Found(
        id=row.id,
        device=device,
        bare=row.bare.status,
        detail=row.bare.detail,
        guarded=row.guarded.status,
        guarded_detail=row.guarded.detail,
        guards=row.guards,
        verdict=("missed: open" if row.failed else "reached") if judged else None,
        target=Found.target if judged else None,
    )


def run(setting: Setting) -> Results:
    """Probe in two goes: what needs a GPU, then the rest."""
    known = {row["id"] for row in setting.stream.known("rows") if row["bare"] != "timeout"}
    names = QUICK if setting.quick else tuple(row.id for row in built_in())
    rows: list[Found] = []

    def tell(step: DoctorProgress) -> None:
        if step.row is not None:
            rows.append(found(step.row, setting.device))
            setting.stream.keep("rows", rows[-1])
            print(f"{step.done:2} of {step.total} {step.row.id:24} {rows[-1].bare}", end="")
            print(f" ({rows[-1].detail}); guarded: {rows[-1].guarded}")

    for first in (True, False):
        wanted = [name for name in names if (name in ON_A_GPU) is first and name not in known]
        if wanted and not setting.stream.time_is_up():
            options = setting.options
            doctor(wanted, progress=tell, jobs=options.jobs, timeout=options.timeout)
    return {"rows": rows}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, help="probes side by side (default: cores)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds for a probe (default: 120)"
    )


BENCHMARK = Benchmark(
    "doctor",
    "Which of the known defects does torch have here, and do the guards close them?",
    run,
    rounds=1,
    quick_rounds=1,
    devices=("cuda",),
    rehearsed_on=("cpu",),
    rounds_of="not used: each probe runs once",
    add_options=_add_options,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
