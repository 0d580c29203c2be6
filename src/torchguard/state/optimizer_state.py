"""An optimizer's state, loaded to the parameters it belongs to, in the dtype that was saved.

``Optimizer.load_state_dict`` goes by position, also if both sides carry names: with another
order of the parameters, one gets the moments of another. It also casts each tensor to the dtype of
its parameter.
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L774
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchguard._events import warn_user
from torchguard._torch.eager import has_load_hooks
from torchguard.state.process import roll_back
from torchguard.state.training import OptimizerSnapshot, is_of_torch

# The tensors of torch.optim's states that have the shape of their parameter. (Adafactor keeps
# sums of rows and columns, LBFGS one vector for all parameters.)
_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
}


def load_optimizer(
    call: Callable[[Any], Any], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Any:
    """Call ``call`` with the state in the order of the optimizer's parameters, wholly or not."""
    # A hook may change shapes, or the order, and names: torch's documentation shows one.
    as_saved = not has_load_hooks(optimizer)
    if as_saved:
        state = _by_name(optimizer, state)
    saved = OptimizerSnapshot(optimizer)
    try:
        result = call(state)
        if as_saved:
            _keep_dtypes(optimizer, state)
        return result  # noqa: TRY300  what raises above is undone
    except BaseException as error:
        # torch makes new dicts; a hook may have written to the old ones.
        roll_back(saved.restore)
        is_mapping = isinstance(state, Mapping)
        if isinstance(error, Exception) and (not is_mapping or error.args == ("param_groups",)):
            error.args = (_not_of_an_optimizer(optimizer, state),)
        raise


def _not_of_an_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> str:
    """Say what a state is, if it is not what ``optimizer.state_dict()`` returned."""
    kind = type(optimizer).__name__
    text = f"load_state_dict: expected the state of {kind}, with state and param_groups, got "
    if not isinstance(state, Mapping):
        return f"{text}{state!r:.80}; a file is loaded first: torchguard.load(path)"
    for key, value in state.items():
        if isinstance(value, Mapping) and "param_groups" in value:
            return f"{text}a checkpoint of several states: load state[{key!r}]"
    names = _listed(list(map(str, state)))
    if any(isinstance(value, torch.Tensor) for value in state.values()):
        return f"{text}that of a model, with {names}: load it into the model"
    return f"{text}a dict with {names}"


def _by_name(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state with its parameters in the optimizer's order, if both sides have names.

    Raises:
        ValueError: it is the state of other parameters, by names or by shapes.
    """
    groups = optimizer.param_groups
    try:
        saved = [dict(group) for group in state["param_groups"]]
        indices = [index for group in saved for index in group["params"]]
        entries = dict(state["state"])
    except (KeyError, TypeError, ValueError):
        return state  # torch says what is missing
    if len(saved) != len(groups):
        return state  # torch says so
    theirs, ours, kind = _names(saved), _names(groups), type(optimizer).__name__
    if theirs is None or ours is None:
        if theirs is not ours:
            side = "the state has" if ours is None else "the optimizer has"
            warn_user(
                "optimizer-state-by-order",
                f"load_state_dict: {side} names of parameters, the other side has none, so the "
                f"state goes to the parameters of {kind} by their order; make both from "
                "model.named_parameters()",
            )
    elif set(theirs) != set(ours):
        lacking, unknown = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        raise ValueError(
            f"load_state_dict: the state is not that of these parameters of {kind}: it lacks "
            f"{_listed(lacking)} and has {_listed(unknown)} besides"
        )
    elif theirs != ours:
        index_of = dict(zip(theirs, indices, strict=True))
        if not len(index_of) == len(theirs) == len(ours):
            raise ValueError(
                f"load_state_dict: names of parameters of {kind} occur several times, and their "
                f"order is another one than in the state: {_listed(sorted({*theirs, *ours}))}. "
                "Give each model's a prefix, in the state too"
            )
        for group, own in zip(saved, groups, strict=True):
            group["param_names"] = list(own["param_names"])
            group["params"] = [index_of[name] for name in own["param_names"]]
        indices = [index for group in saved for index in group["params"]]
        state = {**state, "param_groups": saved}
    _compare_shapes(optimizer, indices, entries)
    return state


def _names(groups: list[dict[str, Any]]) -> list[str] | None:
    """Return the names of the parameters; None unless all of them have one."""
    if not all("param_names" in group for group in groups):
        return None
    names = [name for group in groups for name in group["param_names"]]
    complete = len(names) == sum(len(group["params"]) for group in groups)
    return names if names and complete else None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "nothing"  # noqa: PLR2004


def _compare_shapes(
    optimizer: torch.optim.Optimizer, indices: list[Any], entries: Mapping[Any, Any]
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(indices) != len(parameters):
        return  # torch says so
    is_torchs = is_of_torch(optimizer)
    faults = []
    for index, parameter in zip(indices, parameters, strict=True):
        entry = entries.get(index)
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            # What an optimizer of the user's keeps may have any shape, and may grow.
            if not is_torchs or not isinstance(value, torch.Tensor):
                continue
            like = parameter if key in _LIKE_PARAMETER else None
            if like is None and value.dim():  # what counts steps may be of any shape
                like = optimizer.state.get(parameter, {}).get(key)
            if isinstance(like, torch.Tensor) and value.shape != like.shape:
                faults.append(
                    f"{key} of parameter {index} has shape {tuple(value.shape)}, expected "
                    f"{tuple(like.shape)}"
                )
    if faults:
        raise ValueError(
            f"load_state_dict: the state is not that of these parameters of "
            f"{type(optimizer).__name__}: {'; '.join(faults)}. It belongs to a model of other "
            "sizes; leave the state of these parameters out, and the optimizer makes it again"
        )


# --- dtypes ----------------------------------------------------------------------------------


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Let tensors of the state, which was loaded, have the dtype in which they were saved."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Adam does not multiply float32 moments with bfloat16 gradients. Whether an optimizer of
    # another library does, was known when it was saved.
    is_sgd = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get("fused")
    can_step, was_cast = is_sgd or not is_of_torch(optimizer), False
    for index, parameter in zip(indices, parameters, strict=True):
        saved, loaded = state["state"].get(index), optimizer.state.get(parameter)
        if not isinstance(saved, Mapping) or not isinstance(loaded, dict):
            continue
        # PyTorch's rule for step counters is its own: float32 on the device if they are fused.
        kept = {k: _as_saved(saved[k], v) for k, v in loaded.items() if k in saved and k != "step"}
        if can_step:
            loaded.update(kept)
        elif any(kept[key] is not loaded[key] for key in kept):
            was_cast = True
    if was_cast:
        warn_user(
            "optimizer-state-cast",
            f"load_state_dict: {type(optimizer).__name__} of PyTorch can't step with the dtype in "
            "which its state was saved, so the state was cast to the dtype of the parameters: "
            "load it before you change that, or leave the state out",
        )


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Return what was loaded, with tensors of another dtype as they were saved."""
    tensors = isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor)
    if tensors and saved.dtype != loaded.dtype:
        return saved.to(loaded.device)
    if type(loaded) is dict and isinstance(saved, Mapping) and loaded.keys() == saved.keys():
        held = {key: _as_saved(saved[key], value) for key, value in loaded.items()}
        return loaded if all(held[key] is loaded[key] for key in held) else held
    if type(loaded) in {list, tuple} and type(saved) is type(loaded) and len(saved) == len(loaded):
        items = [_as_saved(*pair) for pair in zip(saved, loaded, strict=True)]
        same = all(one is other for one, other in zip(items, loaded, strict=True))
        return loaded if same else type(loaded)(items)
    return loaded
