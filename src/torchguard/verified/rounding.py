"""Whether rounding alone makes a compiled graph differ from eager: where the graph jumps.

Two questions tell that from a wrong graph. Does eager, with inputs that are off by their last
digits, come as far away from itself? And is the same graph, compiled in double precision, right?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchguard.internals import tracing_again
from torchguard.last_digits import nudge
from torchguard.verified.case import same_outcome
from torchguard.verified.comparison import Difference, as_double, differences
from torchguard.verified.copies import copy_inputs, tensors_of
from torchguard.verified.graphs import copy_graph, in_double, wider
from torchguard.verified.ladder import Compiler
from torchguard.verified.outcome import Outcome, run

__all__ = ["right_in_double", "scatters_as_far"]

_RUNS = 16
"""With how many different last digits eager runs at most."""

_MULTIPLE = 2.0
"""How many times further than eager from itself the compiled result may be from eager."""


def scatters_as_far(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    eager: Outcome,
    compiled: Outcome,
    found: Sequence[Difference],
) -> bool:
    """Whether eager comes as far from itself, once the last digits of its inputs are others."""
    apart = _apart(found, eager, compiled)
    if apart is None or not same_outcome(eager, run(graph, inputs)):
        return False
    # Data may be compared with a constant (a mask of ones), what learns is not.
    some_learn = any(tensor.requires_grad for tensor in tensors_of(inputs))
    for seed in range(_RUNS):

        def change(values: torch.Tensor, learns: bool, seed: int = seed) -> None:
            if learns or not some_learn:
                nudge(values, seed)

        nudged = run(graph, inputs, change=change)
        apart = [each for each in apart if not each.reached_by(nudged)]
        if not apart:
            return True
    return False


def right_in_double(graph: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> bool:
    """Whether the same graph, in double precision, compiled, does what eager does.

    There a jump is a billion times less likely to be within the rounding error.
    """
    wide = in_double(graph)
    if wide is None:
        return False
    eager = run(wide, inputs, cast=wider)
    if eager.error is not None or eager.backward_error is not None:
        return False
    try:
        with tracing_again(None):
            compiled = compiler(copy_graph(wide), copy_inputs(inputs, wider).values)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - then nothing has shown that it is right
        return False
    return not differences(eager, run(compiled, inputs, cast=wider), lambda: None)


@dataclass(frozen=True)
class _Apart:
    """One tensor of a run that the compiled graph has otherwise."""

    part: str
    position: int
    eager: torch.Tensor
    off: torch.Tensor
    """Of floats: how far apart they are at most. Of others: where they differ."""

    def reached_by(self, nudged: Outcome) -> bool:
        """Whether this run of eager is as far from the first one."""
        values = getattr(nudged, self.part)
        value = values[self.position] if values else None
        if not isinstance(value, torch.Tensor) or value.shape != self.eager.shape:
            return False
        if self.off.dtype == torch.bool:
            return bool((value != self.eager)[self.off].all())
        away = (as_double(value.detach()) - as_double(self.eager)).abs().nan_to_num()
        return bool(_MULTIPLE * away.max() >= self.off)


def _apart(found: Sequence[Difference], eager: Outcome, compiled: Outcome) -> list[_Apart] | None:
    """Return the tensors that differ; None where more than finite values does."""
    apart = []
    for difference in found:
        if difference.tensor is None:
            return None
        part, position = difference.tensor
        one, other = (getattr(outcome, part)[position] for outcome in (eager, compiled))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None  # a gradient that only one of them has
        one, other = one.detach(), other.detach()
        if one.is_floating_point() or one.is_complex():
            off = (as_double(one) - as_double(other)).abs().nan_to_num().max()
        else:
            off = one != other
        apart.append(_Apart(part, position, one, off))
    return apart
