"""What a module keeps about state dicts: hooks, loaders of its own, which buffers are saved."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["loads_by_copies_alone", "tensors_to_load"]


def loads_by_copies_alone(module: torch.nn.Module) -> bool:
    """Whether ``module.load_state_dict(state)`` runs nothing but torch's own ``param.copy_()``.

    False where a submodule has a hook, a loader or extra state of its own, or where torch is
    told to swap tensors (``torch.__future__.set_swap_module_params_on_conversion``).
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return False
    return all(
        _has_torchs_loader(type(each))  # type: ignore[arg-type]  # a class can be hashed
        # https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
        and not each._load_state_dict_pre_hooks
        and not each._load_state_dict_post_hooks
        for each in module.modules()
    )


@functools.lru_cache(maxsize=4096)
def _has_torchs_loader(kind: type[torch.nn.Module]) -> bool:
    # BatchNorm has one too, which adds a key that older checkpoints lack.
    loader: Any = kind._load_from_state_dict
    return (
        loader.__module__.startswith("torch.nn.")
        and kind.load_state_dict.__module__ in {"torch.nn.modules.module", "torch.nn.Module"}
        and kind.set_extra_state is torch.nn.Module.set_extra_state
    )


def tensors_to_load(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return what ``module.state_dict()`` has, by name and without copies, hooks left out."""
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, each in module.named_modules(remove_duplicate=False):
        begins = f"{prefix}." if prefix else ""
        unsaved = each._non_persistent_buffers_set
        for name, tensor in each._parameters.items():
            if tensor is not None:
                found.append((begins + name, tensor))
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in unsaved:
                found.append((begins + name, buffer))
    return found
