"""What a guarded call makes torch do: operators called, kernels launched, bytes at the peak.

    python benchmarks/bench_kernels.py --json benchmarks/records/<date>-kernels-cpu.json

Counted with the profiler, not timed. The claim is "no extra kernel": where nothing fails, a guard
reads metadata and launches nothing. On a CPU the calls of ATen operators stand for it. What copies
data on purpose (``guarded(data=True)``) has no claim and shows its price.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torchguard
from benchmarks.counting import Counts, counted
from benchmarks.harness import Scope
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table

CLAIM = "no operator, no kernel and no byte more"
# Asks what a tensor is and computes nothing; listed where it is called more often, and allowed.
QUESTIONS = {"aten::is_pinned"}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The same work in plain torch and with a guard."""

    what: str
    plain: Call
    guarded: Call
    scope: Scope = contextlib.nullcontext
    claimed: bool = True


@dataclass(frozen=True)
class Counted:
    """What one call of each made torch do."""

    what: str
    device: str
    operators: tuple[int, int]
    kernels: tuple[int, int]
    copies: tuple[int, int]
    peak_bytes: tuple[int, int]
    """Plain and guarded."""

    more: dict[str, int]
    """Operators that the guarded call makes and the plain one does not."""

    target: str | None
    verdict: str | None


def cases(device: str) -> Iterator[Case]:
    """Yield every case of the three families."""
    yield from _resize(device)
    yield from _operations(device)
    yield from _assignment(device)
    yield from _buckets(device)


def _resize(device: str) -> Iterator[Case]:
    storage = torch.zeros(32, 32, device=device).untyped_storage()

    def grow(resize: Callable[..., Any]) -> Call:
        return lambda: resize(torch.empty(16, device=device), 4096)

    plain = torch.Tensor.resize_
    yield Case("resize_, growing: safe_resize_()", grow(plain), grow(torchguard.safe_resize_))
    installed = partial(torchguard.install, "resize", only_if_needed=False)

    def unmodified() -> torch.Tensor:
        return torch.empty(16, device=device).resize_(4096)

    yield Case("resize_, growing: install()", unmodified, unmodified, installed)

    def set_(function: Callable[..., Any]) -> Call:
        return lambda: function(torch.empty(0, device=device), storage, 0, (32, 32), (32, 1))

    yield Case("set_: safe_set_()", set_(torch.Tensor.set_), set_(torchguard.safe_set_))


def _operations(device: str) -> Iterator[Case]:
    a, b, out = (torch.ones(1024, device=device) for _ in range(3))
    calls: dict[str, Call] = {
        "a * b": lambda: a * b,
        "a.copy_(b)": lambda: a.copy_(b),
        "torch.add(a, b, out=out)": lambda: torch.add(a, b, out=out),
    }
    for what, call in calls.items():
        yield Case(f"{what}: guarded()", call, call, torchguard.guarded)
    installed = partial(torchguard.install, "out", only_if_needed=False)
    call = calls["torch.add(a, b, out=out)"]
    yield Case('torch.add(a, b, out=out): install("out")', call, call, installed)
    call = calls["a.copy_(b)"]
    saving = partial(torchguard.guarded, data=True)
    yield Case("a.copy_(b): guarded(data=True)", call, call, saving, claimed=False)


def _assignment(device: str) -> Iterator[Case]:
    t, rows = torch.zeros(64, 16, device=device), torch.arange(8, device=device)
    mask = torch.zeros(64, dtype=torch.bool, device=device)
    mask[:8] = True
    everything = partial(torchguard.install, "setitem", only_if_needed=False)
    for name, index in {"a slice": slice(8, 16), "rows": rows, "a mask": mask}.items():
        plain = partial(_two_statements, t, index)
        ours = partial(torchguard.sliced_assign, t, index, 1.0)
        yield Case(f"t[{name}] = 1: sliced_assign()", plain, ours)
        yield Case(f't[{name}] = 1: install("setitem")', plain, plain, everything)


def _two_statements(t: torch.Tensor, index: Any) -> torch.Tensor:
    out = t.clone()
    out[index] = 1.0
    return out


def _model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def _buckets(device: str) -> Iterator[Case]:
    ladder = torchguard.Buckets([32, 64])

    # The backend does not matter for what is outside of the graph.
    compiled: Any = torch.compile(_model, backend="aot_eager", dynamic=False)
    bucketed = torchguard.bucketed(
        _model, dims={"x": {1: "t"}}, buckets=ladder, compile={"backend": "aot_eager"}
    )
    fits, short = torch.ones(4, 64, device=device), torch.ones(4, 50, device=device)

    def by_hand() -> Any:
        return compiled(functional.pad(short, (0, 14))).narrow(1, 0, 50)

    yield Case("bucketed, an exact fit", lambda: compiled(fits), lambda: bucketed(fits))
    yield Case("bucketed, against padding by hand", by_hand, lambda: bucketed(short))
    yield Case(
        "pad_to_bucket, against F.pad",
        lambda: functional.pad(short, (0, 14)),
        lambda: torchguard.pad_to_bucket(short, 1, ladder),
    )


def compare(case: Case, device: str) -> Counted:
    """Count what both make torch do; each runs before, so that nothing is done for the first time.

    Also used by the tests.
    """
    case.plain()
    plain = counted(case.plain, device)
    with case.scope():
        for _ in range(2):
            case.guarded()
        guarded = counted(case.guarded, device)
    verdict = None
    if case.claimed:
        verdict = "holds" if _holds(plain, guarded) else "does not hold"
    return Counted(
        what=case.what,
        device=device,
        operators=(plain.calls, guarded.calls),
        kernels=(plain.kernels, guarded.kernels),
        copies=(plain.copies, guarded.copies),
        peak_bytes=(plain.peak_bytes, guarded.peak_bytes),
        more=guarded.more_than(plain),
        target=CLAIM if case.claimed else None,
        verdict=verdict,
    )


def _holds(plain: Counts, guarded: Counts) -> bool:
    return (
        guarded.more_than(plain).keys() <= QUESTIONS
        and guarded.kernels <= plain.kernels
        and guarded.copies <= plain.copies
        and guarded.peak_bytes <= plain.peak_bytes
    )


def run(setting: Setting) -> Results:
    """Count every case."""
    rows = []
    known = {row["what"] for row in setting.stream.known("rows")}
    for case in cases(setting.device):
        if case.what in known:
            continue
        if setting.stream.time_is_up():
            break
        row = compare(case, setting.device)
        rows.append(row)
        setting.stream.keep("rows", row)
        more = ", ".join(f"{count} {name}" for name, count in row.more.items())
        print(
            f"{row.what:48} {row.device:4} operators {row.operators[0]} -> {row.operators[1]}, "
            f"kernels {row.kernels[0]} -> {row.kernels[1]}, "
            f"bytes {row.peak_bytes[0]} -> {row.peak_bytes[1]}"
            + (f": {row.verdict}" if row.verdict else "")
            + (f" ({more})" if more else "")
        )
    return {"rows": rows}


BENCHMARK = Benchmark(
    "kernels",
    "Does a guard call an operator, launch a kernel or need a byte more than plain torch?",
    run,
    rounds=1,
    quick_rounds=1,
    rounds_of="not used: counts are exact",
    tables=(
        Table(
            {
                "": "{what}",
                "operators": "{operators:listed}",
                "kernels": "{kernels:listed}",
                "copies": "{copies:listed}",
                "bytes at the peak": "{peak_bytes:listed}",
                "more": "{more:counted}",
                "claim": "{verdict}",
            }
        ),
    ),
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
