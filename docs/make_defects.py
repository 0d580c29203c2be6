"""Writes ``docs/reference/defects.md``: a section for each defect of the catalog.

``python docs/make_defects.py`` after the catalog or ``docs/project/compatibility.md`` has
changed; a test compares the page with this.
"""  # noqa: INP001

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from torchguard.cli.doctor import guards_as_code
from torchguard.defects import probes
from torchguard.defects.catalog import Defect, all_defects

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "defects.md"

_FAMILIES = {
    "memory": "Tensors, files and training steps",
    "compile": "Compiled code",
    "gradient": "Gradients",
}
_UPSTREAM = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)$")
_CODE = re.compile(
    r"x(\[[^]]*\])? -?= x\[[^]]*\]|[a-z_]\w*(\.\w+)*\([^()]*\)|\w+\([^()]*=[^()]*\)"
    r"|[a-z]+=(\"[^\"]*\")?|\.clone\(\)|\b[a-zA-Z]\w*(\.\w+)+(\(([^()]|\(\))*\))?|\b[a-z]+_\w*|\b(mm|cat|cumsum|rrelu)\b"
)
"""What is code in the summary of a defect."""
_CUT = (
    "setStorage: sizes [3], strides [1], storage offset 1, and itemsize 4 requiring a storage size "
    "of 16 are out of bounds for storage of size 0"
)
_SEEN = {
    "csr-unchecked": "`Sparse invariant checks are implicitly disabled` and a wrong number, or "
    "`Segmentation fault`",
    "ctc-target": "no error, or `Segmentation fault`",
    "dcp-half-load": "`CheckpointException`, and then a model of two checkpoints",
    "dcp-overwrite": "at the next load, `CheckpointException` or a mix of two checkpoints",
    "frombuffer-lifetime": "no error, or `Segmentation fault`",
    "index-partial": "`index 9 is out of bounds for dimension 0 with size 4`, then wrong gradients",
    "load-partial": "`Error(s) in loading state_dict for`, `size mismatch for`",
    "mmap-load-save": "`Bus error`, and a file of 0 bytes",
    "numpy-readonly": "`The given NumPy array is not writable`, and then `Segmentation fault`",
    "numpy-view-share": "no error, or `Segmentation fault`",
    "oom-retry": "the error of the first try, and then a gradient that is twice too large, or "
    "`unscale_() has already been called on this optimizer since the last update()`",
    "optimizer-init-partial": "an error in the first `optimizer.step()`, and then "
    "`KeyError: 'exp_avg_sq'` in each further step",
    "optimizer-partial": "an error in `optimizer.step()`, after which a part has moved",
    "optimizer-state-shape": "no error with `fused=True`, otherwise "
    "`The size of tensor a (4) must match the size of tensor b (64)`",
    "scaler-init-partial": "an error in the first `scaler.scale(loss)`, and then "
    "`Attempted unscale_ but _growth_tracker is None` in each further step",
    "out-garbage": "the error of the call, such as `index out of range in self`, and then a "
    "tensor of another shape",
    "resize-locked": "`Trying to resize storage that is not resizable`, and then numbers of "
    "out-of-bounds memory, or `Segmentation fault`",
    "resize-shared": "`Segmentation fault`",
    "storage-shrunk": f"`Segmentation fault`, or at a slice `{_CUT}`",
    "int-div-zero": "`Floating point exception (core dumped)`",
    "checks-lost": "no error, or `device-side assert triggered`",
    "recompile-limit": "`torch._dynamo hit config.recompile_limit (8)`",
    "requires-grad-lies": "no error, or `element 0 of tensors does not require grad`",
}
NEED_A_GPU = ("cudagraph-shapes", "pad-reduction")
"""Their reproducers were not run: the machine had no GPU."""

_LIVE = {"closed", "detected", "open"}
_INTRODUCTION = """\
# Known PyTorch defects

The title of each section is what you see go wrong. Below it are the message that PyTorch gives, if
it gives one, the guard that helps, what helps in PyTorch alone, and the releases that have the
defect. Search this page for your error message. Most of these defects give you none.

Each reproducer is a program that needs PyTorch alone. It prints what it saw, or `None` if your
PyTorch does not have the defect, and some of them end the process. `python -m torchguard doctor`
runs all of them on your PyTorch, without and with the guards. `python -m torchguard doctor NAME`
runs one.

In the tables, **affected** means that a release has the defect and no guard closes it, **guarded**
that it has the defect and the guard closes it, **detected** that the guard finds the defect after
it has happened, **fixed** that PyTorch has corrected it, **not affected** that the release does not
have it yet, and **not run** that the probe needs a GPU
([compatibility](../project/compatibility.md) has the releases and their builds).
"""


def page() -> str:
    """Return the whole page."""
    versions, seen = statuses((DOCS / "project" / "compatibility.md").read_text(encoding="utf-8"))
    rows = all_defects()
    parts = [_INTRODUCTION]
    for family, title in _FAMILIES.items():
        parts.append(f"## {title}\n")
        parts += [
            "\n".join(_section(row, versions, seen.get(row.id)))
            for row in rows
            if row.family == family
        ]
    return "\n".join(parts)


def statuses(compatibility: str) -> tuple[list[str], Mapping[str, list[str]]]:
    """Read the table of the compatibility page: the torch releases, and a row for each defect.

    Raises:
        ValueError: the page has no table of that form.
    """
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in compatibility.splitlines()
        if line.startswith("|")
    ]
    header = next((cells for cells in rows if any(c.startswith("torch 2") for c in cells)), None)
    if header is None:
        raise ValueError("docs/project/compatibility.md has no table with columns `torch 2...`")
    columns = [place for place, cell in enumerate(header) if cell.startswith("torch 2")]
    found = {
        cells[0].strip("`"): [cells[place] for place in columns]
        for cells in rows
        if re.fullmatch(r"`[a-z0-9-]+`", cells[0]) and len(cells) == len(header)
    }
    names = [header[place].removeprefix("torch ").partition(",")[0] for place in columns]
    return names, found


def _section(row: Defect, versions: list[str], seen: list[str] | None) -> Iterator[str]:
    yield f'<a id="{row.id}"></a>\n'
    yield f"### {_title(row.summary)}\n"
    yield f"- Name: `{row.id}`"
    yield f"- You see: {_SEEN.get(row.id, 'no error')}"
    if row.id in NEED_A_GPU:
        yield "- Reproducer: not run, because it needs a GPU"
    does = "Detected, not prevented, by" if row.only_detects else "Guarded by"
    yield f"- {does}: " + (f"`{guards_as_code(row.guards)}`" if row.guards else "no guard yet")
    if row.limits:
        yield f"- Limits: {row.limits}"
    if row.advice:
        yield f"- In PyTorch alone: {row.advice}"
    if row.upstream:
        yield f"- Upstream: {', '.join(map(_link, row.upstream))}"
    yield ""
    if seen:
        yield "| " + " | ".join(versions) + " |"
        yield "| " + " | ".join(["---"] * len(versions)) + " |"
        seen = list(_in_words(seen, guarded=bool(row.guards)))
        yield "| " + " | ".join(seen) + " |\n"
    yield f"<details><summary>Reproducer</summary>\n\n```py\n{reproducer(row)}```\n\n</details>\n"


def _title(summary: str) -> str:
    """Mark what is code in a summary, and begin it with a capital letter."""
    title = _CODE.sub(r"`\g<0>`", summary)
    return title if title[1].isupper() else title[0].upper() + title[1:]


def _in_words(seen: list[str], *, guarded: bool) -> Iterator[str]:
    """Say of each release whether it is affected; the matrix may be older than the guards."""
    affected = False
    for cell in seen:
        affected |= cell in _LIVE
        if cell == "-":
            yield "fixed" if affected else "not affected"
        elif cell in _LIVE and not guarded:
            yield "affected"
        else:
            yield {"closed": "guarded", "open": "affected"}.get(cell, cell)


def reproducer(row: Defect) -> str:
    """Return a program that shows a defect: the probe, and the names of its module that it uses."""
    module = inspect.getmodule(inspect.unwrap(row.probe))
    assert module is not None
    own, imports = _defined(probes) | _defined(module), _imported(probes) | _imported(module)
    wanted, found = ["annotations", inspect.unwrap(row.probe).__name__], dict[str, str]()
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        if name == "NotRunHere":
            found[name] = "class NotRunHere(Exception):\n    pass"
        elif name in own:
            found[name], used = own[name]
            wanted += used
        elif name in imports:
            found[name] = imports[name]
    order = [*imports, "NotRunHere", *own]
    lines = [found[name] for name in sorted(found, key=order.index) if name in imports]
    parts = [found[name] for name in sorted(found, key=order.index) if name not in imports]
    program = "\n".join(dict.fromkeys(lines)) + "\n\n" + "\n\n".join(parts)
    return f"{program}\n\nprint({inspect.unwrap(row.probe).__name__}())\n"


def _defined(module: ModuleType) -> dict[str, tuple[str, set[str]]]:
    """Return the text of each function, class and constant of a module, and the names in it."""
    text = inspect.getsource(module)
    found: dict[str, tuple[str, set[str]]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
            if isinstance(getattr(module, node.name), Defect):
                node.decorator_list = []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            ]
        else:
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        lines = text.splitlines()[first - 1 : node.end_lineno]
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        found |= {name: ("\n".join(lines), used - {name}) for name in names}
    return found


def _imported(module: ModuleType) -> dict[str, str]:
    """Return the line that imports each name of other packages."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            begins = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            if "torchguard" not in begins and "__future__" not in begins:
                for each in node.names:
                    name = (each.asname or each.name).partition(".")[0]
                    renamed = f" as {each.asname}" if each.asname else ""
                    found[name] = f"{begins}import {each.name}{renamed}"
    return {"annotations": "from __future__ import annotations", **found}


def _link(url: str) -> str:
    found = _UPSTREAM.match(url)
    return f"[{found[1]}#{found[2]}]({url})" if found else f"<{url}>"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
