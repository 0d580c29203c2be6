"""What a program holds: a table from the kind of an object to what is in it, and one walk.

A :class:`Reach` says which kinds a walk opens, and how large a container may be:

====================  ======================================================================
:data:`STATE`         containers of any size: what a state dict or a block leaves
:data:`DATA`          containers that are no data: what may be a generator
:data:`TRAINING`      what an optimizer holds: others, in objects and bound methods too
:data:`CALL`          what a call or a checkpointed block reaches: its closure, its globals
====================  ======================================================================

Nothing is opened inside modules, whose members torch lists itself, inside classes, and inside
tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard.state.process import Access, generators_among

ATOMS = {int, float, bool, str, bytes, type(None), complex}
"""The classes of which nothing can be changed, and in which nothing else is."""

MOST = 1000
"""A container of more items is taken for data, and not looked into."""

_BY_KEY = (Mapping, list, tuple, set, frozenset, deque)

# ---- the table ----

Kind: TypeAlias = Literal["container", "optimizer", "object", "bound", "function", "closed"]
Pairs: TypeAlias = Collection[tuple[Any, Any]]
"""What is in something: (key or name, child)."""


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


def _kind_and_inside(node: Any) -> tuple[Kind, Pairs]:
    for classes, kind, inside in _TABLE:
        if isinstance(node, classes):
            return kind, inside(node)
    found = children(node)
    if found is not None:
        return "container", found
    return ("object", vars(node).items()) if hasattr(node, "__dict__") else ("closed", ())


def _around(function: FunctionType) -> list[Any]:
    """Return what a function holds: defaults, what it wraps, its closure, the globals it names."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found.append(getattr(function, "__wrapped__", None))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            found.append(cell.cell_contents)
    owners = function.__globals__
    if str(owners.get("__name__")).partition(".")[0] != "torch":
        values = (owners.get(name) for name in names_in(function.__code__))
        # Functions only of the same module: a library's would lead to all of that library.
        found += [
            value
            for value in values
            if isinstance(value, MethodType) or getattr(value, "__globals__", owners) is owners
        ]
    return found


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function and in those it defines."""
    nested = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *nested)))


_TABLE: tuple[tuple[Any, Kind, Callable[[Any], Pairs]], ...] = (
    ((nn.Module, type, ModuleType), "closed", lambda _: ()),
    (Optimizer, "optimizer", lambda node: vars(node).items()),
    (FunctionType, "function", lambda node: list(enumerate(_around(node)))),
    (MethodType, "bound", lambda node: ((0, node.__self__), (1, node.__func__))),
    (
        functools.partial,
        "bound",
        lambda node: list(enumerate((node.func, *node.args, *node.keywords.values()))),
    ),
)
"""The kind of these classes, and what is in one; what is left is a container, or an object."""


# ---- the walk ----


@dataclass(frozen=True)
class Reach:
    """Which kinds a walk opens, and how many items a container may have."""

    opens: frozenset[Kind]
    roots: frozenset[Kind] = frozenset()
    """Kinds that hold an object as the roots do, wherever they are found themselves."""

    most: float = MOST


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
            kind, inside = _kind_and_inside(node)
        except Exception:
            if not limited:
                raise
            # Of a class of the program's, which can't say what is in it.
            kind, inside = "object", getattr(node, "__dict__", {}).items()
        if kind == "optimizer" and kind not in reach.opens:
            kind = "object"
        if kind in reach.opens and (may_open or kind != "object"):
            opens = kind in reach.roots or (may_open and kind != "object")
            waiting.extend((child, opens) for _, child in inside)


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
