"""What stands over torch while a :func:`torchguard.guarded` scope is open.

It is put there and taken away in one go, by ``patch.py``, which alone sets attributes of torch.
Two kinds, because entering a scope has to be quick and compiled functions must not notice. Methods
are set on their class, which Dynamo does not guard. For functions of torch's modules the class of
the module is changed to one that computes them when they are read: one assignment, only the
scope's own context sees another function, and an identity that Dynamo has guarded (torch.add)
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torchguard._torch.patch import (
    ABSENT,
    Computed,
    Make,
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
        """Whether the replacements do nothing while no scope is open, so that they may stay."""

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

    inert = False

    def __init__(
        self, module: ModuleType, makes: Mapping[str, Make], in_scope: Callable[[], object]
    ) -> None:
        self.owner = module
        self._before = type(module)
        properties = {name: _computed(module, name, make, in_scope) for name, make in makes.items()}
        self._during = type(self._before.__name__, (self._before,), properties)

    def put_on(self) -> None:
        """Change the module's class."""
        if type(self.owner) is self._before:
            set_class(self.owner, self._during)

    def take_off(self) -> None:
        """Change it back."""
        if type(self.owner) is self._during:
            set_class(self.owner, self._before)


def _computed(
    module: ModuleType, name: str, make: Make, in_scope: Callable[[], object]
) -> property:
    """Make the attribute: outside of scopes what the module holds, inside the same, guarded."""
    held = vars(module)
    # Some names of torch._VF are those of another module, found by its __getattr__.
    elsewhere = getattr(module, name)
    original = held.get(name, elsewhere)
    guarded = make(original)
    patched: dict[int, tuple[Any, Any]] = {}  # for what install() or other code has put there

    def read(_: ModuleType) -> Any:
        value = held.get(name, elsewhere)
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


def overlays_by_owner(replacements: Mapping[str, Make | Computed]) -> list[AttributeOverlay]:
    """Make an overlay for each class or module that these paths lead to."""
    makes: dict[int, tuple[Any, dict[str, Make | Computed]]] = {}
    for path, make in replacements.items():
        owner, name = resolve(path)
        makes.setdefault(id(owner), (owner, {}))[1][name] = make
    return [AttributeOverlay(owner, each) for owner, each in makes.values()]
