"""The only file that sets or deletes an attribute of torch.

Undoing restores the very object that stood there, or its absence: ``resize_`` is inherited from
``torch._C.TensorBase``, so its place in ``vars(torch.Tensor)`` has to be empty afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

from torchguard._torch import (
    follow_in_torchscript,
    forget_in_torchscript,
    is_torchs_own,
    register_in_dynamo,
    skip_frames,
)
from torchguard._torch.schemas import describe_as
from torchguard._torch.slots import empty_sequence_slot
from torchguard.errors import PatchConflictError

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original and returns its replacement."""


class Computed(NamedTuple):
    """An attribute of instances, computed when it is read; stands in place of a :data:`Make`."""

    read: Callable[[Any], Any]
    """Takes the instance, which keeps what is assigned in its ``vars()``, under that name."""

    def property_named(self, name: str) -> property:
        """Make the property to set on the class."""

        def write(instance: Any, value: Any) -> None:
            vars(instance)[name] = value

        return property(self.read, write)


ABSENT: Any = object()
"""Stands for an attribute that is not there."""

lock = threading.RLock()
"""Held by whoever reads the table in order to change it."""


@dataclass
class _Patch:
    owner: Any
    name: str
    before: Any
    """What ``vars(owner)`` held under the name, or ``ABSENT``."""

    original: Any
    replacement: Any
    holders: int = 1


_table: dict[str, _Patch] = {}

# Originals with the replacements made for them, to be used again: guarded() comes and goes.
_made: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_skipped: set[str] = set()  # modules of ours whose frames Dynamo leaves alone
_PACKAGE = __name__.partition(".")[0] + "."


def apply(replacements: Iterable[tuple[str, Make | Computed]]) -> None:
    """Patch every path (``torch.Tensor.resize_``) or, if one can't be patched, none.

    A path that is patched already keeps its replacement and gets one more holder.
    """
    wanted = list(replacements)
    with _without_overlays(path for path, _ in wanted):
        _prepare()
        skip_own_frames()  # more modules of torchguard may be imported by now
        done: list[str] = []
        try:
            for path, make in wanted:
                if path in _table:
                    _table[path].holders += 1
                else:
                    _table[path] = _patch(path, make)
                done.append(path)
        except BaseException:
            undo(done)
            raise


def renew(replacements: Iterable[tuple[str, Make | Computed]]) -> None:
    """Patch anew where torch's own function stands again, because other code has put it back.

    Where other code has patched on top, and what is not patched, stays as it is.
    """
    wanted = [(path, make) for path, make in replacements if path in _table]
    with _without_overlays(path for path, _ in wanted):
        for path, make in wanted:
            if _was_taken_away(_table[path]):
                _table[path] = replace(_patch(path, make), holders=_table[path].holders)


def undo(paths: Iterable[str], *, leave_conflicts: bool = False) -> None:
    """Take one holder from each path; where none is left, put back what stood there.

    ``leave_conflicts`` leaves a replacement in place below the patch of other code. If code that
    patched before torchguard has put torch's own function back, that stays.

    Raises:
        PatchConflictError: other code has patched on top. Nothing is changed then.
    """
    leaving = Counter(path for path in paths if path in _table)
    with _without_overlays(leaving):
        last = [path for path, count in leaving.items() if _table[path].holders <= count]
        undone = {path for path in last if _lower_patch_was_undone(_table[path])}
        conflicts = [path for path in last if path not in undone and not patched(path)]
        if conflicts and not leave_conflicts:
            path = conflicts[0]
            if _was_taken_away(_table[path]):
                raise PatchConflictError(
                    f"{path} was put back to torch's own after torchguard patched it; call "
                    "torchguard.install(...) again, which patches it anew, then "
                    "torchguard.uninstall()"
                )
            raise PatchConflictError(
                f"{path} was patched again after torchguard patched it, with "
                f"{_value(_table[path])!r}; undo that patch first, then call "
                "torchguard.uninstall() again"
            )
        for path, count in leaving.items():
            _table[path].holders = max(0, _table[path].holders - count)
        for path in reversed(last):
            if path not in conflicts:
                patch = _table.pop(path)
                if path not in undone:
                    _put_original(patch)
                forget_in_torchscript(patch.replacement)


def patched(path: str) -> bool:
    """Whether the replacement really stands at the path now; it looks there."""
    patch = _table.get(path)
    if patch is None:
        return False
    with _without_overlays((path,)):
        return _value(patch) is patch.replacement


def original(path: str) -> Any:
    """Return what torch itself has at the path, patched or not."""
    patch = _table.get(path)
    if patch is not None:
        return patch.original
    with _without_overlays((path,)):
        owner, name = resolve(path)
        return getattr(owner, name)


def exists(path: str) -> bool:
    """Whether there is something at the path to patch, or patched."""
    try:
        original(path)
    except AttributeError:
        return False
    return True


@dataclass
class _Aside:
    """What :func:`originals_set_aside` has taken away; read and changed under the lock."""

    users: int = 0
    is_on: bool = False
    changing: int = 0
    """How many changes are going on; everything is back in place meanwhile."""

    patches: tuple[_Patch, ...] = ()
    overlays: tuple[Overlay, ...] = ()

    def take_away(self) -> None:
        """Take the overlays, then what they stand over."""
        self.overlays = tuple(_overlays)
        remove_overlay(self.overlays)
        self.patches = tuple(
            patch for patch in _table.values() if _value(patch) is patch.replacement
        )
        for patch in self.patches:
            _put_original(patch)
        self.is_on = True

    def put_back(self) -> None:
        """Put all of it back."""
        if self.is_on:
            self.is_on = False
            for patch in self.patches:
                setattr(patch.owner, patch.name, patch.replacement)
            overlay(self.overlays)

    def end(self, users: int = 1) -> None:
        """Count some users less; the last one puts back."""
        self.users = max(0, self.users - users)
        if not self.users:
            self.put_back()


_aside = _Aside()


@contextlib.contextmanager
def originals_set_aside() -> Iterator[None]:
    """Let torch be as it was while code of others runs, which may wait for other threads.

    The lock is free: a thread that imports holds locks of Python's, for which others wait that
    want ours. What is patched or put over torch meanwhile is set aside as well.
    """
    with lock:
        _aside.users += 1
        has_taken = not _aside.is_on
        if has_taken:
            _aside.take_away()
    try:
        yield
    finally:
        with lock:
            _aside.end()
            if has_taken and _aside.changing:  # in the midst of a change of this very thread
                _aside.put_back()


@contextlib.contextmanager
def originals_in_place() -> Iterator[None]:
    """Let torch be as it was for a moment, for tables that know functions by identity."""
    with lock, originals_set_aside():
        yield


@functools.cache
def _prepare() -> None:
    """Once, before the first patch: keep our frames from Dynamo, and the lock whole over a fork."""
    _keep_originals_while_importing()
    skip_own_frames()
    if hasattr(os, "register_at_fork"):
        # A child has no thread that could release the lock for it, or end an import.
        def after_in_child() -> None:
            _aside.end(_aside.users)
            lock.release()

        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=after_in_child
        )


_PACKAGES = ("torch.", "functorch")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        # Namespace packages, and extension modules, fill no tables.
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with originals_set_aside():
                execute(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _keep_originals_while_importing() -> None:
    """Execute the modules that torch imports from now on inside :func:`originals_set_aside`."""
    # Many keep tables of functions: patterns and lowerings of inductor, Dynamo's lists,
    # functorch.dim, torch._numpy. Dynamo and FX look up originals, which they write into graphs.
    # In front of the finder it asks, and behind those of others (wrapt's hooks after an import).
    finders = sys.meta_path
    place = finders.index(PathFinder) if PathFinder in finders else len(finders)
    finders.insert(place, _Finder())


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


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield what a module defines: its functions, and those of its classes."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == module.__name__:
            # The methods of a class are its own, those that NamedTuple has made included.
            members = vars(value).values() if isinstance(value, type) else (value,)
            for member in members:
                function = inspect.unwrap(member) if callable(member) else member
                if isinstance(function, FunctionType):
                    yield function


def _patch(path: str, make: Make | Computed) -> _Patch:
    owner, name = resolve(path)
    if isinstance(make, Computed):
        if hasattr(owner, name):
            raise AttributeError(f"{path}: the class has an attribute of its own there")
        computed = make.property_named(name)
        setattr(owner, name, computed)
        return _Patch(owner, name, ABSENT, ABSENT, computed)
    original = getattr(owner, name)
    before = vars(owner).get(name, ABSENT)
    made_for, replacement = _made.get(path, (None, original))
    if made_for is not original:
        replacement = make(original)
        assert isinstance(replacement, FunctionType)
        describe_as(replacement, original, path, is_method=isinstance(owner, type))
        register_in_dynamo(replacement, original)
        _made[path] = (original, replacement)
    follow_in_torchscript(replacement, original)
    setattr(owner, name, replacement)
    return _Patch(owner, name, before, original, replacement)


def _value(patch: _Patch) -> Any:
    return vars(patch.owner).get(patch.name, ABSENT)


def _was_taken_away(patch: _Patch) -> bool:
    """Whether torch's own stands in place of the replacement."""
    value = _value(patch)
    if value is patch.replacement or patch.original is ABSENT:
        return False
    return value is ABSENT or is_torchs_own(value)


def _lower_patch_was_undone(patch: _Patch) -> bool:
    """Whether code that had patched before us has put back torch's own."""
    return _was_taken_away(patch) and _value(patch) is not patch.before


def _put_original(patch: _Patch) -> None:
    if patch.before is ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.before)


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


# ---- overlays, which guarded(), checked() and install("overlap") put on: see overlays.py ----


class Overlay(Protocol):
    """Attributes that are put in front of what is patched, and taken away, in one go."""

    owner: Any
    """The class or module that has them."""

    inert: bool
    """Whether the replacements do nothing while no scope is open, so that they may stay."""

    def put_on(self) -> None:
        """Put them in front."""

    def take_off(self) -> None:
        """Put back what stood there."""


def set_attributes(owner: Any, values: Iterable[tuple[str, Any]]) -> None:
    """Set each, or delete it where the value is ``ABSENT``."""
    for name, value in values:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        if name == "__getitem__" and isinstance(owner, type):
            empty_sequence_slot(owner)


def set_class(module: ModuleType, cls: type[ModuleType]) -> None:
    """Change the class of a module, so that its attributes can be computed."""
    # https://docs.python.org/3/reference/datamodel.html#customizing-module-attribute-access
    module.__class__ = cls


_overlays: list[Overlay] = []


def overlay(overlays: Iterable[Overlay]) -> None:
    """Put these over what is patched, until :func:`remove_overlay`."""
    with lock:
        _prepare()
        if _aside.is_on:
            _aside.overlays = (*_aside.overlays, *overlays)
            return
        for each in overlays:
            each.put_on()
            _overlays.append(each)


def remove_overlay(overlays: Iterable[Overlay]) -> None:
    """Take them away again, in any order; what was put over them stays."""
    with lock:
        leaving = list(overlays)
        if _aside.is_on:
            _aside.overlays = tuple(each for each in _aside.overlays if each not in leaving)
            return
        above: list[Overlay] = []
        for each in reversed(_overlays):
            # An overlay that stands below one that stays is taken from under it.
            if any(each is one or each.owner is one.owner for one in leaving):
                above.insert(0, each)
        while above and above[0] not in leaving:
            del above[0]
        for each in reversed(above):
            each.take_off()
        for each in leaving:
            _overlays.remove(each)
        for each in above:
            if each not in leaving:
                each.put_on()


@contextlib.contextmanager
def _without_overlays(paths: Iterable[str] | None = None) -> Iterator[None]:
    """Take away what stands over these paths, or over any, for as long as the block runs."""
    with lock:
        is_aside = _aside.is_on
        _aside.put_back()
        _aside.changing += 1
        try:
            standing = list(_overlays)
            if standing and paths is not None:
                owners = [resolve(path)[0] for path in paths]
                standing = [
                    each for each in standing if any(each.owner is owner for owner in owners)
                ]
            remove_overlay(standing)
            try:
                yield
            finally:
                overlay(standing)
        finally:
            _aside.changing -= 1
            if is_aside and _aside.users:
                _aside.take_away()
