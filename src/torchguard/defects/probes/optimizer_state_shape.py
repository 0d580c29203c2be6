"""Resuming after a layer grew makes the fused optimizer write past the end of its moments.

``Optimizer.load_state_dict`` does not compare the shape of a moment with that of
its parameter, and neither does the fused CPU kernel: it runs over as many
elements as the parameter has and reads and writes the shorter moments beyond
their end, into whatever memory follows, or crashes.

Nobody has reported it.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn import Parameter
from torch.optim import Adam

from torchguard.defects.catalog import Defect

_OLD, _NEW = 4, 64  # elements of the layer in the checkpoint and now


class _Adam(Adam):
    """Adam without the decorators that import torch's compiler, which takes seconds."""

    add_param_group = inspect.unwrap(Adam.add_param_group)
    state_dict = inspect.unwrap(Adam.state_dict)
    load_state_dict = inspect.unwrap(Adam.load_state_dict)
    step = inspect.unwrap(Adam.step)


def probe() -> str | None:
    """Resume with moments of the old size, each followed by memory that can be watched."""
    # The moments are the first elements of longer tensors: what the kernel writes beyond
    # them lands in memory of ours, and nothing crashes.
    memory = {name: torch.zeros(_NEW) for name in ("exp_avg", "exp_avg_sq")}
    moments = {name: whole[:_OLD] for name, whole in memory.items()}
    parameter = Parameter(torch.zeros(_NEW))
    parameter.grad = torch.ones(_NEW)
    try:
        optimizer = _Adam([parameter], fused=True)
        state = optimizer.state_dict()
        state["state"] = {0: {"step": torch.tensor(1.0), **moments}}
        optimizer.load_state_dict(state)
        with torch.no_grad():
            optimizer.step()
    except (RuntimeError, ValueError):
        pass
    spoiled = sum(int(torch.count_nonzero(whole[_OLD:])) for whole in memory.values())
    return f"step() wrote {spoiled} floats past the end of its moments" if spoiled else None


DEFECT = Defect(
    id="optimizer-state-shape",
    summary="fused Adam on CPU writes past the end of moments loaded from a smaller layer",
    upstream=(),
    family="memory",
    probe=probe,
    advice=(
        "After load_state_dict, check that each state tensor but `step` has the shape of its "
        "parameter, or leave fused off on CPU."
    ),
)
