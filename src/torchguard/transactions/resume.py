"""``step.state_dict()``: everything that a training consists of, to resume it bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from torchguard._events import warn_user
from torchguard._pytree import children, with_children
from torchguard._torch import without_assign_marks
from torchguard.state.optimizer_state import load_optimizer
from torchguard.state.process import accelerator, named_generators, roll_back
from torchguard.transactions.block import Guarded

_PARTS = ("models", "optimizers", "scalers", "schedulers", "also")


def state_of(guarded: Guarded) -> dict[str, Any]:
    """Return the states of models, optimizers and the rest, and of the random generators.

    Lists are dicts by position: DCP goes into dicts.
    """
    state: dict[str, Any] = {
        part: {str(number): _state_of(each) for number, each in enumerate(items)}
        for part, items in _parts_of(guarded).items()
    }
    # DCP loads what the new training has: an optimizer that has not stepped has no moments.
    entries = {number: _entries_of(each) for number, each in state["optimizers"].items()}
    devices = " ".join(sorted(_devices_of(guarded)))
    return {**state, "entries": entries, "random": random_state(), "devices": devices}


def load(guarded: Guarded, state: Any) -> None:
    """Load such a state, whole or not at all."""
    calls = _calls(guarded, state)
    before = guarded.training.capture(parameters=True)
    try:
        for call in calls:
            call()
    except BaseException:
        roll_back(before.restore)
        raise
    guarded.accumulation = None
    guarded.epochs.clear()


def _parts_of(guarded: Guarded) -> dict[str, tuple[Any, ...]]:
    training = guarded.training
    scalers = () if guarded.scaler is None else (guarded.scaler,)
    optimizers, also = training.all_optimizers(), (*training.also, *training.masters())
    values = (training.modules, optimizers, scalers, guarded.schedulers, also)
    return dict(zip(_PARTS, values, strict=True))


def _state_of(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item
    return item.get_state() if isinstance(item, torch.Generator) else _readable(item.state_dict())


def _entries_of(state: Any) -> int:
    """Return for how many parameters an optimizer's state dict has a state."""
    return len(state.get("state", ())) if isinstance(state, Mapping) else 0


def _calls(guarded: Guarded, state: Any) -> list[Callable[[], Any]]:
    """Return the calls that load a state; raise if it is not one of this transaction."""
    expected = (*_PARTS, "random", "commits", "part_size")
    if not isinstance(state, Mapping) or not all(part in state for part in expected):
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise TypeError(
            f"load_state_dict: expected what step.state_dict() returned, with the keys "
            f"{', '.join(expected)}, got {found}"
        )
    calls: list[Callable[[], Any]] = []
    for part, items in _parts_of(guarded).items():
        if len(items) != len(state[part]):
            raise ValueError(
                f"load_state_dict: the state has {len(state[part])} {part}, the transaction has "
                f"{len(items)}: make the transaction from the same objects as before"
            )
        calls += [partial(_load, each, state[part][str(n)]) for n, each in enumerate(items)]
    for number, saved in state.get("entries", {}).items():
        there = _entries_of(state["optimizers"][number])
        if there < saved:
            name = type(guarded.training.all_optimizers()[int(number)]).__name__
            raise ValueError(
                f"load_state_dict: optimizers.{number}.state of {name} has {there} parameters, and "
                f"{saved} were saved: dcp.load reads only what is there already, and an optimizer "
                "that has not stepped has no moments. Convert the checkpoint by dcp_to_torch_save "
                "of torch.distributed.checkpoint.format_utils, and load that file"
            )
    held = frozenset(state.get("devices", "").split())  # absent in a state of torchguard 0.1
    return [*calls, *random_calls(state["random"], held, _devices_of(guarded))]


def _devices_of(guarded: Guarded) -> frozenset[str]:
    """Return the names of the devices that hold a training, as those of their generators."""
    training = guarded.training
    tensors = [t for m in training.modules for t in (*m.parameters(), *m.buffers())]
    tensors += [each for group in training.groups() for each in group]
    # MPS has one generator, whose name is that of the type.
    return frozenset(n for t in tensors for n in (str(t.device), t.device.type))


def _load(item: Any, state: Any) -> None:
    if isinstance(item, Tensor):
        if item.shape != state.shape:
            raise ValueError(
                f"load_state_dict: a tensor of also= has shape {tuple(item.shape)}, the state has "
                f"{tuple(state.shape)}"
            )
        with torch.no_grad():
            item.copy_(state)
    elif isinstance(item, torch.Generator):
        item.set_state(state)
    elif isinstance(item, Optimizer):
        state = _as_held(item.state_dict(), state)
        entries = state.get("state")
        if isinstance(entries, Mapping):  # dcp_to_torch_save writes each index as a string
            digits = {key: int(key) for key in entries if isinstance(key, str) and key.isdecimal()}
            state = {**state, "state": {digits.get(k, k): each for k, each in entries.items()}}
        load_optimizer(item.load_state_dict, item, state)
    else:
        state = _as_held(item.state_dict(), state)
        is_module = isinstance(item, torch.nn.Module)
        item.load_state_dict(without_assign_marks(state, assign=False) if is_module else state)


# --- what torch.load(weights_only=True) reads ------------------------------------------------


def _readable(node: Any, above: tuple[int, ...] = ()) -> Any:
    """Return a state without numbers and arrays of numpy, which that refuses."""
    if isinstance(node, np.generic):
        return node.item()
    if isinstance(node, np.ndarray) and not node.dtype.hasobject:
        return {**_plain(node), "shape": list(node.shape)}
    if type(node) not in {dict, OrderedDict, list, tuple} or id(node) in above:
        return node
    above = (*above, id(node))
    pairs = [(key, child, _readable(child, above)) for key, child in children(node) or ()]
    changed = {key: made for key, child, made in pairs if made is not child}
    return with_children(node, changed) if changed else node


def _as_held(held: Any, state: Any) -> Any:
    """Return a state with numbers of numpy where the training has such, and with its arrays."""
    if isinstance(held, np.generic) and isinstance(state, (bool, int, float, complex, str)):
        return type(held)(state)
    if isinstance(state, Mapping) and state.keys() == {"bytes", "dtype", "shape"}:
        return _restored(state).reshape(state["shape"]).copy()
    if type(state) not in {dict, OrderedDict, list, tuple}:
        return state
    now = dict(children(held) or ())
    pairs = [(key, child, _as_held(now.get(key), child)) for key, child in children(state) or ()]
    changed = {key: made for key, child, made in pairs if made is not child}
    return with_children(state, changed) if changed else state


# --- random generators -----------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the states of the process's generators, as tensors, numbers and texts."""
    return {name: _plain(get_state()) for name, (get_state, _) in named_generators().items()}


def random_calls(
    state: Mapping[str, Any], held: frozenset[str], holding: frozenset[str]
) -> Iterable[Callable[[], Any]]:
    """Return the calls that set the generators.

    Those of the devices that ``held`` the training have to be here, and those of the devices that
    are ``holding`` it in the state. Other devices were visible and are not, or the other way round.
    """
    kind = accelerator()
    if kind and any(name.startswith(kind) for name in state) and torch.accelerator.is_available():
        getattr(torch.get_device_module(kind), "init", lambda: None)()
    generators = named_generators()
    gone, new = state.keys() - generators.keys(), generators.keys() - state.keys()
    if lost := sorted(gone & held):
        raise ValueError(
            f"load_state_dict: the training was on {', '.join(lost)}, which this machine does not "
            f"have: it has the generators {', '.join(generators)}"
        )
    if lacking := sorted(new & (holding | {"cpu", "python", "numpy"})):
        raise ValueError(
            f"load_state_dict: the state has no generator {', '.join(lacking)}, which is in use"
        )
    if gone:
        warn_user(
            "generator-not-restored",
            f"load_state_dict: the state has the generator {', '.join(sorted(gone))}, which is not "
            "visible here: it is left out",
        )
    if new:
        warn_user(
            "generator-not-restored",
            f"load_state_dict: the state has no state of the generator {', '.join(sorted(new))}, "
            "which is visible here: it stays as it is",
        )
    return [
        partial(set_state, _restored(state[name]))
        for name, (_, set_state) in generators.items()
        if name in state
    ]


def _plain(value: Any) -> Any:
    """Return a state as what ``torch.load(weights_only=True)`` reads."""
    if isinstance(value, np.ndarray):
        return {"bytes": torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()),
                "dtype": str(value.dtype)}  # fmt: skip
    if isinstance(value, tuple):  # Python's: a version, 625 numbers, a float or None
        version, numbers, gauss = value
        return {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _restored(value: Any) -> Any:
    """Return the state of which :func:`_plain` has made this."""
    if isinstance(value, Tensor):  # torch.load(map_location=) has moved it
        return value.cpu()
    if not isinstance(value, Mapping):
        return value
    if "bytes" in value:
        return np.frombuffer(value["bytes"].cpu().numpy().tobytes(), dtype=value["dtype"])
    if "numbers" in value:
        return value["version"], tuple(value["numbers"].tolist()), value["gauss"]
    return {key: _restored(each) for key, each in value.items()}
