"""The public names: each comes from ``torchguard``, and is imported when it is first used."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import torchguard
from support.child_process import output_of

STUB = Path(torchguard.__file__).with_suffix(".pyi")


def test_the_stub_has_the_same_names_from_the_same_modules() -> None:
    """Type checkers read the stub, Python the table in __init__.py."""
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"torchguard.{module}" for name, module in torchguard._HOME.items()}  # type: ignore[attr-defined]
    assert imported == {**homes, "__version__": "torchguard._public"}
    [listed] = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(listed) == sorted(torchguard.__all__)


def test_public_objects_say_that_they_are_torchguards() -> None:
    """In a repr, in a traceback and in a pickle."""
    for name in torchguard._HOME:  # type: ignore[attr-defined]
        found = getattr(torchguard, name)
        assert found.__module__ == "torchguard", name
        assert pickle.loads(pickle.dumps(found)) is found  # noqa: S301 - made here


def test_dir_shows_the_public_names_and_the_rooms() -> None:
    rooms = {name for name in dir(torchguard) if name not in torchguard.__all__}
    folders = {
        path.parent.name
        for path in STUB.parent.glob("*/__init__.py")
        if not path.parent.name.startswith("_")
    }
    assert rooms == folders - {"cli", "integrations"}
    assert all(getattr(torchguard, name) is not None for name in dir(torchguard))


def test_importing_torchguard_imports_neither_torch_nor_a_room() -> None:
    program = (
        "import sys, torchguard; print(sorted(name for name in sys.modules "
        "if name.partition('.')[0] in ('torch', 'numpy', 'torchguard')))"
    )
    assert output_of(program, fresh=True) == "['torchguard', 'torchguard._public']\n"


def test_a_name_that_is_not_there_raises_attribute_error() -> None:
    assert not hasattr(torchguard, "resise")
