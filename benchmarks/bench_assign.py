"""What an indexed assignment costs with ``sliced_assign``.

Baseline: ``out = t.clone(); out[index] = value``. Eager and compiled by inductor, forward and
backward. ``t`` is (rows, 64), and a hundredth of its rows is selected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Comparison, measure, of_its_own
from benchmarks.program import Benchmark, Results, Setting
from torchguard import sliced_assign

COLUMNS = 64
SIZES = (10**3, 10**5)
KINDS = ("slice", "mask", "integers")

Assign = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]


def plain(t: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    """Write the two statements that it is compared with."""
    out = t.clone()
    out[index] = value
    return out


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


def compiled(way: Assign, index: Any, backend: str) -> Assign:
    """Compile with the index inside, or, where it is a tensor, as an argument."""
    compiles: Any = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    if isinstance(index, slice):
        inner: Any = compiles(of_its_own(lambda t, value: way(t, index, value)))
        return lambda t, _, value: inner(t, value)
    outer: Assign = compiles(of_its_own(lambda t, index, value: way(t, index, value)))  # noqa: PLW0108
    return outer


def comparisons(device: str, sizes: tuple[int, ...], backend: str) -> Iterator[Comparison]:
    """Yield every row, smallest first."""
    for size, kind, mode in itertools.product(sizes, KINDS, ("eager", "compiled")):
        rows = max(1, size // COLUMNS)
        index = index_of(kind, rows, device)
        ways: dict[str, Assign] = {"plain": plain, "sliced_assign": sliced_assign}
        if mode == "compiled":
            ways = {name: compiled(way, index, backend) for name, way in ways.items()}
        for step in ("forward", "backward"):
            backward = step == "backward"
            t = torch.zeros(rows, COLUMNS, device=device, requires_grad=backward)
            value = torch.ones((), device=device, requires_grad=backward)
            names = {"torch": torch, "index": index, "t": t, "value": value, **ways}
            names["ones"] = torch.ones_like(t)
            before, after = (f"{name}(t, index, value)" for name in ways)
            if backward:
                before, after = (
                    f"torch.autograd.grad({call}, (t, value), ones)" for call in (before, after)
                )
            what = f"{kind}, {size:,} elements, {mode}, {step}"
            yield Comparison(what, what, names, before, after)


def run(setting: Setting) -> Results:
    """Measure every row."""
    sizes = SIZES[:1] if setting.quick else SIZES
    rows = comparisons(setting.device, sizes, "eager" if setting.quick else "inductor")
    return {"rows": measure(rows, setting, block_seconds=2e-2)}


BENCHMARK = Benchmark(
    "assign",
    "What does `sliced_assign` cost over the two statements, eager and compiled?",
    run,
    rounds=25,
    needs_triton=True,
)
