"""While tracing, a write into a view leaves ``requires_grad`` of what it views as it was.

Dynamo answers ``m.requires_grad`` from a note of its own. From 2.9 on it makes the note
anew for the tensor that was written to, but not for the others that share its memory:
after ``m[0][0] = value``, or ``m[0].copy_(value)``, it goes on saying that ``m``
requires no gradient. A custom ``torch.autograd.Function`` of ``m`` then is traced
without its backward, and the gradient is silently another one.

https://github.com/pytorch/pytorch/issues/169179 (its kin)
"""

from __future__ import annotations

from typing import Any

import torch

from torchguard.defects.catalog import Defect


class _TimesTwo(torch.autograd.Function):
    """Doubles, and hands on three times the gradient, so that its backward can be told."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def _into_view(value: torch.Tensor) -> torch.Tensor:
    m = torch.zeros(2, 2)
    m[0][0] = value
    result: torch.Tensor = _TimesTwo.apply(m)  # type: ignore[no-untyped-call]
    return result.sum()


def probe() -> str | None:
    """Compare the gradient with eager; no kernel is compiled, the tracing alone is wrong."""
    gradients = []
    for function in (_into_view, torch.compile(_into_view, backend="eager")):
        value = torch.ones((), requires_grad=True)
        gradients.append(torch.autograd.grad(function(value), value)[0].item())
    eager, compiled = gradients
    if eager == compiled:
        return None
    return f"the gradient after m[0][0] = v is {compiled:g} compiled, {eager:g} in eager"


DEFECT = Defect(
    id="view-requires-grad",
    summary="compiled: after a write into a view, an autograd function's backward is left out",
    upstream=("https://github.com/pytorch/pytorch/issues/169179",),
    family="gradient",
    probe=probe,
    guards=("setitem",),
    advice="Write m[0, 0] = v in one step, or m = torchguard.sliced_assign(m, (0, 0), v).",
)
