"""Which of its arguments a torch function may write to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from torchguard._torch.replacement import original_of
from torchguard._torch.schemas import STATISTICS, operator_schemas, schemas_of


class Argument(NamedTuple):
    """An argument that a function writes to."""

    position: int
    """Or -1 if it is given by name only."""

    name: str
    is_list: bool | None = None
    """Whether it is a list of tensors; None if both occur."""

    is_out: bool = False
    """Whether it is an output that has a name of its own: ``aten.sort.values(values=...)``."""


class Writes(NamedTuple):
    """What a function writes to in place."""

    arguments: tuple[Argument, ...]
    elements: bool = True
    """False if it changes shape, stride or flags only, as ``squeeze_`` does."""

    only_if: Argument | None = None
    """The flag that makes it write (``training=True``), where there is one."""


# They call a Python function for each element, which may see what is written so far.
_CALL_BACK = frozenset(("apply_", "map_", "map2_"))
DUNDERS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod"),
        *("ipow", "iand", "ior", "ixor", "ilshift", "irshift"),
    )
)

# In-place, but they never touch an element: a failure spoils nothing autograd has saved.
_METADATA_ONLY = frozenset(
    (
        *("resize_", "resize_as_", "resize_as_sparse_", "sparse_resize_", "set_", "as_strided_"),
        *("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"),
        *("detach_", "requires_grad_", "rename_", "share_memory_"),
    )
)


@functools.lru_cache(maxsize=4096)
def writes_of(function: Callable[..., Any]) -> Writes | None:
    """Say what ``function`` writes in place; None if nothing (``out=`` is not asked here)."""
    # An operator's schema says it exactly. A function of torch's Python API follows the naming
    # rule, and its operator's schema says which arguments besides the first.
    function = original_of(function)
    schemas = schemas_of(function)
    name = getattr(function, "__name__", "")
    if name in _CALL_BACK:
        return None
    if schemas is not None:
        return _from_schemas(schemas)
    if name in DUNDERS:
        return Writes((Argument(0, "self"),))
    if not name.endswith("_") or name.endswith("__"):
        return None
    written = Argument(0, _first_parameter(function))
    schemas = [] if isinstance(function, FunctionType) else operator_schemas(name)
    return _from_schemas(schemas) or Writes((written,), name not in _METADATA_ONLY)


def _from_schemas(schemas: list[Any]) -> Writes | None:
    """Read what an operator's overloads write."""
    arguments = {
        Argument(
            -1 if argument.kwarg_only else position,
            argument.name,
            isinstance(argument.type, torch.ListType),
            argument.is_out,
        ): None
        for schema in schemas
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "out"  # out_tensors finds it
    }
    name = schemas[0].name.removeprefix("aten::") if schemas else ""
    if name in STATISTICS:  # what a builtin that normalises writes is missing in its schema
        place, flag = STATISTICS[name]
        written = (Argument(place, "running_mean"), Argument(place + 1, "running_var"))
        only_if = None if flag is None else Argument(place + 2, flag)
        return Writes((*written, *arguments), only_if=only_if)
    if not arguments:
        return None
    return Writes(tuple(arguments), name.rpartition("::")[2] not in _METADATA_ONLY)


def _first_parameter(function: Callable[..., Any]) -> str:
    if not isinstance(function, FunctionType):
        return "self"
    try:
        return next(iter(inspect.signature(function).parameters), "self")
    except ValueError:  # it wraps a builtin: Tensor.__rpow__ of torch 2.6
        return "self"


def written_tensors(
    writes: Writes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield each tensor the call writes to, also those in lists."""
    if writes.only_if is not None and not _value(writes.only_if, args, kwargs):
        return
    seen: set[int] = set()
    for argument in writes.arguments:
        if argument.is_out:
            continue
        value = _value(argument, args, kwargs)
        is_list = isinstance(value, (list, tuple))
        if argument.is_list not in (None, is_list):
            continue  # another overload's argument
        for tensor in value if is_list else (value,):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _value(argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if 0 <= argument.position < len(args):
        return args[argument.position]
    value = kwargs.get(argument.name)
    # What schemas call self is called input by torch.relu_ and the other functions.
    return kwargs.get("input") if value is None and argument.name == "self" else value


def out_tensors(writes: Writes | None, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the outputs a call is given: ``out=``, or outputs with names of their own."""
    names = () if writes is None else tuple(each.name for each in writes.arguments if each.is_out)
    for name in ("out", *names):
        out = kwargs.get(name)
        for item in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(item, torch.Tensor):
                yield item
