"""One program, eager and compiled: what a caller could see of a difference.

This judge knows nothing of the one in :mod:`torchguard.verified`, which it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchguard.verification.fuzz.programs import SIZES, Program

__all__ = ["Trial", "attempt"]


@dataclass(frozen=True)
class Trial:
    """What has become of one program."""

    program: Program
    wrong: tuple[str, ...]
    """What the caller saw that eager does not do; empty if it is right."""


def attempt(program: Program, compile_: Callable[..., Any], sizes: Sequence[int] = SIZES) -> Trial:
    """Compile the program with ``compile_`` and compare calls with eager.

    There are two calls with the first number of rows, the second with numbers that no check
    has seen, and then one with each of the others: from there on the graph is dynamic.
    """
    eager, compiled = program.function(), compile_(program.function())
    wrong: list[str] = []
    for call, rows in enumerate((sizes[0], *sizes)):
        want = _seen(eager, program, call, rows)
        try:
            got = _seen(compiled, program, call, rows)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            wrong.append(f"{rows} rows: raises {type(error).__name__}: {first}")
            continue
        wrong += [f"{rows} rows: {name}" for name in want if not _equal(want[name], got.get(name))]
    return Trial(program, tuple(wrong))


def _seen(function: Callable[..., Any], program: Program, call: int, rows: int) -> dict[str, Any]:
    x, y = program.inputs(call, rows)
    given = [x * 1 if program.gradients else x, y]
    results = list(function(*given))
    seen: dict[str, Any] = {}
    named = {f"result {i}": value for i, value in enumerate(results)}
    named.update(zip(("x after the call", "y after the call"), given, strict=True))
    for name, value in named.items():
        seen[f"{name}, requires_grad"] = value.requires_grad
        if 0 not in value.stride():  # what eager expands may be written out
            seen[f"{name}, order of strides"] = _order_of_strides(value)
        seen[name] = value.detach().clone()
    ends = [value for value in named.values() if value.requires_grad]
    if ends:
        weights = torch.linspace(0.5, 1.5, x.numel(), device="cpu")
        sums = [(end * weights[: end.numel()].view(end.shape)).sum() for end in ends]
        (gradient,) = torch.autograd.grad(sum(sums[1:], sums[0]), x, allow_unused=True)
        seen["gradient of x"] = torch.zeros_like(x) if gradient is None else gradient
    # Write into one after the other and see what else changes: that is what sharing means.
    tensors = {name: value.detach() for name, value in named.items()}
    for name, value in tensors.items():
        before = {other: tensor.clone() for other, tensor in tensors.items()}
        value.fill_(12345.0)
        for other, tensor in tensors.items():
            changed = not torch.equal(tensor.nan_to_num(), before[other].nan_to_num())
            seen[f"writing into {name} changes {other}"] = changed
        for other, tensor in before.items():
            tensors[other].copy_(tensor)
    return seen


def _order_of_strides(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _equal(want: Any, got: Any) -> bool:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if want.shape != got.shape or want.dtype != got.dtype:
            return False
        return torch.allclose(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    return bool(want == got)
