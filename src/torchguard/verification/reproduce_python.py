"""A script that shows with torch alone that Dynamo traces a function wrong."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from torchguard._pytree import flatten, names_in
from torchguard.equivalence.copies import tensors_of
from torchguard.verification.report import GraphRecord
from torchguard.verification.reproduce import (
    FOLDER_VARIABLE,
    MOST_WRITTEN_OUT,
    NoScriptError,
    import_of,
    input_lines,
    temporary_folder,
    write_script,
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
    """Return what can be seen of one run: the result, and the arguments after it."""
    args, kwargs = inputs()
    try:
        return [function(*args, **kwargs), args, kwargs]
    except Exception as error:
        return type(error).__name__


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        kinds = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        return kinds and torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b if isinstance(a, (int, float, str)) else type(a) is type(b)


python, compiled = run({name}), run(torch.compile({name}, backend="eager"))
wrong = not same(python, compiled)
if __name__ == "__main__":
    print(f"Python gives {{python}}\\ncompiled gives {{compiled}}" if wrong else "no difference")
    raise SystemExit(wrong)
'''


def python_reproducer_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], record: GraphRecord
) -> str:
    """Write a script for a function that Dynamo traces wrong with these arguments.

    Returns where it is, which the record keeps too, or why there is none.
    """
    try:
        text = _script(function, args, kwargs, record)
        scope: dict[str, Any] = {"__name__": "reproducer"}
        exec(compile(text, "<reproducer>", "exec"), scope)  # noqa: S102 - does it show anything?
        if not scope["wrong"]:
            return "none: a function that is compiled anew is right, so earlier calls matter"
        folder = Path(os.environ.get(FOLDER_VARIABLE) or temporary_folder())
        folder.mkdir(parents=True, exist_ok=True)
        record.reproducer = write_script(text, folder / f"{function.__name__}.py")
    except NoScriptError as reason:
        return f"none: {reason}"
    except Exception as error:  # noqa: BLE001 - a script that fails must not hide what it is about
        return f"none: writing it raised {type(error).__name__}: {error}"
    return str(record.reproducer)


def _script(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], record: GraphRecord
) -> str:
    if not isinstance(function, FunctionType):
        raise NoScriptError(f"a script has no {type(function).__name__} to call, only functions")
    leaves, _ = flatten((tuple(args), dict(kwargs)))
    if any(isinstance(each, torch.nn.Module) for each in leaves):
        raise NoScriptError("an argument is a module")
    elements = sum(tensor.numel() for tensor in tensors_of(leaves))
    lines = input_lines(leaves, written_out=elements <= MOST_WRITTEN_OUT).splitlines()[:-1]
    tree = _expression((tuple(args), dict(kwargs)), iter(range(len(leaves))))
    sources: dict[str, str] = {}
    _write(function.__name__, function, sources)
    name = "function" if function.__name__ == "<lambda>" else function.__name__
    return _SCRIPT.format(
        version=torch.__version__,
        differences="\n".join(record.differences).replace("\\", "/").replace('"""', "'''"),
        sources="\n\n".join(sources.values()),
        inputs="\n".join([*lines, f"    return {tree}"]),
        name=name,
    )


def _expression(tree: Any, numbers: Any) -> str:
    """Write a tree of arguments whose leaves are ``input_0`` and so on."""
    if type(tree) is dict:
        items = [f"{key!r}: {_expression(each, numbers)}" for key, each in tree.items()]
        return f"{{{', '.join(items)}}}"
    if type(tree) in {tuple, list}:
        items = [f"{_expression(each, numbers)}, " for each in tree]
        return f"({''.join(items)})" if type(tree) is tuple else f"[{''.join(items)}]"
    if flatten(tree)[1] is not None:
        raise NoScriptError(f"an argument is a {type(tree).__name__}")
    return f"input_{next(numbers)}"


def _write(name: str, value: Any, sources: dict[str, str]) -> None:
    """Write what the script calls ``name``, and before it the globals that this needs."""
    if name in sources:
        return
    sources[name] = ""
    if isinstance(value, ModuleType) or getattr(value, "__module__", None) in _LIBRARIES:
        sources[name] = import_of(name, value)
        return
    if not isinstance(value, (FunctionType, type)):
        if _literal(repr(value)) != value:
            raise NoScriptError(f"it uses {name}, which is a {type(value).__name__}")
        sources[name] = f"{name} = {value!r}"
        return
    methods = vars(value).values() if isinstance(value, type) else (value,)
    for method in (each for each in methods if isinstance(each, FunctionType)):
        cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        scope = method.__globals__ | {key: cell.cell_contents for key, cell in cells}
        for needed in (*names_in(method.__code__), *method.__code__.co_freevars):
            if needed in scope and needed not in {"torch", "__class__", name}:
                _write(needed, scope[needed], sources)
    del sources[name]  # behind what it needs
    sources[name] = _source(value)


_LIBRARIES = {"math", "functools", "itertools", "operator", "collections", "dataclasses", "torch"}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return NoScriptError


def _source(value: Any) -> str:
    """Return the source of a function or a class without decorators; a lambda gets a name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, SyntaxError) as error:
        raise NoScriptError(f"the source of {value.__name__} can't be read") from error
    if getattr(value, "__name__", "") == "<lambda>":
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if len(found) != 1:
            raise NoScriptError("it is one of several lambdas on a line")
        return f"function = {ast.unparse(found[0])}"
    node: Any = tree.body[0]
    node.decorator_list = []
    return ast.unparse(node)
