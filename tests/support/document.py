"""Runs the Python code of a Markdown page and checks what it prints.

The blocks of a page run in order and share their names, as a reader would type them. What a block
prints has to be what its comments ``# -> text`` say, line by line. A word after ``python`` makes a
block a program of its own: ``python script`` has to end well.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.child_process import run_python

_EXPECTED = re.compile(r"# -> (.*)$")
_KINDS = ("", "script")
_BEGINS = "\x1e\n"
"""What a page's program prints where a block begins."""

_FENCE = f'__name__ = "__page__"; print({_BEGINS[0]!r}, flush=True)\n'


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word after it, where it begins, its text."""

    language: str
    kind: str
    line: int
    code: str


def blocks(page: str) -> Iterator[Block]:
    """Yield every fenced block of a page."""
    language: str | None = None
    kind, first, kept = "", 0, list[str]()
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("```"):
            kept.append(line)
        elif language is None:
            language, _, kind = line[3:].strip().partition(" ")
            first, kept = number + 1, []
        else:
            yield Block(language, kind, first, "\n".join(kept) + "\n")
            language = None
    if language is not None:
        raise ValueError(f"the block at line {first - 1} has no end")


def faults(path: Path) -> list[str]:
    """Run a page; return what is wrong with it, in words."""
    page = [
        block for block in blocks(path.read_text(encoding="utf-8")) if block.language == "python"
    ]
    found = {block.line: _run_alone(block) for block in page if block.kind != ""}
    found |= _run_together([block for block in page if block.kind == ""])
    return [f"{path.name}, line {line}: {found[line]}" for line in sorted(found) if found[line]]


def _run_together(page: list[Block]) -> dict[int, str]:
    """Run blocks as one program, in which each stands in the line that it has in the page."""
    if not page:
        return {}
    program = ""
    for block in page:
        program += "\n" * (block.line - 2 - program.count("\n")) + _FENCE + block.code
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(program, folder=Path(folder))  # compilers read a function's file
    printed = done.stdout.split(_BEGINS)[1:] or [""]
    found = {
        block.line: _difference(block, text) for block, text in zip(page, printed, strict=False)
    }
    if done.returncode != 0:
        found[page[len(printed) - 1].line] = f"ended with {done.returncode}\n{done.stderr}"
    return found


def _run_alone(block: Block) -> str:
    if block.kind not in _KINDS:
        return f"a Python block is one of {_KINDS}, this one says {block.kind!r}"
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(block.code, folder=Path(folder))
    if done.returncode != 0:
        return f"ended with {done.returncode}\n{done.stderr}"
    return _difference(block, done.stdout)


def _difference(block: Block, printed: str) -> str:
    expected = [match[1] for line in block.code.splitlines() if (match := _EXPECTED.search(line))]
    if printed.splitlines() == expected:
        return ""
    return f"printed\n{printed}and not\n" + "".join(f"{line}\n" for line in expected)
