"""A failing ``out=`` call destroys what ``out`` held.

The operators resize ``out`` and write into it while they check their input
(indices, the dtype of a second output, a zero divisor, a singular matrix), so an
exception leaves ``out`` with another shape, or with part of a result or garbage
in the place of its data. The tensor needs no special storage for that.

Nobody has reported it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchguard.defects.catalog import Defect

# n is 3: a row number of -9 or 9 is out of range everywhere.
_ROWS = torch.arange(9.0).reshape(3, 3)
_BAD = torch.tensor([0, 1, 9])
_BAD_ROWS = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 9]])
_SINGULAR = torch.zeros(3, 3)
_ONES = torch.ones(3, 3)


def _wrong_dtype() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


def _floor_divide_by_zero(out: Tensor) -> None:
    divisor = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    torch.floor_divide(torch.full((3, 3), 6), divisor, out=out)


_Case = tuple[str, torch.dtype, Callable[[Tensor], object]]

# Name, dtype of out, the call that can't succeed; each result would be (3, 3).
_CASES: tuple[_Case, ...] = (
    ("index_select", torch.float32, lambda out: torch.index_select(_ROWS, 0, _BAD, out=out)),
    ("gather", torch.float32, lambda out: torch.gather(_ROWS, 0, _BAD_ROWS, out=out)),
    ("take", torch.float32, lambda out: torch.take(_ROWS, _BAD_ROWS, out=out)),
    ("scatter", torch.float32, lambda out: torch.scatter(_ROWS, 0, _BAD_ROWS, _ONES, out=out)),
    ("index_add", torch.float32, lambda out: torch.index_add(_ROWS, 0, _BAD, _ONES, out=out)),
    ("linalg.inv", torch.float32, lambda out: torch.linalg.inv(_SINGULAR, out=out)),
    ("linalg.cholesky", torch.float32, lambda out: torch.linalg.cholesky(_SINGULAR, out=out)),
    ("linalg.solve", torch.float32, lambda out: torch.linalg.solve(_SINGULAR, _ROWS, out=out)),
    ("sort", torch.float32, lambda out: torch.sort(_ROWS, out=(out, _wrong_dtype()))),
    ("max", torch.float32, lambda out: torch.max(_ROWS[None], 0, out=(out, _wrong_dtype()))),
    ("multinomial", torch.int64, lambda out: torch.multinomial(-_ONES, 3, out=out)),
    ("floor_divide", torch.int64, _floor_divide_by_zero),
)


def _damage(out: Tensor, call: Callable[[Tensor], object]) -> str | None:
    shape, values = out.shape, out.tolist()
    try:
        call(out)
    except (RuntimeError, IndexError, ValueError):
        if out.shape != shape:
            return f"{tuple(shape)} became {tuple(out.shape)}"
        if out.tolist() != values:
            return "data overwritten"
    return None


def probe() -> str | None:
    """Let each call fail once into an empty ``out`` and once into one that holds data."""
    damaged: dict[str, str] = {}
    for name, dtype, call in _CASES:
        # 77 is no result of any of these calls.
        for out in (torch.empty(0, dtype=dtype), torch.full((3, 3), 77, dtype=dtype)):
            damage = _damage(out, call)
            if damage is not None:
                damaged.setdefault(name, damage)
    if not damaged:
        return None
    name, damage = next(iter(damaged.items()))
    return f"{len(damaged)} of {len(_CASES)} failing calls spoiled out; {name}: {damage}"


def guarded_probe() -> str | None:
    """Run the same calls in the scope that restores what a failing call wrote."""
    import torchguard  # noqa: PLC0415 - the guarded run alone needs the guards

    with torchguard.guarded(data=True):
        return probe()


DEFECT = Defect(
    id="out-garbage",
    summary="a failing out= call leaves out resized or filled with garbage",
    upstream=(),
    family="memory",
    probe=probe,
    guards=("guarded",),
    limits='elements come back with data=True only; guarded() and install("out") restore shape and '
    "storage, and leave what was written, with the version counter moved on",
    guarded_probe=guarded_probe,
)
