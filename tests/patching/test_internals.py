"""What is private to torch is used in one folder only, exists, and is used."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import torch

import torchguard
from torchguard import _torch

SOURCES = Path(inspect.getfile(torchguard)).parent


def private_names(source: str) -> set[str]:
    """Dotted paths in a program that lead to something private of torch's."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = [alias.name for alias in imported if "." in alias.name]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    modules = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in imported}
    for path in filter(None, (_path(node) for node in nodes if isinstance(node, ast.Attribute))):
        if modules.get(path.partition(".")[0], "").partition(".")[0] == "torch":
            names.append(path if path.startswith("torch.") else f"torch.{path}")
    return {name for name in names if name.startswith("torch.") and _is_private(name)}


def _path(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    owner = _path(node.value) if isinstance(node, ast.Attribute) else None
    return None if owner is None else f"{owner}.{node.attr}"  # type: ignore[attr-defined]


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_attributes(source: str) -> set[str]:
    """Private names asked of any object but ``self``: ``schema._schema``, ``tensor._version``."""
    own, asked = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and _path(node.value) not in {"self", "sys", "os"}:
            asked |= {node.attr} if _is_private(node.attr) else set()
    return asked - own


def test_only_one_folder_uses_what_is_private_to_torch() -> None:
    objects: tuple[Any, ...] = (
        torch, torch.Tensor, torch.ops.aten.add, torch.ops.aten.add.Tensor,
        torch.ops.aten.add.Tensor._schema, torch.UntypedStorage, torch.autograd,
    )  # fmt: skip
    torchs = {name for each in objects for name in dir(each) if _is_private(name)}
    found = {}
    for path in SOURCES.rglob("*.py"):
        # Probes of the catalog reproduce defects with whatever shows them.
        if path.parent.name not in {"defects", "probes", "_torch"}:
            source = path.read_text()
            found[path] = private_names(source) | private_attributes(source) & torchs
    assert len(found) > 50
    assert {path: names for path, names in found.items() if names} == {}


def test_each_private_name_exists_or_is_asked_for_carefully() -> None:
    files = Path(inspect.getfile(_torch)).parent.glob("*.py")
    private = set().union(*(private_names(path.read_text()) for path in files))
    assert private
    missing = []
    for path in private - {"torch.jit._builtins._get_builtin_table"}:
        value: Any = torch
        for part in path.split(".")[1:]:
            if not hasattr(value, part):
                missing.append(path)
                break
            value = getattr(value, part)
    assert missing == []


def test_nothing_in_the_folder_is_unused() -> None:
    users = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    unused, offered = [], 0
    for path in Path(_torch.__path__[0]).glob("[a-z]*.py"):
        names: list[str] = []
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.append(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        public = [name for name in names if not name.startswith("_")]
        offered += len(public)
        # its def, and its line in __all__ where the file has one; and a use
        written = 2 if "__all__" in names else 1
        unused += [name for name in public if users.count(name) <= written]
    assert offered > 80
    assert unused == []
