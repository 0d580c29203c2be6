"""The table of what is replaced in torch; the only file that sets or deletes an attribute of it.

A path (``torch.Tensor.resize_``) has a layer for each guard that replaces it, in a fixed order.
Undoing restores the very object that was there, or its absence: ``resize_`` is inherited from
``torch._C.TensorBase``, so its place in ``vars(torch.Tensor)`` has to be empty afterwards.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torchguard._absent import ABSENT
from torchguard._torch import is_torchs_own, skip_frames
from torchguard._torch.replacement import remember_original, replacement_of
from torchguard._torch.slots import empty_sequence_slot
from torchguard.errors import PatchConflictError

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the function below, torch's own or another layer, and returns its replacement."""

Replacements = Mapping[str, "Make | property"]
"""What to put at each path. A property is an attribute that the class does not have itself."""

lock = threading.RLock()
"""Held by whoever reads the table in order to change it."""


class Switch:
    """Whether a guard is on: its replacements read ``on`` first, and do nothing while it is 0."""

    __slots__ = ("on",)

    def __init__(self, on: int = 0) -> None:
        self.on = on
        """How many installations and open scopes want the guard now."""


@dataclass
class _Place:
    """An attribute of torch that is replaced."""

    owner: Any
    name: str
    before: Any
    """What ``vars(owner)`` held under the name, or ``ABSENT``."""

    original: Any
    layers: dict[str, Make | property] = field(default_factory=dict)
    """By guard, what makes its replacement."""

    replacement: Any = None

    def value(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    def stands(self) -> bool:
        return self.value() is self.replacement

    def set(self, value: Any) -> None:
        """Set the attribute, or delete it if the value is ``ABSENT``."""
        if value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
        if self.name == "__getitem__":
            empty_sequence_slot(self.owner)

    def was_taken_away(self) -> bool:
        """Whether other code has restored PyTorch's own function over the replacement."""
        if self.stands() or self.original is ABSENT:
            return False
        value = self.value()
        return value is ABSENT or is_torchs_own(value)


_table: dict[str, _Place] = {}
_ranks: dict[str, int] = {}
"""By guard, its place among the layers of a path: the lowest is called last."""

# What was made of an original by these guards is used again: a compiled function that has met it
# would be compiled anew for another one.
_made: dict[tuple[str, tuple[Any, ...]], tuple[Any, Any]] = {}
_skipped: set[str] = set()  # modules of ours whose frames Dynamo leaves alone
_PACKAGE = __name__.partition(".")[0] + "."


def apply(guard: str, replacements: Replacements, *, rank: int = 0) -> list[str]:
    """Put a guard's replacements in place, or, if one can't be made, none; return their paths."""
    with lock:
        _prepare()
        skip_own_frames()  # more modules of torchguard may be imported by now
        _ranks[guard] = rank
        done: list[str] = []
        try:
            for path, make in replacements.items():
                if _put(path, guard, make):
                    done.append(path)
        except BaseException:
            _take(done, {guard})
            raise
        return [path for path in replacements if guard in _layers(path)]


def _layers(path: str) -> Iterable[str]:
    return _table[path].layers if path in _table else ()


def _put(path: str, guard: str, make: Make | property) -> bool:
    """Put one layer on a path; say whether it is new there."""
    place = _table.get(path)
    is_new = guard not in _layers(path)
    if place is None or place.was_taken_away():
        now = _place_at(path, make)
        if now is None:
            return False
        if place is not None:
            now.layers = place.layers
        place = now
    elif not is_new:
        return False
    elif not place.stands():
        raise _conflict(path, place)
    layers = {**place.layers, guard: make}
    place.replacement = _build(path, place, layers)
    place.set(place.replacement)
    place.layers = layers
    _table[path] = place
    return is_new


def _place_at(path: str, make: Make | property) -> _Place | None:
    """Read what torch has at a path; None if there is nothing to replace."""
    try:
        owner, name = resolve(path)
        before, original = vars(owner).get(name, ABSENT), getattr(owner, name, ABSENT)
    except AttributeError:
        return None
    if (original is ABSENT) is not isinstance(make, property):
        return None
    return _Place(owner, name, before, original)


def _build(path: str, place: _Place, layers: Mapping[str, Make | property]) -> Any:
    """Make the attribute of a path, from the original up."""
    order = sorted(layers, key=lambda guard: _ranks.get(guard, 0))
    key = path, tuple(layers[guard] for guard in order)
    known = _made.get(key)
    if known is not None and known[0] is place.original:
        return known[1]
    call = place.original
    for guard in order:
        make = layers[guard]
        if isinstance(make, property):
            return make
        call = make(call)
        remember_original(call, place.original)
    replacement = replacement_of(place.original, call, path)
    _made[key] = place.original, replacement
    return replacement


def undo(*guards: str, leave_conflicts: bool = False) -> None:
    """Remove the layers of these guards; restore the original if none is left.

    ``leave_conflicts`` leaves a replacement in place below the patch of other code. If other code
    has restored PyTorch's own function, that stays.

    Raises:
        PatchConflictError: other code has patched on top. Nothing is changed then.
    """
    with lock:
        paths = [path for path in _table if not set(guards).isdisjoint(_layers(path))]
        conflicts = [
            path for path in paths if not (_table[path].stands() or _table[path].was_taken_away())
        ]
        if conflicts and not leave_conflicts:
            raise _conflict(conflicts[0], _table[conflicts[0]])
        _take([path for path in paths if path not in conflicts], set(guards))


def _take(paths: list[str], guards: set[str]) -> None:
    for path in reversed(paths):
        place = _table[path]
        layers = {guard: make for guard, make in place.layers.items() if guard not in guards}
        stands = place.stands()
        if layers:
            replacement = _build(path, place, layers)
            if stands:
                place.set(replacement)
            place.layers, place.replacement = layers, replacement
            continue
        if stands:
            place.set(place.before)
        del _table[path]


def _conflict(path: str, place: _Place) -> PatchConflictError:
    return PatchConflictError(
        f"{path} was patched again after torchguard patched it, with {place.value()!r}; undo that "
        "patch first, then call torchguard again"
    )


def paths_of(guard: str) -> list[str]:
    """Return the paths that a guard has replaced."""
    return [path for path, place in list(_table.items()) if guard in place.layers]


def patched(path: str) -> bool:
    """Whether the replacement is the attribute of the path now; it looks there."""
    place = _table.get(path)
    return place is not None and place.value() is place.replacement


def original(path: str) -> Any:
    """Return what torch itself has at the path, patched or not."""
    place = _table.get(path)
    if place is not None:
        return place.original
    owner, name = resolve(path)
    return getattr(owner, name)


def exists(path: str) -> bool:
    """Whether there is something at the path to patch, or patched."""
    try:
        return original(path) is not ABSENT
    except AttributeError:
        return False


@functools.cache
def _prepare() -> None:
    """Once, before the first patch: keep the lock whole over a fork."""
    if hasattr(os, "register_at_fork"):
        # A child has no thread that could release the lock for it.
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


def skip_own_frames() -> None:
    """Keep Dynamo from the functions of torchguard's modules imported since the last call."""
    # Not the probes of the catalog: what they show is what Dynamo does with them.
    new = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(_PACKAGE)
        and not name.startswith(_PACKAGE + "defects.")
        and name not in _skipped
    }
    _skipped.update(new)
    for module in new.values():
        for function in _functions(module):
            skip_frames(function.__code__)


def _functions(module: Any) -> Iterator[FunctionType]:
    """Yield what a module defines: its functions, and those of its classes."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == module.__name__:
            # The methods of a class are its own, those that NamedTuple has made included.
            members = vars(value).values() if isinstance(value, type) else (value,)
            for member in members:
                function = inspect.unwrap(member) if callable(member) else member
                if isinstance(function, FunctionType):
                    yield function


def resolve(path: str) -> tuple[Any, str]:
    """Split ``torch.Tensor.resize_`` into the object ``torch.Tensor`` and ``resize_``."""
    owner_path, _, name = path.rpartition(".")
    parts = owner_path.split(".")
    for length in range(len(parts), 0, -1):
        owner: Any = sys.modules.get(".".join(parts[:length]))
        if owner is not None:
            for part in parts[length:]:
                owner = getattr(owner, part)
            return owner, name
    raise AttributeError(f"{path}: no such attribute; expected a path like torch.Tensor.resize_")
