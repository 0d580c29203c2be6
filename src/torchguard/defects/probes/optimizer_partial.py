"""An optimizer step that raises midway has updated part of the model.

``step()`` and the ``torch._foreach_*`` calls under it walk over the parameters
and change each in place. When one fails (here it can't be written in place; out
of memory does the same), the parameters, moments and step counters before it are
already new and nothing takes them back: a caught exception and a retry apply
part of the update twice.

Nobody has reported it.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn import Parameter
from torch.optim import Adam

from torchguard.defects.catalog import Defect


class _Adam(Adam):
    """Adam without the decorators that import torch's compiler, which takes seconds."""

    add_param_group = inspect.unwrap(Adam.add_param_group)
    step = inspect.unwrap(Adam.step)


def probe() -> str | None:
    """Step over a sound parameter, then one whose rows share memory, which can't be written."""
    sound = Parameter(torch.zeros(3))
    unwritable = Parameter(torch.zeros(1).expand(3))
    parameters = [sound, unwritable]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer = _Adam(parameters, lr=1.0)
    try:
        with torch.no_grad():
            optimizer.step()
    except RuntimeError:
        pass
    else:
        return None
    moved = sum(bool(parameter.detach().any()) for parameter in parameters)
    counted = sum(float(state.get("step", 0)) > 0 for state in optimizer.state.values())
    if moved == 0 and counted == 0:
        return None
    return f"step() raised: {moved} of 2 parameters moved, {counted} of 2 step counters advanced"


DEFECT = Defect(
    id="optimizer-partial",
    summary="an optimizer step that raises midway has updated part of the parameters and moments",
    upstream=(),
    family="memory",
    probe=probe,
    advice=(
        "After a caught exception in step(), reload the model and the optimizer from a checkpoint "
        "instead of stepping again."
    ),
)
