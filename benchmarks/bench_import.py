"""What ``import torchguard`` adds to a program that has imported torch.

Each round is a process of its own, which imports torch first. The bytecode of torchguard is
compiled by a round that does not count, as pip does it when it installs. Time is read on the clock
and of the processor; the second leaves out what other programs take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.harness import Spread
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table

# Prints, as JSON, what each import took and how many modules it brought.
PROGRAM = """
import json, sys, time
found = {}
for name in ("torch", "torchguard"):
    modules, clock, processor = len(sys.modules), time.perf_counter(), time.process_time()
    __import__(name)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    added = len(sys.modules) - modules
    found[name] = {"clock_ms": 1e3 * clock, "processor_ms": 1e3 * processor, "modules": added}
print(json.dumps(found))
"""


def importing() -> Any:
    """Import torch and then torchguard in a process of its own."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the first compiles for all
    line = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout)


def run(setting: Setting) -> Results:
    """Import in as many processes as there are rounds."""
    rounds = [importing() for _ in range(setting.rounds + 1)][1:]  # the first compiles
    rows = list[dict[str, Any]]()
    for name, first in rounds[0].items():
        row: dict[str, Any] = {"what": f"import {name}", "device": "cpu", "n": setting.rounds}
        for clock in ("clock_ms", "processor_ms"):
            row[clock] = Spread.of([each[name][clock] for each in rounds])
        row["modules"] = first["modules"]
        rows.append(row)
    return {"rows": setting.kept(rows)}


BENCHMARK = Benchmark(
    "import",
    "How long does `import torchguard` take in a program that has imported torch?",
    run,
    rounds=21,
    quick_rounds=1,
    devices=("cpu",),
    tables=(
        Table(
            {
                "": "`{what}`",
                "on the clock [quartiles]": "{clock_ms.median:.1f} ms "
                "[{clock_ms.q1:.1f}, {clock_ms.q3:.1f}]",
                "of the processor": "{processor_ms.median:.1f} ms",
                "modules": "{modules}",
            },
            lead="Medians of {n} processes.",
        ),
    ),
)
