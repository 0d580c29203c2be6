"""Operations that read memory they write: what comes out depends on how a loop walks over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from torchguard.defects.probes import issues, memory_defect

_overlap_defect = partial(
    memory_defect,
    guards=("overlap",),
    advice="Write .clone() behind the operand that shares memory with what is written.",
)


def _is_wrong(
    lines: Mapping[str, Callable[[Tensor, Tensor], object]], shape: tuple[int, ...]
) -> str:
    """Name the lines that compute something else than with a copy of what they read."""
    wrong = []
    for name, line in lines.items():
        written = 1 + torch.arange(float(torch.Size(shape).numel()), device="cpu").view(shape)
        expected, operand = written.clone(), written.clone()
        line(expected, operand)
        with suppress(RuntimeError):  # torch refuses: no wrong number
            line(written, written)
            if not written.equal(expected):
                wrong.append(name)
    return ", ".join(wrong)


def _subtract(x: Tensor, y: Tensor) -> None:
    x -= y[:, :1]


def _shift(x: Tensor, y: Tensor) -> None:
    x[:, 1:] = y[:, :-1]


def _add_element(x: Tensor, y: Tensor) -> None:
    x[:, 0] += y[0, 0]


def _foreach(x: Tensor, y: Tensor) -> None:
    torch._foreach_sub_([x[0], x[1]], [y[1], y[0]])


@_overlap_defect(
    "x -= x[:, :1] and x[:, 1:] = x[:, :-1] read elements that they have written already",
    title="x -= x[:, :1] gives wrong values",
    upstream=issues(135487, 144861, 76891, 85852, 906),
    limits="A shift under torch.vmap stays as torch computes it.",
)
def overlap_inplace() -> str | None:
    """Run four lines on a tensor, and on one whose operand is a copy, as numpy computes them.

    https://numpy.org/doc/stable/release/1.13.0-notes.html
    """
    lines = {
        "x -= x[:, :1]": _subtract,
        "x[:, 1:] = x[:, :-1]": _shift,
        "x[:, 0] += x[0, 0]": _add_element,
        "_foreach_sub_([a, b], [b, a])": _foreach,
    }
    wrong = _is_wrong(lines, (7, 9))
    return f"wrong without an error: {wrong}" if wrong else None


@_overlap_defect(
    "mm, cat and cumsum with an out= that they read give wrong numbers",
    title="mm(x, y, out=x) gives wrong values",
    upstream=issues(87551, 48900, 114350),
)
def overlap_out() -> str | None:
    """Compute into one of the operands, and into a tensor of its own."""
    lines: Mapping[str, Callable[[Tensor, Tensor], object]] = {
        "mm": lambda b, read: torch.mm(read, read, out=b),
        "cat": lambda b, read: torch.cat([read[:, 4:], read[:, :4]], 1, out=b),
        "cumsum": lambda b, read: torch.cumsum(read[:, :-1], 1, out=b[:, 1:]),
    }
    wrong = _is_wrong(lines, (64, 64))
    return f"wrong without an error: out= of {wrong}" if wrong else None


@_overlap_defect(
    "torch.nonzero(x, out=w) with w a window over x writes past w, and may kill the process",
    title="nonzero(out=) writes out of bounds",
    upstream=issues(135487),
)
def overlap_nonzero() -> str | None:
    """Write the places of the ones over the ones, with elements of the caller's behind them."""
    memory = torch.zeros(4096, dtype=torch.int64, device="cpu")
    x = memory[:64]
    x[:8] = 1
    window = memory.as_strided((8, 1), (2, 1), 10)  # has as many rows as x has ones
    expected = x.nonzero()
    behind = memory[25:].clone()
    with suppress(RuntimeError):  # an internal assertion, after it has written
        torch.nonzero(x, out=window)
    past = int((memory[25:] != behind).sum())
    if past:
        return f"nonzero wrote {past} elements past its output of 8"
    return None if window.equal(expected) else "nonzero reported elements that it had written"
