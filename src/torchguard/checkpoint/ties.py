"""Tied tensors, such as the weight of an embedding and of the output layer, stay one tensor.

``load_state_dict(assign=True)`` and ``to_empty()`` go from name to name and make a parameter for
each: what was shared are two parameters afterwards, each with a gradient and moments of its own.
https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from torchguard._torch import members_of

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def guard_to_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``torch.nn.Module.to_empty`` keep tied tensors tied."""

    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        ties = ties_of(named_tensors(self, recurse=recurse))
        result = original(self, device=device, recurse=recurse)
        for names, old in ties:
            _tie(self, names, _loaded(self, names, old, {}))
        return result

    return to_empty


def named_tensors(
    module: torch.nn.Module, *, recurse: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers under each name they have."""
    return [
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    ]


def ties_of(
    tensors: Sequence[tuple[str, torch.Tensor]],
) -> list[tuple[list[str], torch.Tensor]]:
    """Return the tensors that have several names, with these."""
    if len({id(tensor) for _, tensor in tensors}) == len(tensors):
        return []
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in tensors:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [each for each in found.values() if len(each[0]) > 1]


def require_one_value(
    module: torch.nn.Module,
    ties: Iterable[tuple[list[str], torch.Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Raise if a state has two values for one tensor; torch would take the last one."""
    for names, _ in ties:
        _compare(module, [(name, state[name]) for name in sorted(names) if name in state])


def tie_again(
    module: torch.nn.Module,
    ties: Iterable[tuple[list[str], torch.Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Make one tensor of those that were assigned to the names of one; raise if they differ."""
    for names, old in ties:
        loaded = _loaded(module, names, old, state)
        _compare(module, loaded)
        _tie(module, names, loaded)


def _loaded(
    module: torch.nn.Module, names: list[str], old: torch.Tensor, state: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that have taken the place of ``old``; none if a name is gone."""
    try:
        now = [(name, attrgetter(name)(module)) for name in names]
    except AttributeError:
        return []
    # The state may hold the very tensor that is there.
    return [(name, tensor) for name, tensor in now if tensor is not old or name in state]


def _tie(module: torch.nn.Module, names: list[str], loaded: list[tuple[str, torch.Tensor]]) -> None:
    for name in names if loaded else ():
        owner, _, own = name.rpartition(".")
        holder = module.get_submodule(owner)
        tensor = loaded[0][1]
        parameters, buffers, _ = members_of(holder)
        if own in buffers:
            buffers[own] = tensor
        elif parameters.get(own) is not tensor:
            setattr(holder, own, tensor)  # recurrent layers keep a list besides


def _compare(module: torch.nn.Module, values: list[tuple[str, Any]]) -> None:
    for name, value in values[1:]:
        first, expected = values[0]
        if not _same(expected, value):
            raise RuntimeError(
                f"load_state_dict: {first} and {name} are one tensor in this "
                f"{type(module).__name__}, and the state has two values for it. Remove one of them "
                "from the state, or build the model with untied weights; the checkpoint may "
                "come from an untied model"
            )


def _same(expected: Any, value: Any) -> bool:
    """Whether two values of a state are equal.

    True if PyTorch raises for them, or if they can't be read.
    """
    if {type(expected), type(value)} - _PLAIN or expected.shape != value.shape:
        return True
    for each in (expected, value):
        if each.is_meta or each.is_quantized or each.layout is not torch.strided:
            return True
    with torch.no_grad():
        other = value.to(expected)
        if expected.data_ptr() == other.data_ptr() and expected.stride() == other.stride():
            return True
        both_nan = (expected != expected) & (other != other)  # noqa: PLR0124
        return bool(((expected == other) | both_nan).all())
