"""What the source may say: imports point one way, one file sets attributes of torch, none a switch.

A dotted string, such as ``importlib.import_module("torch._dynamo")`` takes, is an import, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torchguard

PACKAGE = Path(torchguard.__file__).parent
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}

# What each room may import besides itself. A room that is missing here fails the test.
FOUNDATION = {"errors", "_public", "_pytree", "_files", "_events", "_environment", "_absent"}
TORCH = {"_torch", *FOUNDATION}
SHARED = {"equivalence", "state", "assignment", "training_setup", *TORCH}
ROOMS = {
    *("rollback", "transactions", "checkpoint", "checks"),
    *("bucketing", "verification", "interop", "replicas"),
}
ABOVE = {*SHARED, *ROOMS, "patching", "front door"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"_public"},
    "_public": set(),
    "_absent": set(),
    "_pytree": {"errors"},
    "_files": {"errors"},
    "_torch": FOUNDATION,
    "_events": {"_public", "errors"},
    "_environment": {"_events", "_public"},
    "assignment": {"equivalence", *TORCH},
    "state": TORCH,
    "equivalence": {"state", *TORCH},
    "training_setup": {"state", *TORCH},
    **dict.fromkeys(ROOMS, SHARED),
    # A step and a state dict that fail are put back with what an operation is put back with.
    "checkpoint": {*SHARED, "rollback"},
    "transactions": {*SHARED, "rollback"},
    "patching": {*SHARED, *ROOMS},
    "front door": {*SHARED, *ROOMS, "patching", "defects"},
    "integrations": ABOVE,
    "defects": ABOVE,
    "cli": {*ABOVE, "defects"},
    "__main__": {*FOUNDATION, "cli", "patching"},
}


def _room(path: str) -> str:
    name = path.partition("/")[0].removesuffix(".py")
    return "front door" if name == "__init__" else name


def _room_of(module: str, name: str = "") -> str:
    """Return the room of a dotted path that begins with ``torchguard``."""
    first = [*module.split(".")[1:], name][0]
    here = first and ((PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").exists())
    return first if here else "front door"


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a program but docstrings, which stand alone."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def _imported(tree: ast.Module) -> set[str]:
    """Return the rooms that a program imports, or names in a dotted string that it may import."""
    found = {_room_of(text) for text in _strings(tree) if re.fullmatch(r"torchguard(\.\w+)+", text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchguard"):
            found |= {_room_of(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {_room_of(name) for name in names if name.startswith("torchguard")}
    return found


def test_a_room_imports_only_rooms_below_it() -> None:
    """The directions of docs/project/design.md."""
    wrong = {
        path: _imported(tree) - {_room(path)} - MAY_IMPORT[_room(path)]
        for path, tree in TREES.items()
    }
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_only_torch_room_names_private_modules_of_torch_in_strings() -> None:
    private = [
        (path, text)
        for path, tree in TREES.items()
        if _room(path) not in {"_torch", "defects"}
        for text in _strings(tree)
        if re.fullmatch(r"torch\._(?!_)\w+(\.\w+)*", text)
    ]
    assert private == []


def _at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those for type checkers alone too.

    What is imported inside of a function comes later.
    """
    for node in tree.body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Two modules of one room do not, either, nor for type checkers alone."""
    graph = {}
    for path, tree in TREES.items():
        module = f"torchguard.{path.removesuffix('.py').replace('/', '.')}"
        graph[module.removesuffix(".__init__")] = {
            target
            for node in _at_import(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for target in (f"{node.module}.{alias.name}", node.module)
        }
    while free := [name for name in graph if not graph[name] & graph.keys() - {name}]:
        for name in free:
            del graph[name]
    assert graph == {}


def test_no_two_files_have_the_same_name() -> None:
    """But for ``__init__`` and ``api``: a traceback and a tab of an editor show the name alone."""
    names = Counter(path.rpartition("/")[2] for path in TREES)
    assert {name for name, count in names.items() if count > 1} == {"__init__.py", "api.py"}


# What a program imports from the room of its trainer has the same name for both.
OF_TRAINERS = {"GuardCallback", "RetryMixin"}


def test_no_two_classes_have_the_same_name() -> None:
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if type(node) is ast.ClassDef
    )
    assert {name for name, count in names.items() if count > 1} == OF_TRAINERS


# --- ``_torch/patch.py`` is the only file that sets or deletes an attribute of torch

# What is set there, and whose attribute it is.
NOT_TORCH: dict[str, set[str]] = {
    "state/tensors.py": {"setattr(tensor, name, part.tensor)"},  # a tensor of the user
    "state/training.py": {"module.__class__"},  # a module of the user
    "verification/rounding.py": {"setattr(part, node.target, doubles[place])"},  # a copied graph
    "verification/graph.py": {
        "setattr(new, name, value)",  # a copied graph's node
        "setattr(copied, name, copy_graph(child))",  # a copied graph
    },
    "checkpoint/ties.py": {"setattr(holder, own, tensor)"},  # a module of the user
    "checkpoint/loading.py": {"tensor.__class__"},  # a lazy parameter of the user
    "_torch/compile.py": {"setattr(convert, name, backend)"},  # a function made there
}


def _set_by(tree: ast.Module) -> set[str]:
    """What a program sets or deletes: attributes by computed name, classes, and torch's."""
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
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(
            node.ctx, ast.Load
        ):
            owner = ast.unparse(node.value).removeprefix("vars(").partition(".")[0].rstrip(")")
            if owner in torchs or getattr(node, "attr", "") == "__class__":
                found.add(ast.unparse(node))
    return found


def test_only_patch_sets_attributes_of_torch() -> None:
    """Probes of the catalog are not looked at: each runs in a process of its own."""
    found = {path: _set_by(tree) for path, tree in TREES.items() if _room(path) != "defects"}
    assert len(found.pop("_torch/patch.py")) >= 2  # the test sees what there is
    wrong = {path: each - NOT_TORCH.get(path, set()) for path, each in found.items()}
    assert {path: each for path, each in wrong.items() if each} == {}


# --- nothing that user threads run changes a switch of the whole process

# What a thread would change for all others, and two threads for good: each restores what it found.
SWITCHES = {
    *("catch_warnings", "simplefilter", "filterwarnings", "resetwarnings", "set_warn_always"),
    *("redirect_stderr", "redirect_stdout", "setrecursionlimit", "setswitchinterval"),
    *("setLevel", "set_num_threads", "set_default_dtype", "set_default_device"),
    *("use_deterministic_algorithms", "set_deterministic_debug_mode"),
    *("set_float32_matmul_precision", "excepthook", "showwarning", "set_stance"),
}


def _switches_in(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if node.attr in SWITCHES
        or (node.attr in {"stderr", "stdout"} and isinstance(node.ctx, ast.Store))
    ]


def test_no_file_has_a_switch_of_the_process() -> None:
    """Commands and probes are programs of their own, with one thread."""
    found = {
        path: _switches_in(tree)
        for path, tree in TREES.items()
        if _room(path) not in {"cli", "defects"}
    }
    path = "_torch/symbolic_shapes.py"  # has one scope for all threads
    found[path] = [each for each in found[path] if "set_stance" not in each]
    assert {path: switches for path, switches in found.items() if switches} == {}


# --- what outlives a call is named in one place

EMPTY = {"dict", "set", "list", "deque", "OrderedDict"}
HOLDERS = {"Counter", "WeakKeyDictionary", "Lock", "RLock", "ContextVar", "Switch", "local"}


def _holds_state(value: ast.expr) -> bool:
    """Whether a value is empty and will be filled, or is a lock, a switch or the like."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in HOLDERS or (name in EMPTY and not value.args and not value.keywords)
    return ast.unparse(value) in {"{}", "[]"}


def _state_of(tree: ast.Module) -> list[str]:
    """Return the names in a module that hold what outlives a call."""
    exchanged = {n for each in ast.walk(tree) if isinstance(each, ast.Global) for n in each.names}
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        pairs = [(node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value)]
        if isinstance(pairs[0][0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(pairs[0][0].elts, node.value.elts, strict=True))
        names = [(ast.unparse(target), value) for target, value in pairs]
        found += [name for name, value in names if name in exchanged or _holds_state(value)]
    return found


def test_the_design_page_names_all_state_of_the_process() -> None:
    page = Path(__file__).parents[2].joinpath("docs/project/design.md").read_text(encoding="utf-8")
    section = page.partition("## What the process holds")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", section, re.MULTILINE)
    told = {path: re.findall(r"`(\w+)`", names) for path, names in rows}
    assert told == {path: names for path, tree in TREES.items() if (names := _state_of(tree))}
