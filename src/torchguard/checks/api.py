"""The guard "checks": what it replaces in torch and in Dynamo, and when it reports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchguard._torch import (
    C_NAMESPACE,
    CALL_USER_COMPILER,
    CALLBACK_OF_CALL,
    DYNAMO,
    compiling_as,
    computing_unseen,
    original_of,
    patch,
    values_can_be_read,
)
from torchguard.checks import calls
from torchguard.checks.calls import SWITCH, flags, guard_call, guard_reading
from torchguard.checks.graph_pass import checks_in_graph
from torchguard.checks.table import INDEXING, ROWS

_READING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")
_SPARSE = ("csr", "csc", "bsr", "bsc", "compressed")


@functools.cache
def replacements() -> patch.Replacements:
    """Return what ``install("checks")`` patches in torch."""
    found: dict[str, patch.Make | property] = {}
    for row in ROWS:
        for each in row.names:
            kind, _, name = each.rpartition(".")
            for module in (torch,) if not kind else (C_NAMESPACE, torch.nn.functional):
                if inspect.isbuiltin(original_of(vars(module).get(name))):
                    make = functools.partial(guard_call, row, name)
                    found[f"{module.__name__}.{name}"] = make
            for method in (name, f"{name}_") if not kind else ():
                found[f"torch.Tensor.{method}"] = functools.partial(guard_call, row, method)
    for name, row in INDEXING.items():
        if not name.startswith("__"):
            found[f"torch.{name}"] = functools.partial(guard_call, row, name)
        found[f"torch.Tensor.{name}"] = functools.partial(guard_call, row, name)
    found |= {f"torch.sparse_{name}_tensor": _check_indices for name in _SPARSE}
    found |= {f"torch.Tensor.{name}": functools.partial(guard_reading, name) for name in _READING}
    return found


def _check_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse sparse tensors with indices out of range, which torch's kernels trust."""

    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if SWITCH.on:
            with computing_unseen((result,)):
                _check_compressed(original.__name__, result)
        return result

    return function


def _check_compressed(function: str, result: torch.Tensor) -> None:
    rows = result.layout in {torch.sparse_csr, torch.sparse_bsr}
    name, dim = ("col_indices", 1) if rows else ("row_indices", 0)
    plain = result.col_indices() if rows else result.row_indices()
    pointers = result.crow_indices() if rows else result.ccol_indices()
    if not values_can_be_read(plain):
        return
    size = result.size(plain.dim() - 1 + dim)  # the dims of a batch come first
    if result.layout in {torch.sparse_bsr, torch.sparse_bsc}:
        size //= result.values().size(plain.dim() + dim)
    for argument, values, high in (
        (name, plain, size - 1),
        ("pointers", pointers, plain.size(-1)),
        ("steps of the pointers", pointers.diff(), plain.size(-1)),
    ):
        site = calls.Site(function, argument, "index", 0, high)
        calls.checked_value(site, values.cpu())


# ---- compiled code ----


def _other_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with checks apart from what is compiled without: the backend is part of the key."""

    def _callback_from_stance(callback: Any) -> Any:
        found = original(callback)
        return compiling_as(found, "checks") if SWITCH.on and callable(found) else found

    return _callback_from_stance


def _with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        if not SWITCH.on or getattr(self, "export", False):
            return original(self, gm, *args, **kwargs)
        return checks_in_graph(lambda graph: original(self, graph, *args, **kwargs), gm)

    return call_user_compiler


IN_MODULES: Mapping[str, patch.Replacements] = {
    DYNAMO: {CALLBACK_OF_CALL: _other_key, CALL_USER_COMPILER: _with_checks}
}


# ---- when it reports ----

_hooks: list[Any] = []


def changed() -> None:
    """Let ``optimizer.step()`` read what devices have seen, as long as the guard is in place."""
    in_place = bool(patch.paths_of("checks"))
    if in_place and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    elif _hooks and not in_place:
        _hooks.pop().remove()


def _before_step(*_: object) -> None:
    if SWITCH.on:
        flags.read()


def ended(*, failed: bool) -> None:
    """Raise what was seen and not reported yet; after an exception nothing is left to report."""
    if not failed:
        flags.read()
    elif SWITCH.on <= 1:
        flags.take()
