"""A script that shows with torch alone that Dynamo traces a function wrong."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from torchguard._pytree import names_in
from torchguard.equivalence.copies import tensors_of
from torchguard.verification.report import GraphRecord
from torchguard.verification.reproduce import (
    MOST_WRITTEN_OUT,
    NoScriptError,
    import_of,
    input_lines,
    saved,
)

_SCRIPT = '''"""torch.compile traces this function wrong. torch {version}.

{differences}
"""

import torch
from torch import device, inf, nan

{sources}


def inputs():
    torch.manual_seed(0)
{inputs}


def run(function):
    """Return the result and the arguments after it; None if it raises."""
    *args, kwargs = inputs()
    try:
        return [function(*args, **kwargs), args, kwargs]
    except Exception:
        return None


wrong = "no difference"
try:
    compiled = run(torch.compile({name}, backend="eager"))
    torch.testing.assert_close(compiled, run({name}), rtol=1e-4, atol=1e-4, equal_nan=True)
except AssertionError as error:
    wrong = f"compiled gives something else than Python: {{error}}"
if __name__ == "__main__":
    print(wrong)
    raise SystemExit(wrong != "no difference")
'''


def python_reproducer_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], record: GraphRecord
) -> str:
    """Write a script for a function that Dynamo traces wrong with these arguments.

    Returns where it is, which the record keeps too, or why there is none.
    """

    def make_text() -> str:
        text = _script(function, args, kwargs, record)
        scope: dict[str, Any] = {"__name__": "reproducer"}
        exec(compile(text, "<reproducer>", "exec"), scope)  # noqa: S102 - does it show anything?
        if scope["wrong"] == "no difference":
            raise NoScriptError(
                "a function that is compiled anew is right, so earlier calls matter"
            )
        return text

    return saved(make_text, getattr(function, "__name__", "function"), record)


def _script(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], record: GraphRecord
) -> str:
    given = [*args, *kwargs.values()]
    for each in given:
        if not isinstance(each, torch.Tensor) and not _is_literal(each):
            raise NoScriptError(f"an argument is a {type(each).__name__}")
    elements = sum(tensor.numel() for tensor in tensors_of(given))
    inputs = input_lines([*given], written_out=elements <= MOST_WRITTEN_OUT).splitlines()[:-1]
    names = [f"input_{place}" for place in range(len(given))]
    keywords = zip(kwargs, names[len(args) :], strict=True)
    by_name = ", ".join(f"{key!r}: {name}" for key, name in keywords)
    inputs.append(f"    return [{', '.join([*names[: len(args)], f'{{{by_name}}}'])}]")
    sources: dict[str, str] = {}
    _write(function, sources)
    return _SCRIPT.format(
        version=torch.__version__,
        differences="\n".join(record.differences).replace("\\", "/").replace('"""', "'''"),
        sources="\n\n\n".join(sources.values()),
        inputs="\n".join(inputs),
        name=function.__name__,
    )


def _write(function: Any, sources: dict[str, str]) -> None:
    """Write a function of a module, without decorators, behind the globals that it needs."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if not isinstance(function, FunctionType) or not name.isidentifier():
        raise NoScriptError(f"{name} is not a function of a module")
    sources[name] = ""
    for needed in names_in(function.__code__):
        value = function.__globals__.get(needed, torch)
        if needed in sources or value is torch:
            continue
        if isinstance(value, ModuleType):
            sources[needed] = import_of(needed, value)
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            _write(value, sources)
        elif _is_literal(value):
            sources[needed] = f"{needed} = {value!r}"
        else:
            raise NoScriptError(f"it uses {needed}, which is a {type(value).__name__}")
    del sources[name]
    node: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    node.decorator_list = []
    sources[name] = ast.unparse(node)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
