"""Runs the Python code of a Markdown page and checks what it prints.

    python tests/support/document.py README.md

The blocks of a page run in order and share their names, as a reader would type
them. What a block prints has to be what its comments ``# -> text`` say, line by
line. A word after ``python`` makes a block a program of its own: ``python script``
has to end well, ``python dies`` has to be killed by a signal.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(.*)$")
_EXPECTED = re.compile(r"# -> (.*)$")
_KINDS = ("", "script", "dies")


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
        fence = _FENCE.match(line)
        if fence is None:
            kept.append(line)
        elif language is None:
            language, _, kind = fence[1].strip().partition(" ")
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
    names: dict[str, Any] = {"__name__": "__page__"}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        # Compilers read a function's file, so the page's code is in one: line for line.
        file = Path(folder, f"{path.stem}.py")
        file.write_text(_as_program(page), encoding="utf-8")
        for block in page:
            fault = _run(block, file, names) if block.kind == "" else _run_alone(block)
            if fault is not None:
                found.append(f"{path.name}, line {block.line}: {fault}")
    return found


def _as_program(page: list[Block]) -> str:
    """Put the blocks that share their names where they stand in the page, empty lines between."""
    program = ""
    for block in page:
        if block.kind == "":
            program += "\n" * (block.line - 1 - program.count("\n")) + block.code
    return program


def _run(block: Block, file: Path, names: dict[str, Any]) -> str | None:
    printed = io.StringIO()
    code = "\n" * (block.line - 1) + block.code
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(file), "exec"), names)  # noqa: S102 - the page's code is ours
    except BaseException:  # noqa: BLE001 - every fault is reported
        return f"raised\n{traceback.format_exc()}"
    return _difference(block, printed.getvalue())


def _run_alone(block: Block) -> str | None:
    if block.kind not in _KINDS:
        return f"a Python block is one of {_KINDS}, this one says {block.kind!r}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(block.code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=folder
        )
    if block.kind == "dies":
        return None if done.returncode < 0 else f"did not die, exit status {done.returncode}"
    if done.returncode != 0:
        return f"ended with {done.returncode}\n{done.stderr}"
    return _difference(block, done.stdout)


def _difference(block: Block, printed: str) -> str | None:
    expected = [match[1] for line in block.code.splitlines() if (match := _EXPECTED.search(line))]
    if printed.splitlines() == expected:
        return None
    return f"printed\n{printed}and not\n" + "".join(f"{line}\n" for line in expected)


def main(arguments: list[str]) -> int:
    """Run the pages that are named."""
    found = [fault for name in arguments for fault in faults(Path(name))]
    sys.stderr.write("".join(f"{fault}\n" for fault in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
