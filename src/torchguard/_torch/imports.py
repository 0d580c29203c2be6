"""Imports: do something when a module is imported, and keep torch's own imports undisturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

import wrapt

__all__ = ["keep_originals_while_importing", "on_import"]

_PACKAGES = ("torch.", "functorch")
_registered: set[tuple[str, Callable[[ModuleType], None]]] = set()


def on_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` once: now if the module is imported, else when it is.

    A second registration does nothing. While the module is being imported by another thread it
    counts as imported, so ``action`` looks whether what it needs is there yet.
    """
    if (name, action) not in _registered:
        _registered.add((name, action))
        wrapt.register_post_import_hook(action, name)


class _Finder(MetaPathFinder):
    def __init__(self, originals_in_place: Callable[[], AbstractContextManager[None]]) -> None:
        self._originals_in_place = originals_in_place

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
            with self._originals_in_place():
                execute(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def keep_originals_while_importing(
    originals_in_place: Callable[[], AbstractContextManager[None]],
) -> None:
    """Execute the modules that torch imports from now on inside ``originals_in_place()``.

    Many of torch's modules keep tables of functions: patterns and lowerings of inductor, Dynamo's
    lists, ``functorch.dim``, ``torch._numpy``. What is looked up in a table is the original,
    because Dynamo and FX write originals into their graphs, so a table that was filled while a
    replacement stood in torch would find nothing.
    """
    # In front of the finder it asks, and behind those of others (wrapt's hooks after an import).
    finders = sys.meta_path
    place = finders.index(PathFinder) if PathFinder in finders else len(finders)
    finders.insert(place, _Finder(originals_in_place))
