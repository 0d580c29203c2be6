"""What a program holds: a table from the kind of an object to what is in it, and one walk.

A :class:`Reach` says which kinds a walk opens, and how large a container may be:

====================  ======================================================================
:data:`STATE`         containers of any size: what a state dict or a block leaves
:data:`DATA`          containers that are no data: what may be a generator
:data:`TRAINING`      what an optimizer holds: others, in objects and bound methods too
:data:`CALL`          what a call or a checkpointed block reaches: its closure, its globals
====================  ======================================================================

None of these opens modules, whose members torch lists itself, classes, and tensors. A fifth one
does, in ``verification/undone.py``: what a call compared with Python can change, by path.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard._torch import members_of
from torchguard.state.process import Access, generators_among

ATOMS = {int, float, bool, str, bytes, type(None), complex}
"""The classes of which nothing can be changed, and in which nothing else is."""

MOST = 1000
"""A container of more items is taken for data, and not looked into."""

_BY_KEY = (Mapping, list, tuple, set, frozenset, deque)

# ---- the table ----

Kind: TypeAlias = Literal[
    "container", "optimizer", "object", "bound", "function", "module", "class", "tensor", "closed"
]
Pairs: TypeAlias = Collection[tuple[Any, Any]]
"""What is in something: (key or name, child)."""

CONTAINERS = (dict, list, deque, set)
"""Those that can be changed."""


@dataclass(frozen=True)
class Reach:
    """Which kinds a walk opens, and how many items a container may have."""

    opens: frozenset[Kind]
    roots: frozenset[Kind] = frozenset()
    """Kinds that hold an object as the roots do, wherever they are found themselves."""

    most: float = MOST
    named: tuple[type, ...] = (object,)
    """Of the globals that a function names, the classes of those that are not functions."""

    is_own: Callable[[Any], bool] = lambda _: True
    """Whether a function, a class or an object of this class is opened."""


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container; None if ``node`` is not a container.

    Containers are mappings, lists, deques, tuples, sets and data classes.
    """
    if isinstance(node, (set, frozenset, deque)):
        return list(enumerate(node))
    return _pytree.children(node)


def has_attributes(node: Any) -> bool:
    """Whether an object is one of a library or the user, with attributes of its own."""
    return not isinstance(node, _STATELESS) and hasattr(node, "__dict__")


_STATELESS = (nn.Module, Optimizer, type, FunctionType, MethodType, ModuleType)


def _kind_and_inside(node: Any, reach: Reach) -> tuple[Kind, Pairs]:
    for classes, kind, inside in _TABLE:
        if isinstance(node, classes):
            if kind == "optimizer" and kind not in reach.opens:
                return "object", inside(node, reach)
            return kind, inside(node, reach) if kind in reach.opens else ()
    found = children(node)
    if found is not None:
        return "container", found
    if not hasattr(node, "__dict__") or not reach.is_own(type(node)):
        return "closed", ()
    held = vars(node)
    return "object", ({**held, "__class__": type(node)} if "class" in reach.opens else held).items()


def _around(function: FunctionType, reach: Reach) -> Pairs:
    """Return what a function holds: defaults, what it wraps, its closure, the globals it names."""
    wrapped = getattr(function, "__wrapped__", None)
    found = [] if wrapped is None else [("__wrapped__", wrapped)]
    if not reach.is_own(function):
        return found
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    found = [*((f"default {place}", value) for place, value in enumerate(defaults)), *found]
    found += [(name, cell.cell_contents) for name, cell in cells_of(function).items()]
    owners = function.__globals__
    if str(owners.get("__name__")).partition(".")[0] != "torch":
        values = ((name, owners.get(name)) for name in names_in(function.__code__))
        # Functions only of the same module: a library's would lead to all of that library.
        found += [
            (name, value)
            for name, value in values
            if isinstance(value, MethodType) or getattr(value, "__globals__", owners) is owners
            if isinstance(value, (FunctionType, *reach.named))
        ]
    return found


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Return the cells of a function's closure that are not empty."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in pairs if ": empty>" not in repr(cell)}


def _in_partial(node: Any, _: Reach) -> Pairs:
    given = [(f"args[{place}]", value) for place, value in enumerate(node.args)]
    named = [(f"keywords[{name!r}]", value) for name, value in node.keywords.items()]
    return [("func", node.func), *given, *named]


def _in_tensor(tensor: Tensor, _: Reach) -> Pairs:
    return [("grad", tensor.grad)] if tensor.is_leaf and tensor.grad is not None else ()


def _in_module(module: nn.Module, _: Reach) -> Pairs:
    found = {name: part for members in members_of(module) for name, part in members.items()}
    found |= {name: part for name, part in vars(module).items() if name not in _OF_MODULES}
    return {**found, "__class__": type(module)}.items()


_OF_MODULES = vars(nn.Module()).keys() - {"training"}
"""The attributes in which every module keeps members and hooks."""


def _in_class(node: type, reach: Reach) -> Pairs:
    """Return containers that a class holds itself, and its functions."""
    owners = [each for each in node.__mro__ if reach.is_own(each)]
    owned = [item for each in owners for item in vars(each).items()]
    found = {k: v for k, v in owned if isinstance(v, CONTAINERS) and k[:2] != "__"}
    # Of a method, whether static, of the class, or a property.
    functions = ((k, getattr(v, "__func__", getattr(v, "fget", v))) for k, v in owned)
    return {**found, **{k: f for k, f in functions if isinstance(f, FunctionType)}}.items()


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function and in those it defines."""
    nested = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *nested)))


_TABLE: tuple[tuple[Any, Kind, Callable[[Any, Reach], Pairs]], ...] = (
    (nn.Module, "module", _in_module),
    (type, "class", _in_class),
    (ModuleType, "closed", lambda *_: ()),
    (Optimizer, "optimizer", lambda node, _: vars(node).items()),
    (FunctionType, "function", _around),
    (MethodType, "bound", lambda node, _: (("self", node.__self__), ("", node.__func__))),
    (functools.partial, "bound", _in_partial),
    (Tensor, "tensor", _in_tensor),
)
"""The kind of these classes, and what is in one; what is left is a container, or an object."""


# ---- the walk ----


_DATA: frozenset[Kind] = frozenset({"container"})
STATE = Reach(_DATA, most=math.inf)
DATA = Reach(_DATA)
TRAINING = Reach(_DATA | {"optimizer", "bound", "object"}, roots=frozenset({"optimizer"}))
CALL = Reach(_DATA | {"function", "bound", "object"}, roots=frozenset({"function", "bound"}))


def walk(roots: Iterable[Any], reach: Reach = STATE) -> Iterator[Any]:
    """Yield everything inside of the roots, breadth first, each object once; no ``ATOMS``.

    An object is opened where a function or a container holds it, not inside another object: a
    logger leads to the whole program.
    """
    seen: dict[int, Any] = {}
    limited = reach.most < math.inf
    waiting = deque((each, True) for each in roots)
    while waiting:
        node, may_open = waiting.popleft()
        if type(node) in ATOMS or id(node) in seen:
            continue
        seen[id(node)] = node  # held: what is made on the way must not leave its id to another
        yield node
        if isinstance(node, Tensor):  # most of what there is
            continue
        try:
            if limited and isinstance(node, _BY_KEY) and len(node) > reach.most:
                continue
            kind, inside = _kind_and_inside(node, reach)
        except Exception:
            if not limited:
                raise
            # Of a class of the program's, which can't say what is in it.
            kind, inside = "object", getattr(node, "__dict__", {}).items()
        if kind in reach.opens and (may_open or kind != "object"):
            opens = kind in reach.roots or (may_open and kind != "object")
            waiting.extend((child, opens) for _, child in inside)


def paths(roots: Mapping[str, Any], reach: Reach) -> Iterator[tuple[str, Any]]:
    """Yield by path everything inside of the roots, ``ATOMS`` too, but not what is in sets.

    What is reached twice is opened once.
    """
    seen: dict[int, Any] = {}
    waiting = deque(roots.items())
    while waiting:
        path, node = waiting.popleft()
        yield path, node
        if type(node) in ATOMS or id(node) in seen or isinstance(node, (set, frozenset)):
            continue
        seen[id(node)] = node
        if isinstance(node, _BY_KEY) and len(node) > reach.most:
            continue
        kind, inside = _kind_and_inside(node, reach)
        for key, child in inside if kind in reach.opens else ():
            step = f".{key}" if key else ""
            if kind == "container":
                step = f"[{key!r}]" if type(key) in ATOMS else f"[{type(key).__name__}]"
            waiting.append(((path + step).lstrip("."), child))


def tensors_among(values: Iterable[Any], reach: Reach = STATE) -> list[Tensor]:
    """Return the tensors among values and in containers of these, each once."""
    return [each for each in walk(values, reach) if isinstance(each, Tensor)]


def generators_in(values: Iterable[Any]) -> list[Access]:
    """Return how to read and set the generators among values and in containers of these."""
    return generators_among(walk(values, DATA))


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another one holds, in containers and objects too."""
    found = walk([optimizer], TRAINING)
    return [each for each in found if isinstance(each, Optimizer) and each is not optimizer]


def reachable(function: Any, arguments: Iterable[Any]) -> list[Any]:
    """Return what a function can reach, each object once, without what is inside modules.

    Arguments, what it is bound to, its closure, the globals it names (functions only of its own
    module), and what is inside these: a model in a list, an attribute of a method's object.
    """
    return list(walk((function, *arguments), CALL))


def modules_reached(function: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """Return the modules a function can reach, without what is inside them."""
    return [each for each in reachable(function, arguments) if isinstance(each, nn.Module)]


def with_submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all that are inside of them, each once."""
    return list({id(each): each for top in modules for each in top.modules()}.values())


# ---- tensors by path ----


def require_container(obj: object, name: str) -> None:
    """Raise a ``TypeError`` if :func:`tensors_in` looks for no tensors in ``obj``."""
    known = isinstance(obj, (Tensor, nn.Module, Optimizer))
    if not known and children(obj) is None:
        raise TypeError(
            f"{name} is of type {type(obj).__name__}, expected a tensor, a module, an optimizer, "
            "or a dict, list, tuple or data class of these"
        )


def tensors_in(obj: Any, path: str, seen: dict[int, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside ``obj`` and its gradient, with the path that leads to it."""
    if isinstance(obj, Tensor):
        yield path, obj
        if obj.is_leaf and obj.grad is not None:
            yield f"{path}.grad", obj.grad
        return
    if type(obj) in ATOMS or id(obj) in seen:
        return
    seen[id(obj)] = obj  # held: some are made here, and the id of one that is gone is used again
    for step, child in _steps(obj):
        yield from tensors_in(child, path + step, seen)


def _steps(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of a module, an optimizer or a container, by how Python reaches them."""
    if isinstance(obj, nn.Module):
        for name, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            yield _step(name), tensor
    elif isinstance(obj, Optimizer):
        for index, group in enumerate(obj.param_groups):
            yield f".param_groups[{index}]", group
        yield ".state", dict(enumerate(obj.state.values()))
    else:
        # Named tuples, and data classes that are no mappings.
        names = getattr(obj, "_fields", ()) if isinstance(obj, tuple) else ()
        by_name = not isinstance(obj, _BY_KEY)
        for key, child in children(obj) or ():
            name = names[key] if names else key
            yield f".{name}" if names or by_name else f"[{key!r}]", child


def _step(name: str) -> str:
    """Write a parameter's name, ``1.running_var``, as Python would reach it from the module."""
    parts = name.split(".")
    return "".join(
        f".{part}" if part.isidentifier() else f"[{part if part.isdecimal() else repr(part)}]"
        for part in parts
    )
