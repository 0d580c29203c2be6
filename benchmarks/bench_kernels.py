"""What a guarded call makes torch do: operators called, kernels launched, bytes at the peak.

The claim is "no extra kernel": where nothing fails, a guard reads metadata and launches nothing. On
a CPU the calls of ATen operators stand for it. What copies data on purpose has no claim.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import torchguard
from benchmarks.counting import counted
from benchmarks.harness import Scope, installed
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table

NO_MORE_OF = ("kernels", "copies", "peak_bytes")
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


def _resize(device: str) -> Iterator[Case]:
    storage = torch.zeros(32, 32, device=device).untyped_storage()

    def grow() -> Any:
        return torch.empty(16, device=device).resize_(4096)

    def safe_grow() -> Any:
        return torchguard.safe_resize_(torch.empty(16, device=device), 4096)

    def set_(function: Callable[..., Any]) -> Any:
        return function(torch.empty(0, device=device), storage, 0, (32, 32), (32, 1))

    yield Case("resize_, growing: safe_resize_()", grow, safe_grow)
    yield Case("resize_, growing: install()", grow, grow, installed("resize"))
    plain, safe = partial(set_, torch.Tensor.set_), partial(set_, torchguard.safe_set_)
    yield Case("set_: safe_set_()", plain, safe)


def _operations(device: str) -> Iterator[Case]:
    a, b, out = (torch.ones(1024, device=device) for _ in range(3))
    calls: dict[str, Call] = {
        "a * b": lambda: a * b,
        "a.copy_(b)": lambda: a.copy_(b),
        "torch.add(a, b, out=out)": lambda: torch.add(a, b, out=out),
    }
    for what, call in calls.items():
        yield Case(f"{what}: guarded()", call, call, torchguard.guarded)
    call = calls["torch.add(a, b, out=out)"]
    yield Case('torch.add(a, b, out=out): install("out")', call, call, installed("out"))
    call = calls["a.copy_(b)"]
    saving = partial(torchguard.guarded, data=True)
    yield Case("a.copy_(b): guarded(data=True)", call, call, saving, claimed=False)


def _assignment(device: str) -> Iterator[Case]:
    t, rows = torch.zeros(64, 16, device=device), torch.arange(8, device=device)
    mask = torch.zeros(64, dtype=torch.bool, device=device)
    mask[:8] = True
    for name, index in {"a slice": slice(8, 16), "rows": rows, "a mask": mask}.items():
        plain = partial(_two_statements, t, index)
        ours = partial(torchguard.sliced_assign, t, index, 1.0)
        yield Case(f"t[{name}] = 1: sliced_assign()", plain, ours)
        yield Case(f't[{name}] = 1: install("setitem")', plain, plain, installed("setitem"))


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

    yield Case("bucketed, an exact fit", partial(compiled, fits), partial(bucketed, fits))
    yield Case("bucketed, against padding by hand", by_hand, partial(bucketed, short))
    pad = partial(functional.pad, short, (0, 14))
    ours = partial(torchguard.pad_to_bucket, short, 1, ladder)
    yield Case("pad_to_bucket, against F.pad", pad, ours)


def compare(case: Case, device: str) -> dict[str, Any]:
    """Count what both make torch do; each runs before, so that nothing is done for the first time.

    Also used by the tests.
    """
    case.plain()
    plain = counted(case.plain, device)
    with case.scope():
        for _ in range(2):
            case.guarded()
        guarded = counted(case.guarded, device)
    limits = {name: (getattr(plain, name), getattr(guarded, name)) for name in NO_MORE_OF}
    more = dict(Counter(guarded.operators) - Counter(plain.operators))
    holds = more.keys() <= QUESTIONS and all(after <= before for before, after in limits.values())
    verdict = "holds" if holds else "does not hold"
    return {
        "operators": (plain.calls, guarded.calls),
        **limits,
        "more": more,
        "target": CLAIM if case.claimed else None,
        "verdict": verdict if case.claimed else None,
    }


def run(setting: Setting) -> Results:
    """Count every case."""
    device = setting.device
    families = (_resize, _operations, _assignment, _buckets)
    cases = itertools.chain.from_iterable(family(device) for family in families)
    found = (({"what": case.what}, partial(compare, case, device)) for case in cases)
    return {"rows": setting.collect(found)}


BENCHMARK = Benchmark(
    "kernels",
    "Does a guard call an operator, launch a kernel or need a byte more than plain torch?",
    run,
    rounds=1,
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
