"""What a function is made of, as hashes that are equal in every process and change with it.

A proof of the padding is saved in a file, so the file has to say of which function. The graph
that Dynamo makes would say it, but it exists only after compiling, not at all without
``compile=``, and leaves out what runs between two graphs. So the source of the answer is hashed,
without running anything: the bytecode of every function that can be reached, the values it
reads, the structure of modules. What is not certain counts as a change: a change that is none
costs a check, one that is missed would trust a proof of another function.

Values of weights do not count, as they do not within one process, but for one thing: a tensor
whose elements are all equal (a bias of zeros, a LoRA matrix before training) can hide that
padding leaks, so whether it is one, and of what value, is part of the fingerprint.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import logging
import os
import pathlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

Parts: TypeAlias = dict[str, str]
"""For each function, class, module and object a hash of what it is made of, by a name for it."""

_MOST = 50_000
"""So many values are looked at; a function that reaches more is not worth the time."""
_PASSES = 12
_LARGEST_ARRAY = 1 << 20  # bytes
_SHORT = 16

_PACKAGES = frozenset({"torch", "torchguard", "numpy", "wrapt", "typing_extensions"})
"""Identified by their versions, as Python itself is."""
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent

_OPERATORS = frozenset({"aten", "prims", "prim", "quantized", "mkldnn", "_c10d_functional"})
"""Namespaces of operators that are part of torch."""

# These are only a way to something else, or hold nothing that could change an answer.
_STATELESS: tuple[type, ...] = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, weakref.ReferenceType, torch.Generator,
    type(threading.Lock()), type(threading.RLock()), logging.Logger,
)  # fmt: skip
_BY_REPR: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented),
    range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    re.Pattern, pathlib.PurePath, np.generic, np.dtype, types.GenericAlias, types.UnionType,
)  # fmt: skip

_PLAIN = (bytes, str, complex, float, int)

_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "eval", "exec", "globals", "__getattribute__"})
"""With one of these a function can read attributes that its bytecode does not name."""
_OF_A_CLASS = frozenset(
    {"__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__",
     "__firstlineno__", "__static_attributes__", "__parameters__", "__abstractmethods__",
     "__dataclass_params__", "__dataclass_fields__", "__match_args__", "__annotations_cache__",
     "__annotate__", "__annotate_func__", "__orig_bases__", "_abc_impl"}
)  # fmt: skip
_OF_A_MODULE = frozenset(vars(torch.nn.Module()))
_NOT_READ = frozenset({"_trainer", "_fabric", "_original_object_hash"})
"""Lightning's way from a module to the loop that trains it; of transformers, a hash of texts,
which Python makes another one in each process."""
_HOOKS = tuple(sorted(name for name in _OF_A_MODULE if name.endswith("_hooks")))


class UnknownValue(Exception):  # noqa: N818 - an answer, not an error
    """A function can reach a value that has no fingerprint, so it has none either."""


def fingerprint(roots: Mapping[str, Any], settings: Mapping[str, Any]) -> Parts:
    """Return the fingerprint of a function and its arguments: a hash for each part.

    Args:
        roots: the function that runs, and the objects it is given, by a name for each.
        settings: further values, such as options.

    Raises:
        UnknownValue: they have none.
    """
    names: set[str] = set()
    constant: dict[int, str] = {}
    for _ in range(_PASSES):
        # An attribute counts where some function reads one of its name; which functions there are
        # is known at the end only, so this is repeated until no further name is found.
        walk = _Walk(set(names), constant)
        try:
            for space in (torch, torch.Tensor, torch.nn.functional):
                walk.parts[f"functions put into {_name(space)}"] = _hashed(walk.replaced(space))
            for name, root in (*roots.items(), *settings.items()):
                described = walk.describe(root, name)
                walk.parts.setdefault(name, _hashed(described))  # a module has its own under it
        except UnknownValue:
            raise
        except Exception as error:  # an object whose own methods raise, a file that is gone
            raise UnknownValue(f"{type(error).__name__}: {error}") from error
        if walk.found <= names:
            return walk.parts
        names |= walk.found
    raise UnknownValue("what it can reach goes on without an end")


class _Walk:
    """Goes through all that functions can reach, and hashes each of them by itself."""

    def __init__(self, names: set[str], constant: dict[int, str]) -> None:
        self.parts: Parts = {}
        self.found: set[str] = set()
        self._names = names  # attributes that some function reads
        self._everything = not _DYNAMIC.isdisjoint(names)
        self._constant = constant  # what is known of tensors already, by id
        self._labels: dict[int, str] = {}
        self._spaces: dict[int, str] = {}
        self._alive: list[Any] = []  # so that no id is given twice
        self._left = _MOST

    # ---- values ----

    def describe(self, value: Any, where: str) -> str:  # noqa: C901, PLR0911, PLR0912 - one case each
        """Return a text for a value; what has a name of its own gets a part of its own."""
        self._left -= 1
        if self._left < 0:
            raise UnknownValue(f"it can reach more than {_MOST:,} values, the last in {where}")
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name} {self.describe(value.value, where)}"
        if isinstance(value, _BY_REPR) and _is_foundation(type(value)):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.nn.Module):
            return self._node(value, where, self._module)
        if isinstance(value, types.FunctionType):
            return self._node(value, f"function {_name(value)}", self._function)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            owner = self.describe(value.__self__, f"{where}.__self__")
            return f"method {self.describe(value.__func__, where)} of {owner}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self.describe(value.__func__, where)}"
        if isinstance(value, property):
            return self._all([value.fget], where)
        if isinstance(value, functools.cached_property):
            return self.describe(value.func, where)
        if isinstance(value, functools.partial):
            return self._all([value.func, value.args, value.keywords], where)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"  # what is read of it is in _globals
        if isinstance(value, types.CodeType):
            return self._code(value, where)
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY:
            held = self._all(value.flat, where) if value.dtype.hasobject else value.tobytes().hex()
            return f"array {value.dtype} {value.shape} {_hashed(held)}"
        return self._container(value, where)

    def _container(self, value: Any, where: str) -> str:
        kind = type(value)
        if isinstance(value, _STATELESS):
            name = getattr(value, "__qualname__", getattr(value, "name", ""))
            owner = getattr(value, "__self__", None)  # of table.get
            if isinstance(owner, (types.ModuleType, type, type(None))):
                return f"{_name(kind)} {name}"
            return f"{_name(kind)} {name} of {self.describe(owner, where)}"
        if isinstance(value, (dict, types.MappingProxyType)):
            items = [
                f"{self.describe(key, where)}: {self.describe(each, _at(where, key))}"
                for key, each in value.items()
            ]
            held = f"{{{', '.join(items)}}}"
        elif isinstance(value, (set, frozenset)):
            held = f"{{{', '.join(sorted(self.describe(each, where) for each in value))}}}"
        elif isinstance(value, (list, tuple, collections.deque)):
            held = self._all(value, where)
        elif isinstance(value, _PLAIN):  # of a class of the user's own
            held = next(base for base in _PLAIN if isinstance(value, base)).__repr__(value)
        else:
            return self._node(value, where, self._object)
        if kind.__module__ == "builtins":
            return f"{kind.__name__} {held}"
        own = self._class(kind)
        return f"{own} {held} {self.describe(dict(getattr(value, '__dict__', {})), where)}"

    def _all(self, values: Iterable[Any], where: str) -> str:
        described = [self.describe(each, f"{where}[{i}]") for i, each in enumerate(values)]
        return f"[{', '.join(described)}]"

    def _tensor(self, tensor: torch.Tensor) -> str:
        known = self._constant.get(id(tensor))
        if known is None:
            known = self._constant[id(tensor)] = _constant_value(tensor)
        kind = (type(tensor).__name__, tuple(tensor.shape), tensor.dtype, tensor.device.type)
        return f"tensor {kind} {tensor.requires_grad} {known}"

    def _node(self, value: Any, label: str, contents: Any) -> str:
        """Return the name of a part; describe it where it is reached for the first time."""
        found = self._labels.get(id(value))
        if found is None:
            found, count = label, 2
            while found in self.parts:
                found, count = f"{label} ({count})", count + 1
            self._labels[id(value)] = found
            self._alive.append(value)
            self.parts[found] = ""  # it may reach itself
            self.parts[found] = _hashed(contents(value, found))
        return f"<{found}>"

    # ---- functions ----

    def _function(self, function: types.FunctionType, where: str) -> str:
        code, home = function.__code__, _home(function)
        known = _is_foundation(function) or _is_installed(home)
        if known:
            # What torch.compiler.disable and the like have wrapped is the user's own.
            inner = getattr(function, "_torchdynamo_orig_callable", None)
            if inner is not None:
                return f"{_name(function)} {self.describe(inner, where)}"
            described = [_name(function)]
            if not _is_foundation(function):
                described += [_file_of(home), self.replaced(sys.modules[home])]
        else:
            defaults = [function.__defaults__, function.__kwdefaults__]
            described = [self._code(code, where), self._all(defaults, f"default of {where}")]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # still empty
                continue
            described.append(f"{name}: {self.describe(held, f'{name} in {where}')}")
        if known:
            return " ".join(described)
        described += self._globals(function.__globals__, _all_codes(code))
        # What wraps() has put there is not called through it, so only plain attributes count.
        attributes = {
            k: v for k, v in vars(function).items() if k in self._names and k != "__wrapped__"
        }
        return " ".join([*described, self.describe(attributes, where)])

    def _code(self, code: types.CodeType, where: str) -> str:
        """Describe bytecode and constants, without the lines and the file they come from."""
        self.found.update(code.co_names)
        self.found.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        constants = self._all(code.co_consts, where)
        table = getattr(code, "co_exceptiontable", b"")
        return (
            f"{code.co_code.hex()} {table.hex()} {constants} {code.co_names} {code.co_varnames} "
            f"{code.co_freevars} {code.co_cellvars} {code.co_flags} {code.co_argcount} "
            f"{code.co_kwonlyargcount} {code.co_posonlyargcount}"
        )

    def _globals(self, space: Mapping[str, Any], codes: list[types.CodeType]) -> list[str]:
        """Describe the globals that bytecode reads, and what it reads of the modules among them."""
        read = {name for code in codes for name in code.co_names}
        written = {name for code in codes for name in _written(code)}
        described = []
        for name in sorted(read & space.keys()):
            value = space[name]
            if isinstance(value, types.ModuleType):
                described += self._of_a_module(value, read, name, set())
            elif name not in written:  # else a counter of the function's own
                described.append(f"{name}: {self.describe(value, f'global {name}')}")
        return described

    def _of_a_module(
        self, module: types.ModuleType, names: set[str], path: str, seen: set[int]
    ) -> list[str]:
        """Describe what is read of a module of Python: ``F.gelu`` may be another one by now."""
        if id(module) in seen:
            return []
        seen.add(id(module))
        described = []
        for name in sorted(names & vars(module).keys()):
            value, inner = vars(module)[name], f"{path}.{name}"
            if module is os and name in ("environ", "getenv"):
                read = {key: each for key, each in os.environ.items() if key in self._names}
                described.append(f"{inner}: {self.describe(read, inner)}")
            elif isinstance(value, types.ModuleType):
                if module is torch.ops and name not in _OPERATORS:
                    raise UnknownValue(f"{inner} is an operator of another package")
                described += self._of_a_module(value, names, inner, seen)
            elif callable(value) or isinstance(value, _BY_REPR) or not _is_foundation(module):
                described.append(f"{inner}: {self.describe(value, inner)}")
        return described

    # ---- classes, objects, modules ----

    def _class(self, kind: type) -> str:
        if _is_foundation(kind):
            replaced = self.replaced(kind) if issubclass(kind, torch.nn.Module) else ""
            return f"{_name(kind)} {replaced}"
        return self._node(kind, f"class {_name(kind)}", self._members)

    def _members(self, kind: type, where: str) -> str:
        if _is_installed(_home(kind)):
            return f"{_file_of(_home(kind))} {self.replaced(kind)}"
        described = [self.describe(base, where) for base in kind.__bases__]
        # torch calls forward() without naming it, so with a base of torch everything counts.
        every = self._everything or not _is_plain(kind, {object})
        for name, value in sorted(vars(kind).items()):
            used = every or name in self._names or name.startswith("__")
            if used and name not in _OF_A_CLASS:
                described.append(f"{name}: {self.describe(value, f'{where}.{name}')}")
        return " ".join(described)

    def replaced(self, space: Any) -> str:
        """Describe the functions of other packages in a class or module that is not looked into.

        ``functional.scaled_dot_product_attention = mine`` changes what torch's own modules and
        those of installed packages compute.
        """
        known = self._spaces.get(id(space))
        if known is None:
            self._alive.append(space)
            self._spaces[id(space)] = ""  # it may reach itself
            described = []
            for each in space.__mro__ if isinstance(space, type) else (space,):
                home = each.__name__ if isinstance(each, types.ModuleType) else _home(each)
                described += [
                    f"{each.__name__}.{name}: {self.describe(value, f'{each.__name__}.{name}')}"
                    for name, value in sorted(vars(each).items(), key=lambda item: str(item[0]))
                    if isinstance(value, types.FunctionType) and _is_foreign(value, home)
                ]
            known = self._spaces[id(space)] = " ".join(described)
        return known

    def _object(self, value: Any, where: str) -> str:
        kind = type(value)
        state = _state_of(value)
        if state is None:
            raise UnknownValue(f"{where} is of type {_name(kind)}")
        return f"{self._class(kind)} {self._attributes(kind, state, where)}"

    def _attributes(self, kind: type, state: Mapping[str, Any], where: str) -> str:
        # A class of torch or of an installed package is not looked into, so all that it may
        # read counts; of the user's own what some function names.
        every = self._everything or not _is_plain(kind, {object, torch.nn.Module})
        every = every or dataclasses.is_dataclass(kind)
        return " ".join(
            f"{name}: {self.describe(each, f'{where}.{name}')}"
            for name, each in sorted(state.items(), key=lambda item: str(item[0]))
            if (every or name in self._names or callable(each)) and name not in _NOT_READ
        )

    def _module(self, module: torch.nn.Module, where: str) -> str:
        state = {n: v for n, v in vars(module).items() if n not in _OF_A_MODULE}
        described = [self._class(type(module)), self._attributes(type(module), state, where)]
        described.append(f"training: {module.training}")
        for name in _HOOKS:  # by numbers that count up in the whole process
            hooks = list((vars(module).get(name) or {}).values())
            described.append(f"{name}: {self._all(hooks, f'{name} of {where}')}")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            described.append(f"{name}: {self.describe(tensor, where)}")
        for name, child in module._modules.items():
            described.append(f"{name}: {self.describe(child, f'{where}.{name}')}")
        return " ".join(described)


_READABLE = (torch.Tensor, torch.nn.Parameter)


def _constant_value(tensor: torch.Tensor) -> str:
    """Return the value that all elements have, empty where they differ or can't be read."""
    readable = type(tensor) in _READABLE and tensor.layout is torch.strided
    if not readable or tensor.device.type == "meta" or not tensor.numel():
        return ""  # to read one element of a DTensor is a collective
    plain = tensor.detach()
    first, last = plain[(0,) * plain.dim()], plain[(-1,) * plain.dim()]
    try:
        if not bool(first == last) or not bool((plain == first).all()):
            return ""
    except (RuntimeError, TypeError, NotImplementedError):  # a dtype that can't be compared
        return ""
    # One element is always equal to itself: a counter of batches, a temperature that is learnt.
    return f"all {bool(first != 0)}" if tensor.numel() == 1 else f"all {first.item()!r}"


def _state_of(value: Any) -> Mapping[str, Any] | None:
    """Return the attributes of an object; None where it holds something that they don't show."""
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    kind = type(value)
    declared = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    slots = [
        name
        for names in declared
        for name in ((names,) if isinstance(names, str) else names)
        if name not in ("__dict__", "__weakref__")
    ]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if hasattr(value, "__dict__"):
        return {**state, **vars(value)}
    # An object of C has neither, and its state is its own.
    return state if slots or not _is_foundation(kind) else None


def _all_codes(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found += _all_codes(each)
    return found


def _written(code: types.CodeType) -> list[str]:
    """Return the globals that bytecode assigns."""
    if dis.opmap["STORE_GLOBAL"] not in code.co_code[::2]:
        return []
    return [i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"]


def _home(value: Any) -> str:
    """Return the name of the module of Python that something was defined in."""
    if isinstance(value, types.FunctionType):
        # Its __module__ may be that of another function: functools.wraps copies it.
        return str(value.__globals__.get("__name__", ""))
    return getattr(value, "__module__", None) or ""


def _is_foundation(value: Any) -> bool:
    """Whether it is part of Python, torch or numpy, whose versions are known."""
    return _is_module_of_foundation(
        value.__name__ if isinstance(value, types.ModuleType) else _home(value)
    )


@functools.cache
def _is_module_of_foundation(name: str) -> bool:
    top = name.partition(".")[0]
    if top in _PACKAGES:
        return True
    if top not in sys.stdlib_module_names:
        return False
    # The user may have a code.py, too.
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _STANDARD_LIBRARY in Path(file).resolve().parents


def _is_foreign(function: types.FunctionType, home: str) -> bool:
    """Whether a function is not of the package that it lies in."""
    own = _home(function)
    if _is_module_of_foundation(own) and _is_module_of_foundation(home):
        return False
    return own.partition(".")[0] != home.partition(".")[0]


def _is_plain(kind: type, plain: set[type]) -> bool:
    """Whether all classes that it is made of are the user's own, or among these."""
    return all(
        each in plain or not (_is_foundation(each) or _is_installed(_home(each)))
        for each in kind.__mro__
    )


@functools.cache
def _is_installed(home: str) -> bool:
    """Whether a module is part of a package that was installed, not of the user's program."""
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@functools.cache
def _hash_of_file(file: str) -> str:
    return _hashed(Path(file).read_bytes())


def _file_of(home: str) -> str:
    """Return the version of an installed package, and a hash of the file of its module."""
    package = sys.modules.get(home.partition(".")[0])
    return f"{getattr(package, '__version__', '')} {_hash_of_file(str(sys.modules[home].__file__))}"


def _name(value: Any) -> str:
    return f"{_home(value)}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _at(where: str, key: Any) -> str:
    return f"{where}[{key!r}]" if isinstance(key, (str, int)) else where


def _hashed(content: str | bytes) -> str:
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:_SHORT]
