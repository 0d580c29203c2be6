"""What ``guarded()``, ``checked()`` and ``install("overlap")`` put over torch's functions.

Two kinds, because entering a scope has to be quick and compiled functions must not notice. Methods
are set on their class, which Dynamo does not guard. For functions of torch's modules the class of
the module is changed to one that computes them when they are read: one assignment, only the
scope's own context sees another function, and an identity that Dynamo has guarded (torch.add)
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torchguard._torch.patch import (
    ABSENT,
    Computed,
    Make,
    Overlay,
    lock,
    overlay,
    remove_overlay,
    resolve,
    set_attributes,
    set_class,
)


class AttributeOverlay:
    """Attributes in front of those of a class, or of a module that no compiled code looks at."""

    def __init__(
        self, owner: Any, makes: Mapping[str, Make | Computed], *, inert: bool = False
    ) -> None:
        self.owner = owner
        self.inert = inert
        self._makes = makes
        self._made: dict[str, tuple[Any, Any]] = {}
        """What stood under each name (or ``ABSENT``), and what is put there."""

        for name in makes:
            self._make(name, vars(owner).get(name, ABSENT))

    def _make(self, name: str, before: Any) -> None:
        make = self._makes[name]
        if isinstance(make, Computed):
            replacement: Any = make.property_named(name)
        else:
            replacement = make(getattr(self.owner, name))
        self._made[name] = before, replacement

    def put_on(self) -> None:
        """Set every attribute; made anew where other code has patched since."""
        now = vars(self.owner).get
        for name, (before, _) in self._made.items():
            if now(name, ABSENT) is not before:
                self._make(name, now(name, ABSENT))
        set_attributes(self.owner, [(name, ours) for name, (_, ours) in self._made.items()])

    def take_off(self) -> None:
        """Put back what stood there. What other code has patched on top of ours stays."""
        now = vars(self.owner).get
        set_attributes(
            self.owner,
            [(name, before) for name, (before, ours) in self._made.items() if now(name) is ours],
        )


class ModuleOverlay:
    """Functions in front of those of a module, for whoever asks from inside a scope."""

    def __init__(
        self, module: ModuleType, makes: Mapping[str, Make], in_scope: Callable[[], object]
    ) -> None:
        self.owner: Any = module
        self.inert = False
        self._makes = makes
        self._in_scope = in_scope
        self._classes: dict[type[ModuleType], type[ModuleType]] = {}
        self._before: type[ModuleType] | None = None
        """The class that the module had; None while this is not on."""

    def put_on(self) -> None:
        """Change the module's class, which may be that of another overlay."""
        if self._before is not None:
            return
        before = type(self.owner)
        if before not in self._classes:
            properties = {
                name: _computed(self.owner, name, make, self._in_scope, vars(before).get(name))
                for name, make in self._makes.items()
            }
            self._classes[before] = type(before.__name__, (before,), properties)
        set_class(self.owner, self._classes[before])
        self._before = before

    def take_off(self) -> None:
        """Change it back."""
        before, self._before = self._before, None
        if before is not None and type(self.owner) is self._classes[before]:
            set_class(self.owner, before)


def _computed(
    module: ModuleType, name: str, make: Make, in_scope: Callable[[], object], below: Any
) -> property:
    """Make a property: it returns what lies below, wrapped by ``make`` while a scope is open."""
    held = vars(module)
    # Some names of torch._VF are those of another module, found by its __getattr__.
    original = elsewhere = getattr(module, name) if name not in held else held[name]
    guarded = make(original)
    patched: dict[int, tuple[Any, Any]] = {}  # for what install() or other code has put there

    def read(_: ModuleType) -> Any:
        value = held.get(name, elsewhere) if below is None else below.fget(module)
        if in_scope() is None:
            return value
        if value is original:
            return guarded
        if id(value) not in patched:
            patched.clear()
            patched[id(value)] = value, make(value)
        return patched[id(value)][1]

    def write(_: ModuleType, value: Any) -> None:
        held[name] = value

    def remove(_: ModuleType) -> None:
        del held[name]

    return property(read, write, remove)


def overlays_by_owner(
    replacements: Mapping[str, Make | Computed], *, inert: bool = False
) -> list[AttributeOverlay]:
    """Make an overlay for each class or module that these paths lead to."""
    makes: dict[Any, dict[str, Make | Computed]] = {}
    for path, make in replacements.items():
        owner, name = resolve(path)
        makes.setdefault(owner, {})[name] = make
    return [AttributeOverlay(owner, each, inert=inert) for owner, each in makes.items()]


class Standing:
    """Overlays that stand while somebody uses them.

    A program that opens scopes in a loop keeps those that do nothing outside of a scope. To set
    them costs most of entering, and since Python 3.13 a class that has changed 1,000 times loses
    the interpreter's cache for good (MAX_VERSIONS_PER_CLASS): every attribute of every tensor is
    slower then. https://github.com/python/cpython/blob/3.13/Objects/typeobject.c
    """

    _STAY_AFTER = 64

    def __init__(
        self,
        wanted: Callable[[], Iterable[Overlay]],
        outside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._wanted = wanted
        self._outside = outside
        """A scope in which this thread finds torch's own attributes."""

        self._used = 0
        self._began = 0
        self._applied: list[Overlay] = []
        _all.append(self)

    def begin(self) -> None:
        """Count one more user; the first one applies the overlays."""
        with lock:
            self._used += 1
            if self._used == 1:
                self._began += 1
                self.apply()

    def apply(self, _: object = None) -> None:
        """Apply those that are missing; called again when Dynamo is imported."""
        with lock, self._outside():
            if self._used:
                new = [each for each in self._wanted() if each not in self._applied]
                overlay(new)
                self._applied += new

    def end(self) -> bool:
        """Count one user less; the last one removes them, or those that are quick to apply."""
        with lock:
            self._used -= 1
            if not self._used:
                self._remove(inert=self._began <= self._STAY_AFTER)
            return not self._used

    def forget(self) -> None:
        """Remove those that stay; not while somebody uses them."""
        with lock:
            if not self._used:
                self._began = 0
                self._remove(inert=True)

    def _remove(self, *, inert: bool) -> None:
        leaving = [each for each in self._applied if inert or not each.inert]
        with self._outside():
            remove_overlay(leaving)
        self._applied = [each for each in self._applied if each not in leaving]


_all: list[Standing] = []


def forget() -> None:
    """Remove the overlays that stay between scopes; not those of a scope that is open."""
    for each in _all:
        each.forget()
