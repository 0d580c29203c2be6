"""What an indexed assignment costs, spelled in seven ways.

Baseline: ``out = t.clone(); out[index] = value``, or ``index_put`` by hand. Eager and compiled by
inductor, forward and backward. ``t`` is (rows, 64), and a hundredth of its rows is selected.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import AddedTarget, Comparison, Target, measure
from benchmarks.machine import keep_freed_memory
from benchmarks.paired import of_its_own
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.records import of_device
from benchmarks.tables import Row, Table
from torchguard import sliced_assign

COLUMNS = 64
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
EAGER_FROM = 10**5  # elements from which on the target is a ratio
LARGE = 10**7  # elements from which on a call takes so long that a fifth of the rounds has to do

EAGER = Target(1.05)
EAGER_SMALL = AddedTarget(10)
OVER_INDEX_PUT = AddedTarget(2)
COMPILED = Target(1.03)

WHY_EAGER = (
    "a Python function stands in front of the two statements, asks whether the tensor is a "
    "compiler's and whether a transformation is active, and catches what they raise"
)
WHY_COMPILED = "the compiled kernels are the same; this is the spread of the measurement"

PAGE, CACHE_LINE = 4096, 64  # bytes

Assign = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Let the results of a block lie elsewhere in memory than those of the last one.

    How far a copy lies from its source, modulo a page, decides a tenth of its time and more;
    where the allocator puts results is one side's luck for as long as the process lives.
    """
    shift = CACHE_LINE * random.randrange(PAGE // CACHE_LINE)  # noqa: S311
    before_them = torch.empty(PAGE * 100 + shift, dtype=torch.uint8)
    yield
    del before_them


def plain(t: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    """Write the two statements that everything is compared with."""
    out = t.clone()
    out[index] = value
    return out


WAYS: dict[str, Assign] = {
    "plain": plain,
    "sliced_assign": sliced_assign,
    "index_put": lambda t, index, value: t.index_put((index,), value),
    "slice_scatter": lambda t, index, value: torch.slice_scatter(
        t, value.expand(t[index].shape), 0, index.start, index.stop
    ),
    "where": lambda t, mask, value: torch.where(mask[:, None], value, t),
    "masked_scatter": lambda t, mask, value: t.masked_scatter(mask[:, None], value.expand(t.shape)),
}
KINDS = {
    "slice": ("sliced_assign", "slice_scatter"),
    "mask": ("sliced_assign", "index_put", "where", "masked_scatter"),
    "integers": ("sliced_assign", "index_put"),
}


def index_of(kind: str, rows: int, device: str) -> Any:
    """Select a hundredth of the rows, at least one."""
    count = max(1, rows // 100)
    if kind == "slice":
        return slice(rows // 4, rows // 4 + count)
    chosen = torch.arange(count, device=device) * (rows // count)
    if kind == "integers":
        return chosen
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    mask[chosen] = True
    return mask


def comparisons(device: str, size: int, backend: str) -> Iterator[Comparison]:
    """Yield every row of one size, in the order of the record."""
    for kind, each in itertools.product(KINDS, (None, backend)):
        yield from _of_kind(device, size, kind, backend=each)


def _of_kind(device: str, size: int, kind: str, *, backend: str | None) -> Iterator[Comparison]:
    rows, ways = max(1, size // COLUMNS), KINDS[kind]
    index = index_of(kind, rows, device)
    functions = {name: WAYS[name] for name in ("plain", *ways)}
    if backend is not None:
        functions = {name: _compiled(way, index, backend) for name, way in functions.items()}
    label = f"{kind}-{size:.0e}".replace("+0", "") + ("-compiled" if backend else "")
    words = f"{kind}, {size:,} elements, {'compiled' if backend else 'eager'}"
    pairs = [("plain", way) for way in ways]
    if "index_put" in ways:
        pairs.append(("index_put", "sliced_assign"))
    for step in ("forward", "backward"):
        backward = step == "backward"
        t = torch.zeros(rows, COLUMNS, device=device, requires_grad=backward)
        value = torch.ones((), device=device, requires_grad=backward)
        names = {"torch": torch, "index": index, **functions}
        names |= {"t": t, "value": value, "ones": torch.ones_like(t)}
        call = "{}(t, index, value)"
        if backward:
            call = f"torch.autograd.grad({call}, (t, value), ones)"
        for baseline, way in pairs:
            over = "" if baseline == "plain" else f"-over-{baseline}"
            yield Comparison(
                f"{label}-{step}-{way}{over}",
                f"{way} for {baseline}: {words}, {'and ' * backward}{step}",
                names,
                call.format(baseline),
                call.format(way),
                elsewhere,
                elsewhere,
                target=_target(baseline, way, size, compiled=backend is not None),
                why=WHY_EAGER if backend is None else WHY_COMPILED,
            )


def _target(baseline: str, way: str, size: int, *, compiled: bool) -> Target | None:
    """Return what was aimed at for ``sliced_assign``; the other ways are there to compare."""
    if way != "sliced_assign" or (compiled and baseline == "index_put"):
        return None
    if compiled:
        return COMPILED
    if baseline == "index_put":
        return OVER_INDEX_PUT
    return EAGER if size >= EAGER_FROM else EAGER_SMALL


def _compiled(way: Assign, index: Any, backend: str) -> Assign:
    """Compile with the index inside, or, where it is a tensor, as an argument."""
    compiles: Any = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    if isinstance(index, slice):
        inner: Any = compiles(of_its_own(lambda t, value: way(t, index, value)))
        return lambda t, _, value: inner(t, value)
    outer: Assign = compiles(of_its_own(lambda t, index, value: way(t, index, value)))  # noqa: PLW0108
    return outer


def run(setting: Setting) -> Results:
    """Measure every row."""
    largest = SIZES[0] if setting.quick else setting.options.largest
    backend = "eager" if setting.quick else "inductor"
    kept, rows = keep_freed_memory(), list[dict[str, Any]]()
    for size in (size for size in SIZES if size <= largest):
        if setting.stream.time_is_up():
            break
        fewer = replace(setting, rounds=setting.rounds // 5) if size >= LARGE else setting
        rows += measure(comparisons(setting.device, size, backend), fewer, block_seconds=2e-2)
    return {"freed_memory_is_kept": kept, "rows": rows}


def _across_sizes(record: Row, device: str) -> list[Row]:
    """Return a row for each way, with a column for each size."""
    parts = r"(.+)-1e(\d+)-((?:compiled-)?(?:forward|backward))-(\w+)(?:-over-(\w+))?$"
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in of_device(record, "rows", device):
        if match := re.match(parts, row["id"]):
            kind, power, step, way, over = match.groups("")
            cells = found.setdefault((kind, step.replace("-", ", "), way, over), {})
            missed = (row["verdict"] or "").startswith("missed")
            cells[power] = f"{row['ratio']['median']:.2f}" + " (missed)" * missed
    return [
        {"kind": kind, "step": step, "way": way, "against": f"`{over}`" if over else "statements"}
        | cells
        for (kind, step, way, over), cells in found.items()
    ]


BENCHMARK = Benchmark(
    "assign",
    "What does an indexed assignment cost, spelled in seven ways, eager and compiled?",
    run,
    rounds=51,
    options={"--largest": {"type": float, "default": 1e8, "help": "elements"}},
    tables=(
        Table(
            {
                "index": "{kind}",
                "step": "{step}",
                "way": "`{way}`",
                "against": "{against}",
                **{f"10^{power}": f"{{{power}}}" for power in range(3, 9)},
            },
            lead="Times over those of `out = t.clone(); out[index] = value`, or of `index_put`, "
            "for tensors of 10^3 to 10^8 elements.",
            rows=_across_sizes,
        ),
    ),
)
