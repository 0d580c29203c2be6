"""Writes ``docs/reference/defects.md``, and a page for each of its families in ``defects/``.

``python docs/make_defects.py`` after the catalog or ``docs/project/compatibility.md`` has
changed; a test compares the pages with this.
"""  # noqa: INP001

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torchguard.cli.doctor import guards_as_code
from torchguard.defects import probes
from torchguard.defects.catalog import Defect, all_defects

DOCS = Path(__file__).parent
INDEX = DOCS / "reference" / "defects.md"


class _Page(NamedTuple):
    name: str
    """Of its file."""

    title: str
    """What all of its defects look like to a user."""

    modules: tuple[str, ...]
    """The files of probes that it is about."""

    about: str
    """What its defects have in common, and where to read more."""

    also: tuple[str, ...] = ()
    """Defects whose probes are in a file of another page."""


_PAGES = (
    _Page(
        "failed-writes",
        "A call fails, and its tensor is broken afterwards",
        ("failed_writes",),
        "PyTorch changes a tensor step by step, and an error in the middle leaves what was done. "
        "If you catch the error, your program continues with it. [Resize and out]"
        "(../../process/resize.md) has the guards.",
    ),
    _Page(
        "out-of-bounds",
        "A crash, or a value from out-of-bounds memory",
        ("memory",),
        "On a CPU some operators do not check indices, and some tensors outlive the memory that "
        "they look at. [Values out of range](../../process/checks.md) and "
        "[numpy](../../process/numpy.md) have the guards.",
    ),
    _Page(
        "overlap",
        "`x -= x[:, :1]` gives wrong values",
        ("overlapping",),
        "An operation that writes into the memory that it reads sees some of its own results. "
        "[Overlap](../../process/overlap.md) has the guard.",
    ),
    _Page(
        "training-steps",
        "A training step fails or steps wrong",
        ("training_steps",),
        "A step writes many tensors, one after the other, so an error or a wrong layout leaves a "
        "model between two steps. [transaction](../../training/transaction.md) rolls a step back.",
    ),
    _Page(
        "checkpoints",
        "A checkpoint is lost, or loads something else",
        ("state_dicts", "distributed"),
        "Loading copies tensor by tensor, and saving writes over the old file. "
        "[Checkpoints](../../training/checkpoints.md) and [several ranks](../../training/ranks.md) "
        "have the guards.",
        ("load-partial", "optimizer-state-shape", "mmap-load-save"),
    ),
    _Page(
        "compiled-values",
        "Compiled code gives wrong values",
        ("miscompiled",),
        "The compiler moves, merges or drops an operator that your program depends on. [verified]"
        "(../../compile/verified.md) compares each graph with eager on its first inputs.",
    ),
    _Page(
        "compiled-gradients",
        "Compiled code gives wrong gradients",
        ("gradients",),
        "The values of forward are right here, and those of backward are not, so a training run "
        "goes wrong slowly. [verified](../../compile/verified.md) compares gradients too.",
    ),
    _Page(
        "traced-wrong",
        "Compiled code ignores a part of the program",
        ("mistraced",),
        "Dynamo records your function without a line of it, so each backend gets the wrong graph. "
        "[Compare with Python](../../compile/against-python.md) finds it.",
    ),
    _Page(
        "sizes",
        "New sizes recompile, or are padded wrong",
        ("dynamic_sizes",),
        "Inputs of many sizes are many graphs, or one graph with a symbol for the size. [Static or "
        "symbolic?](../../compile/sizes.md) compares the two.",
    ),
    _Page(
        "activation-checkpointing",
        "Activation checkpointing gives different gradients",
        ("checkpointed",),
        "A checkpointed block runs a second time in backward, and begins with the state that its "
        "first run left. [safe_checkpoint](../../training/recompute.md) restores that state.",
    ),
)

_UPSTREAM = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)$")
_CODE = re.compile(
    r"x\[\w+\] \+?= v|x -= x\[:, :1\]|x \* 1\b|KeyError: '\w+'|hit config\.recompile_limit \(8\)"
    r"|[a-zA-Z_][\w.]*\(([^()]|\([^()]*\))*\)|\b\w+=(\"[^\"]*\"|(True|False)\b)?"
    r"|\b[a-zA-Z]\w*(\.\w+)+|_growth_tracker is None|\b[a-z]+_\w*|\b(rrelu|wrapt|x)\b|(?<= in )out$"
)
"""What is code in the title and the summary of a defect."""
_STATEMENT = re.compile(
    r"`[^`]+`|assert .+(?=\.$)|(?:return |\w+ \+ |\w[\w.]*(?:\[[^\]]*\])? \+?= )*"
    r"(?:\.?[a-zA-Z_][\w.]*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)(?:\.\w+\(\))?"
    r"|(?<== )\w+(?:\.\w+)*|\b\w+=(?:\"[^\"]*\"|\w+)|\b[a-zA-Z]\w*(?:\.\w+)+(?:\[\w+\])?"
    r"|\b[a-z]*_\w*|\b[A-Z]\w*Error\b)"
)
"""What is code in the advice for those who do without torchguard."""
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

_LIVE = {"closed", "detected", "open", "no guard"}
_INTRODUCTION = """\
# Known PyTorch defects

Each defect below has a section that says what you see, which message PyTorch gives if it gives one,
which guard helps, what helps in PyTorch alone, and which releases are affected. Search this page
for what you see. Most of these defects give you no error, so
[`python -m torchguard doctor`](cli.md#doctor) tries all of them on your PyTorch, without and with
the guards.

Each section ends with a program that shows the defect and needs PyTorch alone. It prints what it
saw, or `None` if your PyTorch does not have the defect. Some of these programs end their process.
"""
_WORDS = """\
A release is **affected** if it has the defect and no guard helps, **guarded** if it has the defect
and the guard closes it, **detected** if the guard finds the damage afterwards, **fixed** if PyTorch
has corrected it, and **not affected** if it does not have the defect yet.
[Compatibility](../project/compatibility.md) has the builds that were tried.

:::{toctree}
:hidden:

"""


def pages() -> dict[Path, str]:
    """Return every page.

    Raises:
        ValueError: a defect is on no page.
    """
    versions, seen = statuses((DOCS / "project" / "compatibility.md").read_text(encoding="utf-8"))
    texts, index = dict[Path, str](), [_INTRODUCTION]
    left = {row.id: row for row in all_defects()}
    for page in _PAGES:
        rows = [row for row in left.values() if _is_on(page, row)]
        left = {name: row for name, row in left.items() if row not in rows}
        parts = [f"# {page.title}\n", f"{page.about}\n"]
        parts += ["\n".join(_section(row, versions, seen.get(row.id))) for row in rows]
        parts += ["[All known defects](../defects.md)\n"]
        texts[INDEX.parent / "defects" / f"{page.name}.md"] = "\n".join(parts)
        index += [f"## {page.title}\n", "| what you see | guard |", "| --- | --- |"]
        index += [_row(row, page) for row in rows]
        index += [""]
    if left:
        raise ValueError(f"no page in _PAGES is about {sorted(left)}")
    names = "\n".join(f"defects/{page.name}" for page in _PAGES)
    return {INDEX: "\n".join(index) + f"\n{_WORDS}{names}\n:::\n", **texts}


def _is_on(page: _Page, row: Defect) -> bool:
    moved = next((each for each in _PAGES if row.id in each.also), None)
    module = inspect.unwrap(row.probe).__module__.rpartition(".")[2]
    return page == moved if moved else module in page.modules


def _row(row: Defect, page: _Page) -> str:
    """Return the row of the index, which is where old addresses lead too."""
    title = _title(row)
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    guard = f"`{guards_as_code(row.guards)}`" if row.guards else "none yet"
    guard = guard.replace(" and ", "` and `")
    return f'| <a id="{row.id}"></a>[{title}](defects/{page.name}.md#{anchor}) | {guard} |'


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
    yield f"## {_title(row)}\n"
    what = _CODE.sub(r"`\g<0>`", row.summary)
    yield f"{what[0].upper()}{what[1:]}.\n"
    yield f"- You see: {_SEEN.get(row.id, 'no error')}"
    if seen and set(seen) - {"needs a GPU"}:
        yield f"- PyTorch: {_releases(seen, versions, guarded=bool(row.guards))}"
    if row.id in NEED_A_GPU:
        yield "- Reproducer: not tried yet, because it needs a GPU"
    does = "Detected, not prevented, by" if row.only_detects else "Guarded by"
    code = f"`{guards_as_code(row.guards)}`".replace(" and ", "` and `")
    yield f"- {does}: " + (code if row.guards else "no guard yet")
    if row.limits:
        yield f"- Limits: {row.limits}"
    if row.advice:
        yield f"- Without torchguard: {_STATEMENT.sub(_as_code, row.advice)}"
    if row.upstream:
        yield f"- Upstream: {', '.join(map(_link, row.upstream))}"
    yield f"- Try it: `python -m torchguard doctor {row.id}`"
    yield f"\n<details><summary>Reproducer</summary>\n\n```py\n{reproducer(row)}```\n\n</details>\n"


def _as_code(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("`") else f"`{found[0]}`"


def _title(row: Defect) -> str:
    """Mark what is code in what a user sees, and begin it with a capital letter."""
    title = _CODE.sub(r"`\g<0>`", row.title or row.summary)
    return title if title[0] == "`" else title[0].upper() + title[1:]


def _releases(seen: list[str], versions: list[str], *, guarded: bool) -> str:
    """Say which releases are affected, guarded or fixed: neighbours that agree in one phrase."""
    phrases, words = list[str](), list(_in_words(seen, guarded=guarded))
    for word, of in itertools.groupby(zip(words, versions, strict=True), lambda pair: pair[0]):
        names = [version for _, version in of]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        phrases.append(f"**{word}** in {span}")
    return ", ".join(phrases)


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
            yield {"closed": "guarded", "open": "affected", "no guard": "affected"}.get(cell, cell)


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
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
