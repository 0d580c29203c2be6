"""``_torch/patch.py`` is the only file that sets or deletes an attribute of torch."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import torchguard

PACKAGE = Path(torchguard.__file__).parent
PATCH = "_torch/patch.py"
THROUGH_PATCH = {"set_attributes", "set_class"}
"""They set whatever they are given: the overlays are their one user."""

NOT_TORCH = {
    # What is set there, and whose attribute it is.
    ("rollback/snapshot.py", "setattr(tensor, name, part.tensor)"),  # a tensor of the user
    ("verification/graph.py", "setattr(new, name, value)"),  # a copied graph's node
    ("verification/graph.py", "setattr(copied, name, copy_graph(child))"),  # a copied graph
    ("checkpoint/ties.py", "setattr(holder, own, tensor)"),  # a module of the user
    ("transactions/state.py", "module.__class__"),  # a module of the user
    ("_torch/compile.py", "setattr(convert, name, backend)"),  # a function made there
    ("_torch/symbolic_shapes.py", "delattr(tensor, name)"),  # a tensor of the user
}


def set_by(source: str) -> set[str]:
    """What a program sets or deletes: attributes by computed name, classes, and torch's."""
    tree = ast.parse(source)
    torchs = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "torch"
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            # type.__setattr__(torch.Tensor, ...); object.__setattr__ refuses classes and is
            # what frozen instances of ours are filled with.
            if name in {"setattr", "delattr", "type.__setattr__", "type.__delattr__"}:
                found.add(ast.unparse(node))
            if name.rpartition(".")[2] in THROUGH_PATCH:
                found.add(name.rpartition(".")[2])
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            path = ast.unparse(node.value).removeprefix("vars(")
            if path.partition(".")[0].rstrip(")") in torchs:
                found.add(ast.unparse(node))
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            path = ast.unparse(node)
            if path.partition(".")[0] in torchs or node.attr == "__class__":
                found.add(path)
    return found


def test_only_patch_sets_attributes_of_torch() -> None:
    """Probes of the catalog are not looked at: each runs in a process of its own."""
    wrong = {}
    for source in sorted(PACKAGE.rglob("*.py")):
        path = str(source.relative_to(PACKAGE))
        if path == PATCH or path.startswith("defects/"):
            continue
        allowed = {text for file, text in NOT_TORCH if file == path}
        if path == "_torch/overlays.py":
            allowed |= THROUGH_PATCH
        wrong[path] = set_by(source.read_text(encoding="utf-8")) - allowed
    assert len(wrong) > 50
    assert {path: found for path, found in wrong.items() if found} == {}


def test_each_way_of_setting_is_seen() -> None:
    program = """
    import torch
    from torch.nn import functional as F
    from torchguard._torch.patch import set_attributes
    setattr(owner, name, value)
    delattr(owner, name)
    type.__setattr__(torch.Tensor, "a", 1)
    torch.Tensor.add_ = mine
    del F.relu
    module.__class__ = other
    vars(torch)["add"] = mine
    set_attributes(torch, [])
    self.mine = 1
    kept = torch.Tensor.add_
    """
    assert set_by(textwrap.dedent(program)) == {
        "setattr(owner, name, value)",
        "delattr(owner, name)",
        "type.__setattr__(torch.Tensor, 'a', 1)",
        "torch.Tensor.add_",
        "F.relu",
        "module.__class__",
        "vars(torch)['add']",
        "set_attributes",
    }
