"""While tracing, ``requires_grad`` keeps its old value after an update in place.

Dynamo notes a tensor's ``requires_grad`` when the tensor is made and answers from the
note. Up to 2.8 ``TensorVariable.method___setitem__`` (``torch/_dynamo/variables/tensor.py``)
does not refresh it after ``m[:, r, c] = v``, and up to 2.11 nothing refreshes it after
``y.detach_()``. The tensors themselves are right; code that branches on ``requires_grad``
(an autograd function that skips its backward, an assertion) takes the wrong path.

https://github.com/pytorch/pytorch/issues/169179
https://github.com/pytorch/pytorch/issues/176854
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _ask(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    """Return what ``requires_grad`` says after an indexed assignment and after ``detach_``."""
    m = torch.zeros(1, 2, 2)
    m[:, torch.tensor([0]), torch.tensor([1])] = v
    y = v * 2
    y.detach_()
    return m, y, m.requires_grad, y.requires_grad


def probe() -> str | None:
    """Compare both answers with eager; no kernel is compiled, the tracing alone is wrong."""
    v = torch.ones(1, 1, requires_grad=True)
    *_, assigned, detached = torch.compile(_ask, backend="eager")(v)
    *_, eager_assigned, eager_detached = _ask(v)
    seen = []
    if assigned != eager_assigned:
        seen.append(f"m[:, r, c] = v (says {assigned})")
    if detached != eager_detached:
        seen.append(f"y.detach_() (says {detached})")
    return f"requires_grad is wrong after {' and '.join(seen)}" if seen else None


DEFECT = Defect(
    id="requires-grad-lies",
    summary="compiled: requires_grad is wrong after an indexed assignment or detach_()",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/169179",
        "https://github.com/pytorch/pytorch/issues/176854",
    ),
    family="gradient",
    probe=probe,
    guards=("setitem",),
    advice="Write m = m.index_put((b, r, c), v) and y = y.detach() where requires_grad is read.",
)
