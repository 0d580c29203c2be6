"""Writes the table of guards in ``docs/process/patching.md``, from the docstring of ``install``.

``python docs/make_guards.py`` after a guard has changed; a test compares the page with what this
writes.
"""  # noqa: INP001

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torchguard
from torchguard.patching.guards import GUARDS

PAGE = Path(__file__).parent / "process" / "patching.md"
BEGIN = "<!-- begin: guards, written by docs/make_guards.py -->"
END = "<!-- end: guards -->"

_PAGES = {
    "resize": "resize.md#resize",
    "out": "resize.md#out",
    "overlap": "overlap.md",
    "checks": "checks.md",
    "recompute": "../training/recompute.md",
    "numpy": "numpy.md",
    "save": "../training/checkpoints.md",
    "load": "../training/checkpoints.md",
    "verified": "../compile/verified.md",
    "setitem": "../compile/assign.md",
}


def page() -> str:
    """Return the whole page, with the table of today's guards.

    Raises:
        ValueError: the page has lost the lines that say where the table goes.
    """
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN!r} and {END!r}")
    table = "\n".join(_table())
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _table() -> Iterator[str]:
    does = _described()
    if does.keys() != GUARDS.keys():
        raise ValueError(f"install() describes {sorted(does)}, its guards are {sorted(GUARDS)}")
    yield "| guard | effect | patches |"
    yield "| --- | --- | --- |"
    for name, target in _PAGES.items():
        yield f'| [`"{name}"`]({target}) | {does[name]} | {_replaced(name)} |'


def _described() -> dict[str, str]:
    """Return the text of each guard in the section "Guards" of the docstring."""
    text = inspect.getdoc(torchguard.install) or ""
    [section] = re.findall(r"^Guards:\n(.*?)\n\n(?=\S)", text, re.DOTALL | re.MULTILINE)
    items = re.findall(r'^    ``"(\w+)"``(.*?)(?=^    ``"|\Z)', section, re.DOTALL | re.MULTILINE)
    return {
        name: re.sub(r"``(.+?)``", r"`\1`", " ".join(words.split()).lstrip(": ").rstrip("."))
        for name, words in items
        if name != "all"
    }


def _replaced(name: str) -> str:
    """Return the modules and classes in which a guard replaces functions."""
    guard = GUARDS[name]
    paths = [*guard.replacements(), *(path for each in guard.in_modules.values() for path in each)]
    owners = {re.sub(r"(\._\w+)\..*", r"\1", path.rpartition(".")[0]) for path in paths}
    return ", ".join(f"`{owner}`" for owner in sorted(owners))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
