"""A training that is set up wrong says so when its transaction is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from torchguard._events import record
from torchguard.errors import TrainingSetupWarning

_SHOWN = 3  # names


def warn_of_parameters(
    function: str, models: Iterable[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Warn if a model has trainable parameters that no optimizer has.

    A model of which no optimizer has any is the business of other code, such as the other half of a
    GAN. Parameters that are in no model may be right (a temperature of the loss): they are named
    only if parameters of the model are missing, for then they may be those of a part that was
    replaced, or of the model before ``fully_shard``.
    """
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    missing: list[str] = []
    known: set[int] = set()
    for model in models:
        parameters = dict(model.named_parameters())
        known.update(map(id, parameters.values()))
        if any(id(each) in held for each in parameters.values()):
            missing += [n for n, p in parameters.items() if p.requires_grad and id(p) not in held]
    if not missing:
        return
    shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    text = f"{function}: no optimizer has {len(missing)} trainable parameters of the model: {shown}"
    stale = len(held - known)
    if stale:
        text += (
            f"; and an optimizer has {stale} parameters that are not in the model. If a part of "
            "the model was replaced after the optimizer was made, make the optimizer again"
        )
    else:
        text += ". Freeze them with requires_grad_(False), or pass the optimizer that has them"
    record("training_setup", function, text)
    warnings.warn(text, TrainingSetupWarning, stacklevel=3)
