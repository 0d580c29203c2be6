"""``load_state_dict(strict=True)`` that raises has loaded part of the checkpoint.

``Module.load_state_dict`` copies tensor by tensor, collects what does not match
and raises at the end: by then every tensor that did match is overwritten. With
``assign=True`` the Parameter objects themselves were replaced, so an optimizer
made before goes on updating parameters the model no longer has.

Nobody has reported it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchguard.defects.catalog import Defect


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def _refused(model: nn.Module, state: dict[str, Tensor], *, assign: bool) -> bool:
    try:
        model.load_state_dict(state, strict=True, assign=assign)
    except RuntimeError:
        return True
    return False


def probe() -> str | None:
    """Load a checkpoint whose last tensor has the wrong shape."""
    # None of these values is one that the layers start with.
    state = {"0.weight": torch.full((2, 2), 77.0), "1.weight": torch.full((9, 9), 77.0)}
    seen: list[str] = []

    model = _two_layers()
    before = model.get_parameter("0.weight").detach().clone()
    if _refused(model, state, assign=False):
        after = model.get_parameter("0.weight").detach()
        if not torch.equal(before, after):
            seen.append("overwrote 1 weight")

    model = _two_layers()
    known_to_an_optimizer = model.get_parameter("0.weight")
    if _refused(model, state, assign=True):
        after = model.get_parameter("0.weight")
        if after is not known_to_an_optimizer:
            seen.append("with assign=True replaced 1 Parameter")

    return f"load_state_dict raised, yet {', '.join(seen)}" if seen else None


DEFECT = Defect(
    id="load-partial",
    summary="load_state_dict(strict=True) that raises has overwritten every tensor that matched",
    upstream=(),
    family="memory",
    probe=probe,
    guards=("load",),
    advice=(
        "Compare names and shapes with model.state_dict() before loading, or load into a copy of "
        "the model."
    ),
)
