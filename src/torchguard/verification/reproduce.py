"""A script that reproduces a wrong graph with torch alone."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchguard.equivalence.compare import Difference
from torchguard.equivalence.copies import bytes_of, tensors_of
from torchguard.verification.backend import Inner
from torchguard.verification.graph import numbers_in, owned_tensors, unlogged
from torchguard.verification.report import GraphRecord

FOLDER_VARIABLE = "TORCHGUARD_REPRODUCERS"
"""Names the folder for the scripts; without it they go to a temporary one."""

MOST_WRITTEN_OUT = 2000  # elements that may stand in a script as numbers

_SCRIPT = '''"""torch.compile and eager differ here. torch {version}.

{differences}
"""

import torch
from torch import device, inf, nan

NoneType = type(None)
{imports}

{classes}

def inputs():
    torch.manual_seed(0)
{inputs}


def run(function):
    """Return what can be seen of one run: tensors, and which of them share memory."""
    values = inputs()
    numbered = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    leaves = [(i, v) for i, v in numbered if v.requires_grad]
    outputs = list(function(*values))
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
    return {{k: v.detach() for k, v in tensors.items()}}, shared


graph = Graph()
with torch.{grad_mode}():
    eager, eager_shared = run(graph)
    compiled, compiled_shared = run(torch.compile(graph{arguments}))
wrong = []
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
print("\\n".join(wrong) or "no difference")
raise SystemExit(bool(wrong))
'''


class NoScriptError(Exception):
    """The graph can't be written as a script; the text is the reason."""


def reproducer_of(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    inner: Inner,
    record: GraphRecord,
    found: Sequence[Difference],
) -> str:
    """Write a script that shows what a backend made of a graph does otherwise.

    Returns where it is, which the record keeps too, or why there is none.
    """
    source = inner.source
    if source is None:
        return f"none: {inner.name} is a callable, which a script can't name"
    if owned_tensors(graph):
        return "none: the graph holds tensors of its own, such as an optimizer's parameters"
    if record.checks and numbers_in(graph, inputs):
        return "none: a script does not show what needs a float that changes between calls"
    name = record.function if record.function.isidentifier() else "graph"
    return saved(lambda: _script(graph, inputs, source, found), name, record)


def saved(make_text: Callable[[], str], name: str, record: GraphRecord) -> str:
    """Write the script that ``make_text`` returns.

    Returns where it is, which the record keeps too, or why there is none.
    """
    try:
        with unlogged():
            text = make_text()
        folder = Path(os.environ.get(FOLDER_VARIABLE) or _temporary_folder())
        folder.mkdir(parents=True, exist_ok=True)
        record.reproducer = write_script(text, folder / f"{name}.py")
    except NoScriptError as reason:
        return f"none: {reason}"
    except Exception as error:  # noqa: BLE001 - a script that fails must not hide what it is about
        return f"none: writing it raised {type(error).__name__}: {error}"
    return record.reproducer


def write_script(text: str, path: Path) -> str:
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
    graph: fx.GraphModule, inputs: Sequence[Any], arguments: str, found: Sequence[Difference]
) -> str:
    """Return the text of a script, which gives ``torch.compile`` these arguments.

    Its inputs have the shapes, strides and sharing that they had. If they are few, they have their
    values, else random ones.
    """
    imports: dict[str, str] = {}
    classes: list[str] = []
    _class_of(graph, "Graph", imports, classes)
    double = any(tensor.dtype == torch.float64 for tensor in tensors_of(inputs))
    written_out = bytes_of(inputs) <= 4 * MOST_WRITTEN_OUT  # whole storages
    return _SCRIPT.format(
        version=torch.__version__,
        # They stand in the docstring of the script, which these would end or escape.
        differences="\n".join(map(str, found)).replace("\\", "/").replace('"""', "'''"),
        imports="\n".join(imports.values()),
        classes="\n\n".join(classes),
        inputs=input_lines(inputs, written_out=written_out),
        arguments=f", {arguments}" if arguments else "",
        grad_mode="enable_grad" if torch.is_grad_enabled() else "no_grad",
        # Wider than the check's, which knows what rounding explains here: a script does not.
        rtol=1e-6 if double else 1e-3,
        atol=1e-6 if double else 1e-4,
    )


def _class_of(graph: fx.GraphModule, name: str, imports: dict[str, str], classes: list[str]) -> str:
    """Write a module class for the graph, those it holds first."""
    children = []
    for child, module in graph.named_children():
        if not isinstance(module, fx.GraphModule):
            raise NoScriptError(f"the graph calls the module {type(module).__name__} as a whole")
        made = _class_of(module, f"{name}_{child}", imports, classes)
        children.append(f"        self.{child} = {made}()")
    code = graph.graph.python_code("self")
    for key, value in code.globals.items():
        imports.setdefault(key, import_of(key, value))
    body = "\n".join(
        f"    {line}" if line else line
        for line in code.src.strip("\n").splitlines()
        if not line.lstrip().startswith("#")
    )
    if children:
        children = ["    def __init__(self):", "        super().__init__()", *children, ""]
    classes.append("\n".join([f"class {name}(torch.nn.Module):", *children, body, ""]))
    return name


def import_of(name: str, value: Any) -> str:
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


def input_lines(inputs: Sequence[Any], *, written_out: bool) -> str:
    """Return the lines that make inputs of these shapes, strides and sharing, and a return."""
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
    elif tensor.dtype == torch.bool:
        made = f"torch.randint(0, 2, ({size},)).to({where})"
    else:
        low, high = (int(whole.min()), int(whole.max())) if size else (0, 0)
        made = f"torch.randint({low}, {high + 1}, ({size},)).to({where})"
    if tensor.requires_grad and not tensor.is_leaf:
        made += ".requires_grad_().clone()"
    return made
