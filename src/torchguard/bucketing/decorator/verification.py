"""Run a function without side effects and keep what came of it: outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.output_shapes import leaves_of
from torchguard.bucketing.decorator.trees import Path, flattened, replaced, spelled
from torchguard.equivalence.isolate import (
    Undone,
    address,
    forked_random_state,
    python_state_kept,
    tensors_around,
)
from torchguard.equivalence.perturb import nudge

__all__ = ["Arguments", "Gradient", "Run", "backward", "ran", "with_other_last_digits"]


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


class Gradient(NamedTuple):
    """Of one leaf of the graph."""

    name: str
    leaf: torch.Tensor
    """Kept, lest another leaf of another run gets its id."""
    value: torch.Tensor | None
    known: bool
    """Whether the leaf was there before the run; some functions make leaves of their own."""


class Run(NamedTuple):
    """What one run gave."""

    output: Any
    leaves: list[tuple[Path, Any]]
    gradients: dict[Any, Gradient]
    """By path of an input, or by id of another leaf."""
    buffers: dict[str, torch.Tensor]
    """Those of modules that it has written, as it left them."""
    before: dict[str, torch.Tensor]
    """The same buffers, as they were and are again."""
    operators: set[str]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The leaves that are no inputs."""
        return [each.leaf for key, each in self.gradients.items() if type(key) is int]


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
    leaves: dict[Path, torch.Tensor] = {}
    for path, value in given.leaves():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            # A new leaf: the gradient must not run on into what made the input.
            leaves[path] = value.detach().requires_grad_()
    aside = Undone()
    try:
        with forked_random_state(), python_state_kept(modules):
            held = _buffers(modules)
            fresh = prepare(given.with_parts(dict(leaves)))
            inputs = {
                address(value): names[path]
                for path, value in fresh.leaves()
                if path in names and isinstance(value, torch.Tensor)
            }
            with aside:
                output = function(*fresh.args, **fresh.kwargs)
            output, counts = cut(output)  # which may run the function on tensors without data
            parts = [(leaf.path, leaf.value) for leaf in leaves_of(output)]
            with aside:
                gradients = _gradients(
                    parts, counts, leaves, names, (function, given.args, modules)
                )
            kept = [
                (path, _counted(value.detach(), counts.get(path)).clone())
                if isinstance(value, torch.Tensor)
                else (path, value)
                for path, value in parts
            ]
            buffers = _written(held, aside.written)
    finally:
        aside.undo()
    lost = [name for place, name in inputs.items() if place and place in aside.written]
    if lost:
        raise ValueError(
            f"bucketed: the function writes to its input {lost[0]}; what it gets is a padded copy, "
            "so the write would be lost: return the new value instead"
        )
    before = {name: buffer for name, _, _, buffer in held if name in buffers}
    return Run(output, kept, gradients, buffers, before, aside.seen)


def _counted(value: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Put 0 where an element does not count."""
    if counts is None:
        return value
    return torch.where(counts, value, torch.zeros((), dtype=value.dtype, device=value.device))


_Held = tuple[str, torch.nn.Module, str, torch.Tensor]
"""A buffer: its full name, the module that has it, its name there."""


def _buffers(modules: Sequence[torch.nn.Module]) -> list[_Held]:
    names: dict[int, str] = {}
    for module in modules:  # the outer ones first
        for name, buffer in module.named_buffers():
            names.setdefault(id(buffer), name)
    return [
        (names.get(id(buffer), key), module, key, buffer)
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _written(held: Iterable[_Held], written: set[int]) -> dict[str, torch.Tensor]:
    """Copy the buffers whose memory was written, or that are another tensor now."""
    found = {}
    for name, module, key, buffer in held:
        now = module._buffers.get(key)
        if now is not None and (now is not buffer or address(buffer) in written):
            found[name] = now.detach().clone()
    return found


def _parameters(outputs: list[Any], inputs: Any) -> list[torch.Tensor]:
    """Find the leaves that outputs depend on by way of the graph, inputs left out."""
    known = {id(tensor) for tensor in inputs}
    found: dict[int, torch.Tensor] = {}
    waiting = [
        value.grad_fn
        for value in outputs
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def _gradients(
    parts: list[tuple[Path, Any]],
    counts: dict[Path, torch.Tensor],
    inputs: dict[Path, torch.Tensor],
    names: dict[Path, str],
    around: tuple[Any, Iterable[Any], Sequence[torch.nn.Module]],
) -> dict[Any, Gradient]:
    parameters = _parameters([value for _, value in parts], inputs.values())
    wanted = [*inputs.values(), *parameters]
    differentiable = [
        (value, counts.get(path))
        for path, value in parts
        if isinstance(value, torch.Tensor) and value.requires_grad and value.numel()
    ]
    if not wanted or not differentiable:
        return {}
    weights = [
        _counted(
            torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=torch.float64)
            .to(value.dtype)
            .view(value.shape),
            counted,
        )
        for value, counted in differentiable
    ]
    found = torch.autograd.grad(
        [value for value, _ in differentiable], wanted, weights, allow_unused=True
    )
    said: dict[int, str] = {}
    function, arguments, modules = around
    for module in modules:
        for name, parameter in module.named_parameters():
            said.setdefault(id(parameter), name)
    held = {*said, *(id(tensor) for tensor in tensors_around(function, arguments))}
    labels = [
        *((path, names.get(path, spelled("input", path[1:])), True) for path in inputs),
        *(
            (id(p), said.get(id(p), f"parameter {i}"), id(p) in held)
            for i, p in enumerate(parameters)
        ),
    ]
    return {
        key: Gradient(name, leaf, value, is_known)
        for (key, name, is_known), leaf, value in zip(labels, wanted, found, strict=True)
    }


def backward(output: Any) -> None:
    """Run the backward of an output; no gradient is accumulated anywhere."""
    parts = [(leaf.path, leaf.value) for leaf in leaves_of(output)]
    _gradients(parts, {}, {}, {}, (None, (), ()))


def with_other_last_digits(given: Arguments, seed: int) -> tuple[Arguments, bool]:
    """Return the call with other last digits in what requires a gradient, and if any changed."""
    new: dict[Path, Any] = {}
    changed = False
    for path, value in given.leaves():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            copy = value.detach().clone()
            nudge(copy, seed)
            changed |= not torch.equal(copy, value)
            new[path] = copy.requires_grad_()
    return given.with_parts(new), changed
