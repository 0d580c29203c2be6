"""Why the names of a state are not those of a module, and what to type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch

from torchguard._events import warn_user

_COMPILED = "_orig_mod."  # stands before the names of what torch.compile has wrapped
_SHOWN = 3  # names of each side


def warn_if_none_fits(module: torch.nn.Module, state: Mapping[str, Any], result: Any) -> None:
    """Warn where ``strict=False`` has loaded nothing; ``result`` is what torch returned.

    It counts what torch left over, so that hooks which rename keys are believed.
    """
    left_over = getattr(result, "unexpected_keys", None)
    if not state or not left_over or not set(state) <= set(left_over):
        return
    own = _names_of(module)
    if own:
        warn_user(
            "nothing-loaded",
            "load_state_dict: strict=False, and nothing was loaded: the state has "
            f"{_listed(state)}, this {type(module).__name__} has {_listed(own)}. "
            + (hint_for(module, state) or "Load the state of a model of this kind"),
        )


def hint_for(module: torch.nn.Module, state: Mapping[str, Any]) -> str | None:
    """Say what to type if one step makes the names of a state those of a module."""
    own, given = _names_of(module), set(map(str, state))
    if not own or not given or own == given:
        return None
    bare, loaded = ({name.replace(_COMPILED, "") for name in names} for names in (own, given))
    if bare == loaded:
        return (
            "The names differ in _orig_mod., which torch.compile puts before them: load into "
            "model._orig_mod if the module is compiled, or save model._orig_mod.state_dict()"
        )
    return None if own & given else next(_hints(state, own, given), None)


def _hints(state: Mapping[str, Any], own: set[str], given: set[str]) -> Iterator[str]:
    """Yield what to type, where a state and a module have no name in common."""
    if given == {"state", "param_groups"}:
        yield "This is the state of an optimizer: load it into the optimizer"
    for path, inner in _states_in(state):
        if _mostly(inner, own):
            yield f"The state is a checkpoint of several states: load {path}"
    for prefix in _prefixes(given):
        if _mostly((name.removeprefix(prefix) for name in given), own):
            yield (
                f"The names of the state begin with {prefix!r}, as those of a wrapper do (DDP): "
                "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "
                f"{prefix!r}) removes it"
            )
    for prefix in _prefixes(own):
        if _mostly((prefix + name for name in given), own):
            yield (
                f"The names of the module begin with {prefix!r}: load into model.{prefix[:-1]}, "
                "the module inside"
            )


def _names_of(module: torch.nn.Module) -> set[str] | None:
    try:
        return set(module.state_dict())
    except Exception:  # noqa: BLE001  a hook of the module; the first error is raised
        return None


def _states_in(state: Mapping[Any, Any]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the dicts of a checkpoint, and those in them, as ``step.state_dict()`` has them."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield f"state[{key!r}]", map(str, value)
            for inner, each in value.items():
                if isinstance(each, Mapping):
                    yield f"state[{key!r}][{inner!r}]", map(str, each)


def _prefixes(names: Collection[str]) -> Iterator[str]:
    """Yield what all names begin with, up to a dot, the longest first."""
    first, last = (name.split(".")[:-1] for name in (min(names), max(names)))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = [part for part, _ in same]
    for end in range(len(common), 0, -1):
        yield ".".join(common[:end]) + "."


def _mostly(names: Iterable[str], own: set[str]) -> bool:
    """Whether at least half of the names are the module's."""
    names = set(names)
    return bool(names) and 2 * len(names & own) >= len(names)


def _listed(names: Iterable[Any]) -> str:
    first = sorted(map(str, names))
    more = len(first) - _SHOWN
    return ", ".join(first[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
