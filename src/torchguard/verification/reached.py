"""What a function can reach and change: read by path before and after a run, and restored."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from torchguard._pytree import ATOMS, children, names_in, reachable
from torchguard._torch import base_of, version_of
from torchguard._torch.eager import members_of
from torchguard.equivalence.isolate import storage_address
from torchguard.equivalence.outcome import leaves_behind
from torchguard.state.containers import Containers
from torchguard.state.process import GENERATORS
from torchguard.state.tensors import Gradients, capture
from torchguard.state.training import has_attributes

MISSING: Any = type("nothing", (), {"__repr__": lambda _: "nothing"})()
"""Stands for a value that one run has and the other does not."""

_MOST = 1000
"""A container of more items is taken for data: its length is compared."""

_PLAIN = (*ATOMS, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, list, deque, set)
_OF_MODULES = vars(torch.nn.Module()).keys() - {"training"}
"""The attributes in which every module keeps members and hooks."""


class Reached:
    """What a call can reach: arguments, closure, defaults, and what named globals and modules hold.

    Objects are opened if one of these holds them, not inside other objects; of globals only
    tensors and containers are read.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.arguments = _bound(function, args, kwargs)
        around = reachable(function, self.arguments.values())
        tops = [each for each in around if isinstance(each, torch.nn.Module)]
        self.modules = list({id(m): m for top in tops for m in top.modules()}.values())
        forwards = {type(module).forward for module in self.modules}
        functions = [each for each in (*around, *forwards) if isinstance(each, FunctionType)]
        self.functions = [each for each in functions if not _is_torchs(each)]
        nodes = [(path, node) for path, node, _ in self._walk()]
        self.before = {path: leaf for path, node in nodes for path, leaf in _leaves(path, node)}
        tensors = {id(n): (path, n) for path, n in reversed(nodes) if isinstance(n, torch.Tensor)}
        self.names = [path for path, _ in tensors.values()]
        self.tensors = [tensor for _, tensor in tensors.values()]
        self._versions = {id(each): version_of(each) for each in self.tensors}
        self.problem = next(filter(None, (_problem(path, node) for path, node in nodes)), None)

    def _walk(self) -> Iterator[tuple[str, Any, bool]]:
        return walk(self._roots())

    def _roots(self) -> dict[str, Any]:
        """Return by name what the call holds now; globals may have been set meanwhile."""
        roots = dict(self.arguments)
        for place, function in enumerate(self.functions):
            prefix = f"{function.__name__}." if place else ""
            for name in names_in(function.__code__):
                value = function.__globals__.get(name)
                if isinstance(value, (torch.Tensor, *_CONTAINERS)):
                    roots.setdefault(name, value)
            for name, cell in _cells(function):
                with contextlib.suppress(ValueError):  # it is empty
                    roots.setdefault(prefix + name, cell.cell_contents)
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            roots |= {f"{prefix}default {i}": value for i, value in enumerate(defaults)}
        return roots

    def snapshot(self) -> None:
        """Copy what :meth:`restore` needs, which leaves the elements of tensors out."""
        self.sources, self.behind = self._sources()
        self._histories = {id(each): each.grad_fn for each in self.tensors}
        nodes = [node for _, node, _ in self._walk()]
        roots = [n for n in nodes if isinstance(n, (torch.Tensor, *_CONTAINERS, *GENERATORS))]
        roots += [vars(node) for _, node, opens in self._walk() if opens and _is_object(node)]
        with_history = [each for each in self.tensors if not each.is_leaf]
        self._saved = [capture(each, data=True, autograd=True) for each in with_history]
        self._containers = Containers(roots, skip=with_history, data=False)
        self._gradients = Gradients(self.tensors)
        self._cells = []
        for _, cell in (pair for function in self.functions for pair in _cells(function)):
            with contextlib.suppress(ValueError):
                self._cells.append((cell, cell.cell_contents))
        self._globals = [
            (function.__globals__, name, function.__globals__.get(name, MISSING))
            for function in self.functions
            for name in _globals_set(function.__code__)
        ]

    def restore(self) -> None:
        """Restore everything but the elements of tensors, and the attributes of modules."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for owner, name, value in self._globals:
            if value is not MISSING:
                owner[name] = value
            else:
                owner.pop(name, None)
        self._containers.restore()
        for tensor in self.rebased():
            if base_of(tensor) is None:  # else its history would lead on into that of the run
                tensor.detach_()
        for saved in self._saved:
            saved.restore()
        self._gradients.restore()

    def changes(self, mutated: set[int]) -> dict[str, Any]:
        """Return by path what a run has left otherwise than it was: tensors, numbers, lengths.

        ``mutated`` are the addresses of storages that are known to be written.
        """
        now = {path: leaf for path, node, _ in self._walk() for path, leaf in _leaves(path, node)}
        return {
            path: now.get(path, MISSING)
            for path in {**self.before, **now}
            if self._differs(self.before.get(path, MISSING), now.get(path, MISSING), mutated)
        }

    def _differs(self, before: Any, now: Any, mutated: set[int]) -> bool:
        if not isinstance(now, torch.Tensor):
            return type(before) is not type(now) or before != now
        version = self._versions.get(id(now), MISSING)
        written = version != version_of(now) or storage_address(now) in mutated
        return before is not now or written

    # ---- autograd ----

    def _sources(self) -> tuple[dict[int, Any], set[int]]:
        """Return where gradients arrive, by the tensor's position, and leaves that have to wait.

        A gradient that went on into what was made before the call would free a graph that the
        program needs: it ends at tensors with a history, and leaves behind these are left out.
        """
        pairs = [(i, each) for i, each in enumerate(self.tensors) if each.requires_grad]
        ends = [each for _, each in pairs if not each.is_leaf]
        behind = set(map(id, leaves_behind(ends, ())))
        edge = torch.autograd.graph.get_gradient_edge
        found: dict[int, torch.Tensor | GradientEdge] = {
            i: each if each.is_leaf else edge(each) for i, each in pairs if id(each) not in behind
        }
        return found, behind

    def given(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors among the arguments, by path."""
        pairs = zip(self.names, self.tensors, strict=True)
        return [(path, each) for path, each in pairs if _root(path) in self.arguments]

    def rebased(self) -> list[torch.Tensor]:
        """Return the tensors whose history a run has changed, by a write in place."""
        return [each for each in self.tensors if each.grad_fn is not self._histories[id(each)]]

    def rebased_view(self) -> str | None:
        """Name a view among them: its history can't be restored."""
        written = {id(each) for each in self.rebased() if base_of(each) is not None}
        pairs = zip(self.names, self.tensors, strict=True)
        return next((name for name, each in pairs if id(each) in written), None)


def _root(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the path of each object, the object, and whether its attributes are walked too."""
    seen: set[int] = set()
    waiting = deque((path, node, True) for path, node in roots.items())
    while waiting:
        path, node, opens = waiting.popleft()
        yield path, node, opens
        if type(node) in ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            if node.is_leaf and node.grad is not None:
                waiting.append((f"{path}.grad", node.grad, False))
        elif isinstance(node, torch.nn.Module):
            parts = {key: part for members in members_of(node) for key, part in members.items()}
            parts |= {k: v for k, v in _shared_by(type(node)) if isinstance(v, _CONTAINERS)}
            parts |= {k: v for k, v in vars(node).items() if k not in _OF_MODULES}
            waiting.extend((f"{path}.{name}", part, True) for name, part in parts.items())
        elif (inside := _inside(node)) is not None:
            waiting.extend((f"{path}[{_key(key)}]", part, opens) for key, part in inside)
        elif opens and _is_object(node):
            waiting.extend((f"{path}.{name}", part, False) for name, part in vars(node).items())


def _shared_by(kind: type) -> Iterable[tuple[str, Any]]:
    """Return the attributes of the classes of a module that are not of PyTorch."""
    owners = [each for each in kind.__mro__ if not _is_torchs(each)]
    return [item for each in owners for item in vars(each).items() if item[0][:2] != "__"]


def _inside(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, deque):
        return list(enumerate(node))[:_MOST]
    if isinstance(node, (dict, list, tuple)) and len(node) > _MOST:
        return []
    return None if isinstance(node, type) else children(node)


def _key(key: Any) -> str:
    return repr(key) if type(key) in ATOMS else type(key).__name__


def _is_object(node: Any) -> bool:
    """Whether this is an object of the program's or of a library's, not of Python or PyTorch."""
    package = type(node).__module__.partition(".")[0]
    return has_attributes(node) and package not in (*sys.stdlib_module_names, "torch")


def _leaves(path: str, node: Any) -> list[tuple[str, Any]]:
    """Return what is compared of an object itself: its value, its length, or its class."""
    if isinstance(node, (torch.Tensor, *_PLAIN)):
        return [(path, node)]
    if isinstance(node, (set, frozenset)) and ATOMS.issuperset(map(type, node)):
        return [(path, frozenset(node))]
    if isinstance(node, (*_CONTAINERS, tuple)):
        return [(f"len({path})", len(node))]
    return [(path, type(node).__qualname__)]


def leaves_of(result: Any) -> dict[str, Any]:
    """Return by path what a function has returned."""
    nodes = walk({"result": result})
    return {key: leaf for path, node, _ in nodes for key, leaf in _leaves(path, node)}


def _problem(path: str, node: Any) -> str | None:
    if isinstance(node, torch.optim.Optimizer):
        return f"{path} is an optimizer, whose steps can't be run twice"
    if isinstance(node, Iterator):
        return f"{path} is an iterator, which can't be read twice"
    return None


def _bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, and what the function is bound to."""
    own: dict[str, Any] = {}
    called: Any = function
    if isinstance(function, torch.nn.Module):
        called, own["self"] = function.forward, function
    elif isinstance(function, MethodType):
        own["self"] = function.__self__
    try:
        return own | dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return own | {f"argument {i}": each for i, each in enumerate(args)} | dict(kwargs)


def _cells(function: FunctionType) -> Iterable[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _globals_set(code: CodeType) -> set[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname.endswith("E_GLOBAL")}
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return found.union(*map(_globals_set, nested))


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in {"torch", "torchguard", "builtins"}
