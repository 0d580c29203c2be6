"""What a module keeps about state dicts: hooks, loaders of its own, which buffers are saved."""

from __future__ import annotations

import functools

import torch

__all__ = ["tensors_loaded_by_copies"]


def tensors_loaded_by_copies(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]] | None:
    """Return what ``module.load_state_dict(state)`` copies to, by name, if it does nothing else.

    None where a submodule has a hook, a loader or extra state of its own, or where torch is
    told to swap tensors (``torch.__future__.set_swap_module_params_on_conversion``).
    """
    found: list[tuple[str, torch.Tensor]] = []
    waiting = [("", module)]
    while waiting:
        prefix, each = waiting.pop()
        if (
            not _has_torchs_loader(type(each))  # type: ignore[arg-type]  # a class can be hashed
            # https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
            or each._load_state_dict_pre_hooks
            or each._load_state_dict_post_hooks
        ):
            return None
        unsaved = each._non_persistent_buffers_set
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter))
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in unsaved:
                found.append((prefix + name, buffer))
        for name, child in each._modules.items():
            if child is not None:
                waiting.append((f"{prefix}{name}.", child))
    return None if torch.__future__.get_swap_module_params_on_conversion() else found


@functools.lru_cache(maxsize=4096)
def _has_torchs_loader(kind: type[torch.nn.Module]) -> bool:
    # By the class that defines it: a guard may stand in the place of the function, and what is
    # seen then is kept. BatchNorm has a loader too, which adds a key that older checkpoints lack.
    return (
        _definer(kind, "_load_from_state_dict").__module__.startswith("torch.nn.")
        and _definer(kind, "load_state_dict") is torch.nn.Module
        and _definer(kind, "set_extra_state") is torch.nn.Module
    )


def _definer(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in vars(each))
