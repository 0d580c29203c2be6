"""What stands over torch while a guarded() scope is open, put there and taken away in one go.

Two kinds, because entering a scope has to be quick and compiled functions must not notice.
Methods are set on their class, which Dynamo does not guard. For functions of a module the class of
the module is changed to one that computes them when they are read: one assignment, only the scope's
own context sees another function, and an identity that Dynamo has guarded (``torch.add``) holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torchguard._torch import patch
from torchguard._torch.patch import ABSENT, Make

__all__ = ["ClassOverlay", "ModuleOverlay"]


class ClassOverlay:
    """Methods in front of those of a class."""

    def __init__(self, owner: type, makes: Mapping[str, Make]) -> None:
        self.owner = owner
        self._makes = makes
        self._made: dict[str, tuple[Any, Any]] = {}
        """By name: what stood there (or ``ABSENT``), and what is put there."""

        for name in makes:
            self._make(name, vars(owner).get(name, ABSENT))

    def _make(self, name: str, before: Any) -> None:
        replacement = self._makes[name](getattr(self.owner, name))
        assert isinstance(replacement, FunctionType)
        self._made[name] = before, replacement

    def put_on(self) -> None:
        """Set every method; made anew where somebody has patched since."""
        now = vars(self.owner).get
        for name, (before, _) in self._made.items():
            if now(name, ABSENT) is not before:
                self._make(name, now(name, ABSENT))
        patch.set_all(self.owner, self._made.items(), which=1)

    def take_off(self) -> None:
        """Put back what stood there. Where somebody has patched on top, ours stays and is inert."""
        now = vars(self.owner).get
        standing = [row for row in self._made.items() if now(row[0]) is row[1][1]]
        patch.set_all(self.owner, standing, which=0)


class ModuleOverlay:
    """Functions in front of those of a module, for whoever asks from inside a scope."""

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
            patch.set_all(self.owner, [("__class__", (self._during,))], which=0)

    def take_off(self) -> None:
        """Change it back."""
        if type(self.owner) is self._during:
            patch.set_all(self.owner, [("__class__", (self._before,))], which=0)


def _computed(
    module: ModuleType, name: str, make: Make, in_scope: Callable[[], object]
) -> property:
    """Make the attribute: outside of scopes what the module holds, inside the same, guarded."""
    held = vars(module)
    # Some names of torch._VF are those of another module, found by its __getattr__.
    elsewhere = getattr(module, name)
    original = held.get(name, elsewhere)
    guarded = make(original)
    others: dict[int, tuple[Any, Any]] = {}  # what install() or somebody else has put there

    def read(_: ModuleType) -> Any:
        value = held.get(name, elsewhere)
        if in_scope() is None:
            return value
        if value is original:
            return guarded
        if id(value) not in others:
            others.clear()
            others[id(value)] = value, make(value)
        return others[id(value)][1]

    def write(_: ModuleType, value: Any) -> None:
        held[name] = value

    def remove(_: ModuleType) -> None:
        del held[name]

    return property(read, write, remove)
