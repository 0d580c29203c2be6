"""A script that reproduces with torch alone what a compiled graph does wrong."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchguard._torch import is_static_address
from torchguard.equivalence.copies import bytes_of, tensors_of
from torchguard.verification.backend import Inner
from torchguard.verification.graph import graphs_in, numbers_in, owned_tensors
from torchguard.verification.report import GraphRecord

FOLDER_VARIABLE = "TORCHGUARD_REPRODUCERS"
"""Names the folder for the scripts; without it they go to a temporary one."""

_MOST_WRITTEN_OUT = 8000  # bytes of inputs that may stand in a script as numbers

_SCRIPT = '''"""torch.compile and eager differ here. torch {version}.

{differences}
"""

import torch
from torch import device, inf, nan
from torch.utils._pytree import tree_leaves

NoneType = type(None)
{source}


def inputs():
    torch.manual_seed(0)
{inputs}
'''

_COMPARISON = '''

def seen(function):
    """Return what can be seen of one run: tensors, and which of them share memory."""
    values = inputs()
    numbered = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    leaves = [(i, v) for i, v in numbered if v.requires_grad]
    outputs = tree_leaves(function(*values))
    outputs = [torch.tensor(v) if isinstance(v, (int, float)) else v for v in outputs]
    tensors = {{f"output {{i}}": v for i, v in enumerate(outputs)}}
    tensors |= {{f"input {{i}} after the call": v for i, v in numbered}}
    tensors = {{k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}}
    address = {{k: v.untyped_storage().data_ptr() for k, v in tensors.items() if v.numel()}}
    shared = {{(a, b) for a in address for b in address if a < b and address[a] == address[b]}}
    ends = [v for v in tensors.values() if v.grad_fn is not None]
    if ends and leaves:
        torch.manual_seed(1)
        sent = [torch.randn(v.shape, dtype=torch.float64).to(v) for v in ends]
        gradients = torch.autograd.grad(ends, [v for _, v in leaves], sent, allow_unused=True)
        pairs = zip(leaves, gradients)
        tensors |= {{f"gradient of input {{i}}": g for (i, _), g in pairs if g is not None}}
    tensors["number of outputs"] = torch.tensor(len(outputs))
    return {{k: v.detach() for k, v in tensors.items()}}, shared


errors = []


def run(function):
    try:
        return seen(function)
    except Exception as error:
        errors.append(error)
        return {{}}, set()


with torch.{grad_mode}():
    eager, eager_shared = run(graph)
    compiled, compiled_shared = run(torch.compile(graph{arguments}))
if len(errors) == 2:
    raise errors[0]  # neither runs here
wrong = [f"one of the two raises {{error!r}}" for error in errors]
if errors:
    eager, eager_shared, compiled_shared = {{}}, set(), set()
for name, want in eager.items():
    got = compiled.get(name, torch.zeros_like(want))
    if want.shape != got.shape or want.dtype != got.dtype or want.stride() != got.stride():
        wrong.append(f"{{name}}: {{got.shape}} {{got.stride()}} {{got.dtype}}, eager has "
                     f"{{want.shape}} {{want.stride()}} {{want.dtype}}")
    elif not torch.allclose(want, got, rtol={rtol}, atol={atol}, equal_nan=True):
        off = (want.to(torch.complex128) - got.to(torch.complex128)).abs().max().item()
        wrong.append(f"{{name}}: the largest difference is {{off:.3g}}")
for pair in sorted(eager_shared ^ compiled_shared):
    how = "compiled" if pair in compiled_shared else "eager"
    wrong.append(f"{{pair[0]}} and {{pair[1]}} share memory in {{how}} only")
'''

_WITH_EQUAL_DRAWS = """

import torchguard  # lets eager and compiled code draw the same random numbers

checked = torchguard.verified({alone})(graph)
with torch.{grad_mode}():
    checked(*inputs())
wrong = [line for each in checked.stats().graphs for line in each.differences]
"""

_END = """
if __name__ == "__main__":
    print("\\n".join(wrong) or "no difference")
    raise SystemExit(bool(wrong))
"""


class NoScriptError(Exception):
    """There can't be a script; the text is the reason."""


def reproducer_of(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    inner: Inner,
    record: GraphRecord,
    *,
    draws: bool = False,
) -> str:
    """Write a script that shows what a backend made of a graph does otherwise.

    If it ``draws`` random numbers that the check has chosen, the script has torchguard choose them.
    Returns where it is, which the record keeps too, or why there is none.
    """

    def make_text() -> str:
        source = inner.source
        if source is None:
            raise NoScriptError(f"{inner.name} is a callable, which a script can't name")
        if owned_tensors(graph):
            raise NoScriptError("the graph holds tensors, such as an optimizer's parameters")
        if record.checks and numbers_in(graph, inputs):
            raise NoScriptError("a script does not show what needs a float that changes")
        if len(graphs_in(graph)) > 1 or any(node.op == "call_module" for node in graph.graph.nodes):
            raise NoScriptError("the graph holds other graphs, or calls a module as a whole")
        arguments = f", {source}" if source else ""
        return _script(_source_of(graph), arguments, inputs, record, draws=draws)

    try:
        text = make_text()
        folder = Path(os.environ.get(FOLDER_VARIABLE) or _temporary_folder())
        folder.mkdir(parents=True, exist_ok=True)
        name = record.function if record.function.isidentifier() else "graph"
        record.reproducer = _write(text, folder / f"{name}.py")
    except NoScriptError as reason:
        return f"none: {reason}"
    except Exception as error:  # noqa: BLE001 - a script that fails must not hide what it is about
        return f"none: writing it raised {type(error).__name__}: {error}"
    return record.reproducer


def _write(text: str, path: Path) -> str:
    """Write a script, under another name where there is one already; return its path."""
    number, stem = 1, path.stem
    while True:
        with contextlib.suppress(FileExistsError):  # perhaps of another process
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return str(path)
        number += 1
        path = path.with_name(f"{stem}-{number}.py")


@functools.cache
def _temporary_folder() -> str:
    """Return the folder of this process's scripts, if the environment names none."""
    return tempfile.mkdtemp(prefix="torchguard-reproducers-")


def _script(
    source: str, arguments: str, inputs: Sequence[Any], record: GraphRecord, *, draws: bool
) -> str:
    """Return the text of a script, which gives ``torch.compile`` these arguments.

    Its inputs have the shapes, strides and sharing that they had. If they are few, they have their
    values, else random ones.
    """
    double = any(tensor.dtype == torch.float64 for tensor in tensors_of(inputs))
    text = _SCRIPT + (_WITH_EQUAL_DRAWS if draws else _COMPARISON) + _END
    return text.format(
        version=torch.__version__,
        # They stand in the docstring of the script, which these would end or escape.
        differences="\n".join(record.differences).replace("\\", "/").replace('"""', "'''"),
        source=source,
        inputs=_input_lines(inputs),
        arguments=arguments,
        alone=arguments.removeprefix(", "),
        grad_mode="enable_grad" if torch.is_grad_enabled() else "no_grad",
        # Wider than the check's, which knows what rounding explains here: a script does not.
        rtol=1e-6 if double else 1e-3,
        atol=1e-6 if double else 1e-4,
    )


# ---- what is compiled ----


def _source_of(graph: fx.GraphModule) -> str:
    """Write a module class for the graph, and an instance."""
    code = graph.graph.python_code("self")
    imports = [_import_of(name, value) for name, value in code.globals.items()]
    body = [f"    {line}" if line else line for line in code.src.strip("\n").splitlines()]
    lines = [line for line in body if not line.lstrip().startswith("#")]
    return "\n".join([*imports, "", "class Graph(torch.nn.Module):", *lines, "", "graph = Graph()"])


def _import_of(name: str, value: Any) -> str:
    """Return the line that imports a value under a name."""
    if name in {"torch", "device", "inf", "nan", "NoneType"}:
        return ""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    # Not a nested one, of which no module has the dotted name.
    if module and getattr(sys.modules.get(module), qualified, None) is value:
        return f"from {module} import {qualified} as {name}"
    raise NoScriptError(f"the graph has {value!r}, which a script can't import")


# ---- its inputs ----


def _input_lines(inputs: Sequence[Any]) -> str:
    """Return the lines that make inputs of these shapes, strides and sharing, and a return."""
    written_out = bytes_of(inputs) <= _MOST_WRITTEN_OUT  # whole storages
    lines: list[str] = []
    storages: dict[tuple[int, torch.dtype], str] = {}
    for position, value in enumerate(inputs):
        name = f"input_{position}"
        if not isinstance(value, torch.Tensor):
            lines.append(f"{name} = {value!r}")
            continue
        key = (value.untyped_storage().data_ptr() or id(value), value.dtype)
        if key not in storages:
            storages[key] = f"storage_{len(storages)}"
            lines.append(f"{storages[key]} = {_storage(value, written_out=written_out)}")
        place = f"{tuple(value.shape)}, {value.stride()}, {value.storage_offset()}"
        made = f"{storages[key]}.as_strided({place})"
        made = f"{made}.conj()" if value.is_conj() else made
        made = f"torch._neg_view({made})" if value.is_neg() else made
        if value.requires_grad and value.is_leaf:
            made += ".detach().requires_grad_()"
        lines.append(f"{name} = {made}")
        if is_static_address(value):  # the partitioner treats it in another way
            lines.append(f"torch._dynamo.mark_static_address({name})")
    lines.append(f"return [{', '.join(f'input_{place}' for place in range(len(inputs)))}]")
    return "\n".join(f"    {line}" for line in lines)


def _storage(tensor: torch.Tensor, *, written_out: bool) -> str:
    """Write an expression for the whole storage, one-dimensional."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    # Its numbers as they lie in memory: the view that is made of them has the bits.
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage(), 0, (size,), (1,))
    where = f"dtype={tensor.dtype}, device={str(tensor.device)!r}"
    if written_out:
        made = f"torch.tensor({whole.tolist()}, {where})"
    elif tensor.is_floating_point() or tensor.is_complex():
        drawn = torch.complex64 if tensor.is_complex() else torch.float32
        made = f"torch.randn({size}, dtype={drawn}).to({where})"
    else:
        low, high = (int(whole.min()), int(whole.max())) if size else (0, 0)
        made = f"torch.randint({low}, {high + 1}, ({size},)).to({where})"
    if tensor.requires_grad and not tensor.is_leaf:
        made += ".requires_grad_().clone()"
    return made
