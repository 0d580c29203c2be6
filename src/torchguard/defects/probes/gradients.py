"""Compiled code whose gradients are not those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchguard.defects.probes import gradient_defect, issues


class _RunningVariance(torch.nn.Module):
    """Scales by the variance of the batches so far, then counts this one in."""

    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, batch: Tensor) -> Tensor:
        scaled = batch * self.variance.rsqrt() * self.weight
        self.variance.lerp_(batch.square().mean(0), 0.5)
        return scaled.sum()


@gradient_defect(
    "compiled: a module that updates a statistics buffer in forward gets wrong gradients",
    title="wrong gradients after a buffer update",
    upstream=("https://github.com/pytorch/pytorch/pull/197039",),
    guards=("verified",),
    advice="Replace the buffer instead of writing into it: "
    "self.variance = self.variance.lerp(new, 0.1), not lerp_.",
)
def buffer_update() -> str | None:
    """Compare the weight's gradient after one step, compiled and eager.

    AOTAutograd's min-cut partitioner saves the buffer for the backward pass and recomputes there
    what forward had read from it, after forward has written it within the graph.
    """
    eager = _RunningVariance()
    compiled = copy.deepcopy(eager)
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (want,) = torch.autograd.grad(eager(batch), eager.weight)
    (got,) = torch.autograd.grad(torch.compile(compiled)(batch), compiled.weight)
    if torch.allclose(want, got):
        return None
    found, right = ([round(value, 3) for value in each.tolist()] for each in (got, want))
    return f"compiled gradient {found} where eager gives {right}"


def _other_gradient(
    where: str,
    eager: Callable[..., Tensor],
    compiled: Callable[..., Tensor],
    shape: tuple[int, ...],
    *others: Tensor,
) -> str | None:
    """Compare the gradient of a function's first argument, which is zero, by its sum."""
    gradients = []
    for function in (eager, compiled):
        value = torch.zeros(shape, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(value, *others), value)
        gradients.append(gradient.sum().item())
    expected, actual = gradients
    seen = f"the sum of the gradient {where} is {actual:g} compiled, {expected:g} in eager"
    return None if expected == actual else seen


def _scattered(x: Tensor) -> Tensor:
    return torch.slice_scatter(x, x.new_zeros(1, 3), dim=0, start=1, end=2).sum()


@gradient_defect(
    "compiled: wrong input gradient of slice_scatter, select_scatter, diagonal_scatter",
    title="slice_scatter has a wrong gradient",
    upstream=issues(180164, 180771, 180772, 183898, 183602),
    guards=("verified",),
    advice="Write out = x.clone(); out[start:end] = source instead of torch.slice_scatter.",
)
def scatter_gradient() -> str | None:
    """Compare the gradient of ``slice_scatter``, compiled and eager.

    Zeros are scattered into the output's gradient, which is expanded. Up to 2.11 the shape rules
    (``torch/_meta_registrations.py``) and the reference of ``diagonal_scatter`` (``torch/_refs``)
    keep those strides, so inductor lets all positions share one element.
    """
    return _other_gradient("of slice_scatter", _scattered, torch.compile(_scattered), (3, 3))


_WIDTH = 64  # a multiple of the elements in any vector register


def _embedded(weight: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, weight).sum()


@gradient_defect(
    "compiled for one CPU thread: an id's embedding gradient is that of one occurrence",
    title="an id that occurs twice gets one gradient",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/147848",
        "https://github.com/pytorch/pytorch/pull/147961",
    ),
    guards=("verified",),
    advice="Run with OMP_NUM_THREADS=2, or torch._inductor.config.cpp.dynamic_threads = True.",
)
def repeated_id() -> str | None:
    """Compare the gradient of an embedding for an id that occurs twice, compiled and eager.

    With one thread, as torchrun has it, nothing has to be atomic, and up to 2.6 the vectorized
    store overwrites (``CppVecKernel.store`` in ``torch/_inductor/codegen/cpp.py``).
    """
    torch.set_num_threads(1)
    where, compiled = "for an id that occurs twice", torch.compile(_embedded)
    return _other_gradient(where, _embedded, compiled, (2, _WIDTH), torch.tensor([1, 1]))


def _ask_requires_grad(v: Tensor) -> tuple[Tensor, Tensor, bool, bool]:
    """Return what ``requires_grad`` says after an indexed assignment and after ``detach_``."""
    m = torch.zeros(1, 2, 2)
    m[:, torch.tensor([0]), torch.tensor([1])] = v
    y = v * 2
    y.detach_()
    return m, y, m.requires_grad, y.requires_grad


@gradient_defect(
    "compiled: requires_grad is wrong after an indexed assignment or detach_()",
    title="requires_grad is False after x[i] = v",
    upstream=issues(169179, 176854),
    guards=("setitem",),
    advice="Write m = m.index_put((b, r, c), v) and y = y.detach() where requires_grad is read.",
)
def requires_grad_lies() -> str | None:
    """Compare both answers with eager; no kernel is compiled, the tracing alone is wrong.

    Dynamo answers from a note that ``TensorVariable.method___setitem__`` does not refresh up to 2.8
    (``torch/_dynamo/variables/tensor.py``), and nothing after ``detach_()`` up to 2.11.
    """
    v = torch.ones(1, 1, requires_grad=True)
    *_, assigned, detached = torch.compile(_ask_requires_grad, backend="eager")(v)
    *_, eager_assigned, eager_detached = _ask_requires_grad(v)
    seen = []
    if assigned != eager_assigned:
        seen.append(f"m[:, r, c] = v (says {assigned})")
    if detached != eager_detached:
        seen.append(f"y.detach_() (says {detached})")
    return f"requires_grad is wrong after {' and '.join(seen)}" if seen else None


class _TimesTwo(torch.autograd.Function):
    """Doubles, with a backward that multiplies by three, so that it can be recognised."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _into_view(value: Tensor) -> Tensor:
    m = torch.zeros(2, 2)
    m[0][0] = value
    result: Tensor = _TimesTwo.apply(m)  # type: ignore[no-untyped-call]
    return result.sum()


@gradient_defect(
    "compiled: after a write into a view, an autograd function's backward is left out",
    title="a custom backward is left out",
    upstream=issues(169179),
    guards=("setitem",),
    advice="Write m[0, 0] = v in one step, or m = torchguard.sliced_assign(m, (0, 0), v).",
)
def view_requires_grad() -> str | None:
    """Compare the gradient with eager; no kernel is compiled, the tracing alone is wrong.

    From 2.9 on Dynamo notes ``requires_grad`` again for the tensor that was written to, not for
    others that share its memory: an autograd function of these is traced without its backward.
    """
    compiled = torch.compile(_into_view, backend="eager")
    return _other_gradient("after m[0][0] = v", _into_view, compiled, ())
