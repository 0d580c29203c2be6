"""Run a function without side effects and keep what came of it: outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.output_shapes import leaves_of
from torchguard.bucketing.decorator.trees import Path, flattened, replaced, spelled
from torchguard.equivalence.perturb import perturb_
from torchguard.equivalence.reachable import reachable_tensors
from torchguard.equivalence.run import Outcome, Output, run_undoing_mutations, send_backward

__all__ = ["Arguments", "Run", "backward", "ran", "with_other_last_digits"]


class Arguments(NamedTuple):
    """How to call a function: what comes first (``self``), by place and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[tuple[Path, Any]]:
        """Everything in it, with paths."""
        return [
            *(((0, *path), value) for path, value in flattened(self.args)),
            *(((1, *path), value) for path, value in flattened(self.kwargs)),
        ]

    def with_parts(self, new: dict[Path, Any]) -> Arguments:
        """Return the same with some parts replaced."""
        return Arguments(*replaced((self.args, self.kwargs), new))


class Run(NamedTuple):
    """What one run gave."""

    output: Any
    """The real part of what the function returned."""
    outcome: Outcome


def ran(
    function: Callable[..., Any],
    given: Arguments,
    *,
    prepare: Callable[[Arguments], Arguments],
    cut: Callable[[Any], tuple[Any, dict[Path, torch.Tensor]]],
    names: dict[Path, str],
    modules: Sequence[torch.nn.Module],
) -> Run:
    """Run a function without side effects; return the real part of its output and the gradients.

    Args:
        function: runs eagerly.
        given: its arguments, not padded.
        prepare: pads them.
        cut: takes the real part of the output; says of its tensors by path which elements count.
        names: what to call the inputs by path.
        modules: those the function may change.
    """
    paths, leaves = zip(*given.leaves(), strict=True) if given.leaves() else ((), ())
    fresh, whole = given, None

    def padded(changed: list[Any]) -> list[Any]:
        nonlocal fresh
        pairs = zip(paths, leaves, changed, strict=True)
        fresh = prepare(given.with_parts({path: new for path, old, new in pairs if new is not old}))
        return [value for _, value in fresh.leaves()]

    def read(output: Any) -> tuple[Any, list[Output]]:
        nonlocal whole
        whole, counts = cut(output)  # which may run the function on tensors without data
        parts = leaves_of(whole)
        return [part.path for part in parts], [
            Output(part.value, counts.get(part.path)) for part in parts
        ]

    outcome = run_undoing_mutations(
        lambda _: function(*fresh.args, **fresh.kwargs),
        leaves,
        prepare=padded,
        read=read,
        names={
            place: names.get(path, spelled("input", path[1:])) for place, path in enumerate(paths)
        },
        modules=modules,
        held=lambda: reachable_tensors(function, given.args),
    )
    mutated = [path for place, (path, _) in enumerate(fresh.leaves()) if place in outcome.mutated]
    lost = [names[path] for path in mutated if path in names]
    if lost:
        raise ValueError(
            f"bucketed: the function writes to its input {lost[0]}; what it gets is a padded copy, "
            "so the write would be lost: return the new value instead"
        )
    return Run(whole, outcome)


def backward(output: Any) -> None:
    """Run the backward of an output; no gradient is accumulated anywhere."""
    send_backward([Output(leaf.value) for leaf in leaves_of(output)], {}, {})


def with_other_last_digits(given: Arguments, seed: int) -> tuple[Arguments, bool]:
    """Return the call with other last digits in what requires a gradient, and if any changed."""
    new: dict[Path, Any] = {}
    changed = False
    for path, value in given.leaves():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            copy = value.detach().clone()
            perturb_(copy, seed)
            changed |= not torch.equal(copy, value)
            new[path] = copy.requires_grad_()
    return given.with_parts(new), changed
