"""Programs that Dynamo traces as something else than they are; the compiler is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import wrapt
from torch import Tensor

from torchguard import verified
from torchguard.defects.probes import compile_defect, issues

_Compile = Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]


def _compiled(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return torch.compile(function, backend="eager")


def _compared(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Compile, and compare every call with plain Python; the warning is not the point here."""
    checked = verified(function, backend="eager", against="python", every=1)

    def call(x: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checked(x)

    return call


_mistraced = partial(compile_defect, guards=("verified_python",), guarded_with=_compared)


@_mistraced(
    "compiled: torch.Tensor(x.size()) holds the sizes as data",
    title="torch.Tensor(x.size()) holds the sizes as data",
    upstream=issues(196467),
    advice="Write torch.empty(x.size()).",
)
def dynamo_tensor_of_size(compile_: _Compile = _compiled) -> str | None:
    """Make a tensor of a size: Dynamo writes a tuple into the graph, which is taken for data."""
    x = torch.ones(2, 3)
    eager, compiled = torch.Tensor(x.size()), compile_(lambda x: torch.Tensor(x.size()))(x)
    if compiled.shape == eager.shape:
        return None
    return f"compiled has the shape {tuple(compiled.shape)}, eager {tuple(eager.shape)}"


@_mistraced(
    "compiled: a number in a class that has changed since is still the old one",
    title="a changed class attribute keeps its old value",
    upstream=issues(176851),
    advice="Keep the number in a module or an instance, or pass it as an argument.",
    limits="Closed in calls that are compared: every=1 compares each, every=1000 one of 1000.",
)
def dynamo_stale_global(compile_: _Compile = _compiled) -> str | None:
    """Change a class attribute between two calls: Dynamo has made no guard for it."""

    class Settings:
        factor = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * Settings.factor

    call, x = compile_(scaled), torch.ones(1)
    call(x)
    Settings.factor = 10.0
    compiled, eager = call(x).item(), scaled(x).item()
    return None if compiled == eager else f"compiled gives {compiled}, eager gives {eager}"


@_mistraced(
    "compiled: an append to a list that a class holds is lost",
    title="an append to a list is lost",
    upstream=issues(169253),
    advice="Return the value and append it outside the compiled function.",
)
def dynamo_lost_append(compile_: _Compile = _compiled) -> str | None:
    """Append to a list in a class: Dynamo traces the append and does not write it back."""

    class Log:
        lines: list[int] = []  # noqa: RUF012 - shared by every instance on purpose

    def logged(x: Tensor) -> Tensor:
        Log.lines.append(1)
        return x + 1

    call, x = compile_(logged), torch.ones(1)
    for _ in range(2):
        call(x)
    found = len(Log.lines)
    return None if found == 2 else f"2 calls have appended {found} times"  # noqa: PLR2004


@_mistraced(
    "compiled: a decorator made with wrapt is left out, and the function alone is called",
    title="a decorator made with wrapt does nothing",
    upstream=(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/builder.py#L1748",
    ),
    advice="Write the decorator as a function, with functools.wraps.",
)
def wrapper_dropped(compile_: _Compile = _compiled) -> str | None:
    """Multiply what a function returns by ten: Dynamo traces what the decorator is put around."""

    @wrapt.decorator
    def times_ten(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return 10 * wrapped(*args, **kwargs)

    @times_ten
    def double(x: Tensor) -> Tensor:
        return 2 * x

    def program(x: Tensor) -> Tensor:
        result: Tensor = double(x)
        return result

    x = torch.ones(1)
    eager, compiled = program(x).item(), compile_(program)(x).item()
    return None if compiled == eager else f"compiled gives {compiled}, eager gives {eager}"
