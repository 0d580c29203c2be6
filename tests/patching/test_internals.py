"""What is private to torch is used in one folder only, and exists."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.kinds import STRIDED, Wrapper, plain
from torchguard import _torch

SOURCES = Path(inspect.getfile(torchguard)).parent


def private_names(source: str) -> set[str]:
    """Dotted paths in a program that lead to something private of torch's."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name.partition(".")[0]: (
            alias.name if alias.asname else alias.name.partition(".")[0]
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] == "torch"
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in names if _is_private(name)}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name
                for alias in node.names
                if alias.name.startswith("torch.") and _is_private(alias.name)
            }
        elif isinstance(node, ast.Attribute):
            path = _path(node)
            if path and path.partition(".")[0] in modules and _is_private(path):
                found.add(path)
    return found


def _path(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _path(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_attributes(source: str) -> set[str]:
    """Private names asked of any object but ``self``: ``schema._schema``, ``tensor._version``."""
    tree = ast.parse(source)
    own = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else []
        )
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and _is_private(node.attr)
        and node.attr not in own
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "sys", "os"})
    }


def test_the_search_finds_what_it_looks_for() -> None:
    program = """
import torch, torch._dynamo
import torch.utils._pytree as tree
from torch._C import _len_torch_function_stack
from torch.overrides import _get_overloaded_args
def f(t):
    torch.autograd._unsafe(t)
    return tree, torch.Tensor.__torch_dispatch__, t._version
"""
    assert private_names(program) == {
        "torch._dynamo",
        "torch.utils._pytree",
        "torch._C._len_torch_function_stack",
        "torch.overrides._get_overloaded_args",
        "torch.autograd._unsafe",
    }
    assert "_version" in private_attributes(program)


def _guard_sources() -> list[Path]:
    # Probes of the catalog reproduce defects with whatever shows them.
    elsewhere = {"defects", "probes", "_torch"}
    return sorted(path for path in SOURCES.rglob("*.py") if path.parent.name not in elsewhere)


@pytest.mark.parametrize("path", _guard_sources(), ids=lambda path: str(path.relative_to(SOURCES)))
def test_only_internals_uses_what_is_private_to_torch(path: Path) -> None:
    source = path.read_text()
    assert private_names(source) == set()
    assert private_attributes(source) & _torchs_private_names() == set()


def _torchs_private_names() -> set[str]:
    objects: tuple[Any, ...] = (
        torch,
        torch.Tensor,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add.Tensor._schema,
        torch.UntypedStorage,
        torch.autograd,
    )
    return {name for each in objects for name in dir(each) if _is_private(name)}


def test_each_private_name_of_internals_exists_or_is_asked_for_carefully() -> None:
    files = Path(inspect.getfile(_torch)).parent.glob("*.py")
    private = set().union(*(private_names(path.read_text()) for path in files))
    assert private
    careful = {"torch.jit._builtins._get_builtin_table"}
    missing = []
    for path in sorted(private - careful):
        value: Any = torch
        for part in path.split(".")[1:]:
            if not hasattr(value, part):
                missing.append(path)
                break
            value = getattr(value, part)
    assert missing == []


def test_nothing_in_internals_is_unused() -> None:
    users = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    unused, offered = [], 0
    for path in Path(_torch.__path__[0]).glob("[a-z]*.py"):
        names = _defined_names(path.read_text())
        public = [name for name in names if not name.startswith("_")]
        offered += len(public)
        # its def, and its line in __all__ where the file has one; and a use
        written = 2 if "__all__" in names else 1
        unused += [name for name in public if users.count(name) <= written]
    assert offered > 80
    assert unused == []


def _defined_names(source: str) -> list[str]:
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


class TestTheVersionCounter:
    @pytest.mark.parametrize("version", [0, 1, 7])
    def test_can_be_set(self, version: int) -> None:
        tensor = plain().add_(1).add_(1)
        view = tensor[0]
        _torch.set_version(tensor, version)
        assert _torch.version_of(tensor) == tensor._version == view._version == version

    def test_of_an_inference_tensor_is_none(self) -> None:
        with torch.inference_mode():
            assert _torch.version_of(plain()) is None


def test_a_tensor_with_a_dispatcher_of_its_own_is_recognised() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    with FakeTensorMode():
        assert _torch.has_own_dispatch(torch.empty(2))
    assert _torch.has_own_dispatch(Wrapper(plain()))
    for kind in STRIDED:
        assert not _torch.has_own_dispatch(kind.make()), kind.name


def test_overloads_without_a_python_binding_do_not_count_as_out() -> None:
    assert _torch.has_python_out(torch.add)
    assert _torch.has_python_out(torch.linalg.inv)
    assert not _torch.has_python_out(torch.relu)
    assert not _torch.has_python_out(torch.dropout)
    assert not _torch.has_python_out(torch.is_tensor)


def test_function_modes_can_be_taken_off_the_stack_and_put_back() -> None:
    from torch.overrides import TorchFunctionMode  # noqa: PLC0415

    class Mode(TorchFunctionMode):
        pass

    with Mode() as outer, Mode() as inner:
        stack = _torch.torch_function_modes()
        assert stack == [outer, inner]
        _torch.replace_torch_function_modes([])
        assert _torch.torch_function_modes() == []
        _torch.replace_torch_function_modes(stack)
        assert _torch.torch_function_modes() == [outer, inner]
    assert _torch.torch_function_modes() == []


def test_has_saved_tensors_hooks_sees_hooks_and_leaves_them_as_they_are() -> None:
    """Inside of a transform, where torch refuses hooks, there are none."""
    assert not _torch.has_saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.has_saved_tensors_hooks()
        assert _torch.has_saved_tensors_hooks()
    found = []

    def squares(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch.has_saved_tensors_hooks())
        return (x**2).sum()

    torch.func.grad(squares)(torch.ones(2))
    assert [bool(each) for each in found] == [False]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass  # they are not refused now
