"""Imports point one way: which room may import which, in code and in dotted strings."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import torchguard

PACKAGE = Path(torchguard.__file__).parent
# What each room may import besides itself. A room that is missing here fails the test.
FOUNDATION = {"errors", "_public", "_pytree", "_files"}
TORCH = {"_torch", *FOUNDATION}
SHARED = {"equivalence", "assignment", *TORCH}
ROOMS = {
    *("rollback", "transactions", "checkpoint", "checks"),
    *("bucketing", "verification", "interop", "replicas"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"_public"},
    "_public": set(),
    "_pytree": {"errors"},
    "_files": {"errors"},
    "_torch": FOUNDATION,
    "assignment": TORCH,
    "equivalence": TORCH,
    "rollback": SHARED,
    "checks": SHARED,
    "bucketing": SHARED,
    "verification": SHARED,
    "interop": SHARED,
    "replicas": SHARED,
    # A step and a state dict that fail are put back with what an operation is put back with.
    "checkpoint": {*SHARED, "rollback"},
    "transactions": {*SHARED, "rollback"},
    "patching": {*SHARED, *ROOMS},
    "front door": {*SHARED, *ROOMS, "patching", "defects"},
    "integrations": {*SHARED, *ROOMS, "patching", "front door"},
    "defects": {*SHARED, *ROOMS, "patching", "front door"},
    "cli": {*SHARED, *ROOMS, "patching", "front door", "defects"},
    "__main__": {*FOUNDATION, "cli", "patching"},
}


def _room(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix(".pyi")
    return "front door" if name == "__init__" else name


def _room_of(module: str, name: str = "") -> str | None:
    """Return the room of a dotted path that begins with ``torchguard``, if it names one."""
    parts = [*module.split(".")[1:], name]
    if (PACKAGE / parts[0]).is_dir() and parts[0]:
        return parts[0]
    return parts[0] if (PACKAGE / f"{parts[0]}.py").exists() and parts[0] else "front door"


def _imported(source: str) -> set[str]:
    """Return the rooms that a program imports, or names in a dotted string that it may import."""
    found = set()
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchguard"):
            found |= {_room_of(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torchguard")]
            found |= {_room_of(name) for name in names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if id(node) not in documentation and re.fullmatch(r"torchguard(\.\w+)+", text):
                found.add(_room_of(text))
    return {room for room in found if room is not None}


SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_a_room_imports_only_rooms_below_it() -> None:
    """The directions of docs/design.md."""
    wrong = {}
    for path, source in SOURCES.items():
        room = _room(path)
        wrong[path] = _imported(source) - {room} - MAY_IMPORT[room]
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_only_torch_room_names_private_modules_of_torch_in_strings() -> None:
    """``importlib.import_module("torch._dynamo...")`` is an import, too."""
    private = [
        (path, node.value)
        for path, source in SOURCES.items()
        if _room(path) not in {"_torch", "defects"}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"torch\._(?!_)\w+(\.\w+)*", node.value)
    ]
    assert private == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Two modules of one room do not, either."""
    graph = {}
    for path, source in SOURCES.items():
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        tree = ast.parse(source)
        graph[module] = {
            target
            for node in tree.body  # what is imported inside of a function comes later
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for target in (f"{node.module}.{alias.name}", node.module)
        }
    done: set[str] = set()
    while True:
        free = {
            name for name in graph.keys() - done if not (graph[name] & graph.keys()) - done - {name}
        }
        if not free:
            break
        done |= free
    assert graph.keys() - done == set()


def test_few_files_lie_beside_the_rooms() -> None:
    """A new idea gets a room, or goes into one."""
    assert {path.name for path in PACKAGE.glob("*.py")} <= {
        "__init__.py", "__main__.py", "_files.py", "_public.py", "_pytree.py", "errors.py",
        "replicas.py",
    }  # fmt: skip


def test_the_directions_are_seen_by_the_test() -> None:
    """An import, one inside of a function, and a dotted string."""
    program = '''
    """torchguard.cli in a docstring is no import."""
    from torchguard import bucketed
    from torchguard.rollback.resize import safe_resize_
    def late():
        import torchguard.verification.check
        return "torchguard.defects.doctor"
    '''
    seen = {"front door", "rollback", "verification", "defects"}
    assert _imported(textwrap.dedent(program)) == seen
