"""Importing torchguard changes nothing; what is private to torch is used in one folder only."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.child_process import output_of
from torchguard import _torch

# Prints, as JSON, what importing a module (the first argument) changes.
OBSERVER = """
import importlib, json, sys, types, warnings
import numpy, torch  # what torchguard needs
import typing_extensions

ASIDE = (
    "torch._dynamo", "torch._inductor", "matplotlib", "pandas", "scipy", "transformers",
    "lightning", "accelerate",
    "torchguard.verification.check",  # and what it imports: needed when a graph is compiled
)

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "numpy") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[name, key] = value
    classes = [torch.Tensor, torch._C.TensorBase, torch.nn.Module, torch.nn.Parameter]
    classes += [torch.UntypedStorage, torch.TypedStorage, torch.optim.Optimizer]
    for owner in classes:
        for key, value in list(vars(owner).items()):
            found[owner.__qualname__, key] = value
    return found

def settings():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill uninitialized memory": torch.utils.deterministic.fill_uninitialized_memory,
        "warn always": torch.is_warn_always_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "sharing strategy": torch.multiprocessing.get_sharing_strategy(),
        "random state": torch.get_rng_state().sum().item(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "print options": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "warning filters": len(warnings.filters),
        # wrapt's waits for Dynamo: allow_in_graph(sliced_assign) is called then.
        "import hooks": [
            name for name in map(lambda finder: type(finder).__module__, sys.meta_path)
            if name != "wrapt.importer"
        ],
        "excepthook": sys.excepthook is sys.__excepthook__,
    }

settings()  # what torch imports lazily for these is there from now on
before, set_before, loaded = attributes(), settings(), set(sys.modules)
importlib.import_module(sys.argv[1])
after, set_after = attributes(), settings()

changed = [".".join(key) for key in before if key not in after or after[key] is not before[key]]
# A submodule that is imported for the first time becomes an attribute of its package.
appeared = [
    ".".join(key)
    for key, value in after.items()
    if key not in before and key[0] in loaded | {"Tensor", "TensorBase", "Module", "Parameter"}
    and not isinstance(value, types.ModuleType)
]
print(json.dumps({
    "changed": sorted(changed),
    "appeared": sorted(appeared),
    "settings": sorted(key for key in set_before if set_before[key] != set_after[key]),
    "imported": sorted(name for name in ASIDE if name in sys.modules and name not in loaded),
    "seen": len(before),
}))
"""

EVERYTHING = """
import importlib, pkgutil, torchguard
for module in pkgutil.walk_packages(torchguard.__path__, "torchguard."):
    # An integration imports the library it is for, and this module the compiler.
    if not module.name.endswith(("__main__", "_torch.compiler")) and (
        "integrations." not in module.name
    ):
        importlib.import_module(module.name)
"""


def test_importing_every_module_of_torchguard_changes_nothing(tmp_path: Path) -> None:
    """No attribute and no setting of torch; test_front_door.py imports torchguard alone."""
    (tmp_path / "everything.py").write_text(EVERYTHING)
    # checkpoint.sharded imports it; what that changes is torch's own doing.
    observer = OBSERVER.replace(
        "import numpy, torch", "import torch.distributed.checkpoint, numpy, torch"
    )
    found = json.loads(output_of(observer, "everything", folder=tmp_path))
    assert found.pop("seen") > 10_000
    assert found.pop("imported") == ["torchguard.verification.check"]
    assert found == {"changed": [], "appeared": [], "settings": []}


def test_installing_guards_imports_no_compiler_and_leaves_random_numbers_alone() -> None:
    """A training that installs them draws the same ones; a compiler takes seconds to import."""
    program = """
        import pickle, random, sys, numpy, torch, torch.utils.checkpoint, torchguard
        loaded = set(sys.modules)  # on torch 2.6 torch.utils.checkpoint imports sympy
        from torchguard.patching.guards import GUARDS
        def states():
            return pickle.dumps((torch.get_rng_state().tolist(), numpy.random.get_state(),
                                 random.getstate()))
        for names in (*zip(GUARDS), list(GUARDS)):
            before = states()
            with torchguard.install(*names):
                assert states() == before, names
            assert not {"sympy", "torch._dynamo"} & (set(sys.modules) - loaded), names
    """
    output_of(program)


def test_what_is_imported_later_is_guarded_once_and_put_back(tmp_path: Path) -> None:
    program = f"""
    import sys, torch, torchguard
    assert "torch.distributed.checkpoint" not in sys.modules
    torchguard.install("save", "load")
    import torch.distributed.checkpoint as dcp
    dcp.save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
    for save in (dcp.save, dcp.state_dict_saver.save):
        try:
            save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
        except torchguard.errors.SaveError:
            print("raised")
    guarded = dcp.save
    torchguard.uninstall()
    assert dcp.save is dcp.state_dict_saver.save is not guarded
    assert dcp.load is dcp.state_dict_loader.load
    dcp.save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
    """
    assert output_of(program).split() == ["raised", "raised"]


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
    """Private names asked of any object but ``self``: ``schema._schema``, ``"_comm_hooks"``."""
    own, asked = set(), set()
    nodes = list(ast.walk(ast.parse(source)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in parts:
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and _path(node.value) not in {"self", "sys", "os"}:
            asked |= {node.attr} if _is_private(node.attr) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            asked |= {node.value} if re.fullmatch(r"_[a-z]\w*", node.value) else set()
    return asked - own


def test_only_one_folder_uses_what_is_private_to_torch() -> None:
    objects: tuple[Any, ...] = (
        torch, torch.Tensor, torch.ops.aten.add, torch.ops.aten.add.Tensor,
        torch.ops.aten.add.Tensor._schema, torch.UntypedStorage, torch.autograd,
    )  # fmt: skip
    objects += torch.nn.Linear(1, 1), torch.nn.modules.batchnorm, torch.storage.TypedStorage
    objects += torch.optim.SGD([torch.ones(1)], 0.1), torch.amp.GradScaler("cpu"), torch.fx.Graph()
    torchs = {name for each in objects for name in dir(each) if _is_private(name)}
    # What PyTorch gives to its objects later.
    torchs |= {"_orig_mod", "_comm_hooks", "_in_backward_optimizers", "_dynamo_source"}
    torchs |= {"_enter_autocast", "_num_yielded"}
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


# --- guards while another thread imports modules of torch, and in forks


@pytest.mark.slow
def test_a_forked_child_has_the_guards_and_can_remove_them() -> None:
    program = """
        import os, torch, torchguard
        torchguard.install("resize")
        child = os.fork()
        if child == 0:
            torchguard.uninstall()
            os._exit("resize_" in vars(torch.Tensor))
        print(os.waitpid(child, 0)[1], "resize_" in vars(torch.Tensor))
    """
    assert output_of(program) == "0 True\n"


# Dynamo, whose import another thread has begun.
DYNAMO = """
    import os, sys, threading, time
    import torch, torchguard
    from torchguard._torch import patch

    def begin(name, until):
        thread = threading.Thread(target=__import__, args=(name,), daemon=True)
        thread.start()
        while until not in sys.modules:
            time.sleep(0.001)
        return thread

    def end(thread):
        thread.join(60)
        return not thread.is_alive()
"""


@pytest.mark.slow
def test_a_scope_that_begins_while_dynamo_is_imported_sees_compiled_code() -> None:
    program = """
    with torchguard.guarded():
        pass
    thread = begin("torch._dynamo", "torch._dynamo")
    with torchguard.guarded("checks"):
        end(thread)
        call = torch.compile(lambda w, i: torch.embedding(w, i), backend="aot_eager")
        try:
            call(torch.ones(3, 2), torch.tensor([7]))
        except IndexError as error:
            print(type(error).__name__)
    """
    assert output_of(DYNAMO + program) == "IndexOutOfRangeError\n"


@pytest.mark.slow
def test_a_guard_that_is_installed_while_its_module_is_imported_patches_it() -> None:
    name = "torch.distributed.checkpoint"
    program = f"""
    torchguard.install("resize", only_if_needed=False)
    thread = begin({name!r}, {name!r})
    torchguard.install("load", only_if_needed=False)
    end(thread)
    from {name} import load
    print(load is not patch.original("{name}.load"))
    """
    assert output_of(DYNAMO + program) == "True\n"
