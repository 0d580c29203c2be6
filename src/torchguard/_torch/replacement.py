"""What stands in torch in place of a function: equal to it, and calls something else.

Programs and torch itself keep tables of functions: handlers of ``__torch_function__``, rules of
Dynamo, patterns of inductor. A proxy of wrapt is equal to its original and has its hash, class,
name and signature, so each such table finds either one by the other, whenever it was filled.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import wrapt

from torchguard._torch.schemas import private

_made: list[Replacement] = []
"""All of them, for good: tables know them by id, which Python gives to another object later."""

_dynamo_knows: list[bool] = []
"""Empty until Dynamo is imported and knows them."""


class Replacement(wrapt.CallableObjectProxy):  # type: ignore[type-arg]  # not in wrapt 1
    """A proxy of an original; :func:`replacement_of` makes a class for each."""

    __slots__ = ()
    _self_path: str

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # By its name: a process without torchguard loads torch's own.
        return pkgutil.resolve_name, (self._self_path,)

    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: object) -> Replacement:
        return self

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


# Not the text: help() shows none that an object shares with its class.
_DOCUMENTATION = property(lambda self: self.__wrapped__.__doc__)


def replacement_of(original: Any, call: Callable[..., Any], path: str) -> Replacement:
    """Return what is put at a path: all that can be seen of it is the original's, but ``call``."""
    bind = MethodType

    def __get__(self: Replacement, instance: object, _: object = None) -> Any:  # noqa: N807
        return self if instance is None else bind(call, instance)

    # A class for each, whose slots lead straight to the closure. FunctionWrapper, one class for
    # all, needs a second frame of Python: +20 % for torch.add(), five times resize_().
    owner = path.rpartition(".")[0]
    members: dict[str, Any] = {
        "__slots__": (),
        "__call__": staticmethod(call),
        "__doc__": _DOCUMENTATION,
        # Of the class, and so of what is in its place: cloudpickle looks for a function there.
        "__module__": owner if owner in sys.modules else owner.rpartition(".")[0],
        "_self_path": path,
    }
    if hasattr(type(original), "__get__"):  # a builtin is not bound, wherever it stands
        members["__get__"] = __get__
        functools.update_wrapper(call, original)  # a bound method shows it
    made: Replacement = type(type(original).__name__, (Replacement,), members)(original)
    _made.append(made)
    _follow_in_torchscript(made)
    if _dynamo_knows:
        _follow_in_dynamo(made)
    return made


def original_of(function: Any) -> Any:
    """Return the original of a replacement of ours or of a layer, and any other function itself."""
    if isinstance(function, Replacement):
        return function.__wrapped__
    return getattr(function, "_torchguard_original", function)


def remember_original(layer: Callable[..., Any], original: Any) -> None:
    """Let :func:`original_of` find what a layer, which the next guard is put around, is made of."""
    layer._torchguard_original = original  # type: ignore[attr-defined]


def _follow_in_torchscript(made: Replacement) -> None:
    """Let ``torch.jit.script`` compile the builtin behind a replacement."""
    builtins: dict[int, str] = private("jit._builtins._get_builtin_table", dict)()
    name = builtins.get(id(made.__wrapped__))
    if name is not None:
        builtins[id(made)] = name


def follow_in_dynamo() -> None:
    """Let Dynamo, which is imported, trace originals; its graphs would hold replacements."""
    if not _dynamo_knows:
        _dynamo_knows.append(True)
        for made in _made:
            _follow_in_dynamo(made)


def _follow_in_dynamo(made: Replacement) -> None:
    # As torch.compiler.substitute_in_graph does it:
    # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/decorators.py
    builders = sys.modules.get("torch._dynamo.variables.builder")
    builder: Any = getattr(builders, "VariableBuilder", None)
    table: dict[int, Any] = getattr(builder, "_id_dispatch", dict)()
    table[id(made)] = lambda building, value: building._wrap(value.__wrapped__)
