"""What a guarded call makes torch do: operators called, kernels launched, bytes at the peak.

Counted with the profiler, not timed. The claim is "no extra kernel": where nothing fails, a guard
reads metadata and launches nothing. On a CPU the calls of ATen operators stand for it. What copies
data on purpose (``guarded(data=True)``) has no claim and shows its price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import torchguard
from benchmarks.counting import counted
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


def installed(name: Any) -> Scope:
    """Return the scope of one guard."""
    return partial(torchguard.install, name, only_if_needed=False)


def cases(device: str) -> Iterator[Case]:
    """Yield every case of the four families."""
    yield from _resize(device)
    yield from _operations(device)
    yield from _assignment(device)
    yield from _buckets(device)


def _resize(device: str) -> Iterator[Case]:
    storage = torch.zeros(32, 32, device=device).untyped_storage()

    def grow(resize: Callable[..., Any] | None = None) -> Any:
        t = torch.empty(16, device=device)
        return t.resize_(4096) if resize is None else resize(t, 4096)

    def set_(function: Callable[..., Any]) -> Any:
        return function(torch.empty(0, device=device), storage, 0, (32, 32), (32, 1))

    safe = partial(grow, torchguard.safe_resize_)
    yield Case("resize_, growing: safe_resize_()", grow, safe)
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

    yield Case("bucketed, an exact fit", lambda: compiled(fits), lambda: bucketed(fits))
    yield Case("bucketed, against padding by hand", by_hand, lambda: bucketed(short))
    yield Case(
        "pad_to_bucket, against F.pad",
        lambda: functional.pad(short, (0, 14)),
        lambda: torchguard.pad_to_bucket(short, 1, ladder),
    )


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
    names = ("operators", "kernels", "copies", "peak_bytes")
    pairs = {name: (getattr(plain, name), getattr(guarded, name)) for name in names}
    pairs["operators"] = (plain.calls, guarded.calls)
    more = guarded.more_than(plain)
    holds = more.keys() <= QUESTIONS and all(pairs[name][1] <= pairs[name][0] for name in names[1:])
    verdict = "holds" if holds else "does not hold"
    judged = {"target": CLAIM, "verdict": verdict} if case.claimed else {}
    return {**pairs, "more": more, "target": None, "verdict": None, **judged}


def run(setting: Setting) -> Results:
    """Count every case."""
    made = cases(setting.device)
    found = (({"what": case.what}, partial(compare, case, setting.device)) for case in made)
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
