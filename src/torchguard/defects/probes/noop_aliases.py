"""A compiled ``x / 1.0``, ``x * 1`` or ``x + 0`` returns ``x`` itself, not a new tensor.

Inductor's ``remove_no_ops`` (``torch/_inductor/fx_passes/joint_graph.py``) replaces such
an operation by its operand. Up to 2.13 it knew only neutral elements that are tensors;
since 2.14 it takes Python numbers too, and unlike ``remove_noop_ops`` in ``post_grad.py``
it does not ask whether that makes an output an alias of an input. So ``logits /
temperature`` is safe to update in place at every temperature but 1.0.

https://github.com/pytorch/pytorch/issues/197893
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _cool(logits: torch.Tensor) -> torch.Tensor:
    return logits / 1.0


def probe() -> str | None:
    """Update the result in place and see whether the argument changes with it."""
    eager, compiled = torch.zeros(4), torch.zeros(4)
    _cool(eager).add_(1.0)
    torch.compile(_cool)(compiled).add_(1.0)
    if torch.equal(compiled, eager):
        return None
    return "logits / 1.0 returned logits: updating the result in place changed the input"


DEFECT = Defect(
    id="noop-aliases",
    summary="compiled: x * 1, x + 0 and x / 1.0 return the input itself",
    upstream=("https://github.com/pytorch/pytorch/issues/197893",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Call .clone() on the result outside the compiled function before updating it in place.",
)
