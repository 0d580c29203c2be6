"""What README.md and the pages say: their code runs, their figures and links are right."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from document import blocks, faults

import torchguard
from torchguard.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_code_on_the_page_runs_and_prints_what_it_says(page: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "document.py"), str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("```python\nprint(1)  # -> 2\n```", "printed\n1\nand not\n2"),
        ("```python\nprint(1)\n```", "printed\n1\nand not\n"),
        ("```python\n\n1 / 0\n```", "page.md, line 2"),
        ("```python dies\npass\n```", "did not die, exit status 0"),
        ("```python script\nraise SystemExit(3)\n```", "ended with 3"),
        ("```python console\n```", "this one says 'console'"),
    ],
)
def test_code_that_does_something_else_is_found(code: str, fault: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(code, encoding="utf-8")
    found = faults(page)
    assert len(found) == 1
    assert fault in found[0]


def test_the_first_snippet_has_ten_lines_or_fewer() -> None:
    first = next(blocks((ROOT / "README.md").read_text(encoding="utf-8")))
    assert first.code.count("\n") <= 10


# What comes after the name of a command that a page shows, and whether it exists.


def _is_target(arguments: list[str]) -> bool:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return all(re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE) for name in arguments)


def _is_install(arguments: list[str]) -> bool:
    return arguments == ["install", "-e", "."]


def _is_python(arguments: list[str]) -> bool:
    if arguments[:2] == ["-m", "torchguard"]:
        command = arguments[2]
        options = [name for name in arguments[3:] if name.startswith("--")]
        if command == "run":  # what follows the script belongs to the script
            position = next(i for i, name in enumerate(arguments) if name.endswith(".py"))
            options = [name for name in arguments[3:position] if name.startswith("--")]
        return _offers(command, options)
    if arguments[0] != "-m":
        return (ROOT / arguments[0]).is_file()
    module = ROOT / arguments[1].replace(".", "/")
    return module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def _offers(command: str, options: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "torchguard", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0 and all(option in done.stdout for option in options)


COMMANDS = {"make": _is_target, "pip": _is_install, "python": _is_python}


def _exists(line: str) -> bool:
    program, *arguments = shlex.split(line, comments=True)
    return program in COMMANDS and COMMANDS[program](arguments)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_on_the_page_exists(page: Path) -> None:
    lines = [
        line
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language in {"bash", "sh", "console"}
        for line in block.code.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert [line for line in lines if not _exists(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "make docter",
        "pip install torchguard",  # somebody else's package
        "python -m torchguard docter",
        "python -m torchguard doctor --colour",
        "python benchmarks/bench_missing.py",
        "python -m benchmarks.missing",
        "python -m tests",
        "curl https://example.org",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert not _exists(line)


def test_no_page_says_to_install_the_foreign_package() -> None:
    pattern = re.compile(r"install\s+(-\S+\s+)*torchguard(?![-\w])")
    assert pattern.search("pip install -U torchguard")
    assert not pattern.search("pip install torchguard-runtime")
    assert [
        name
        for name, page in zip(NAMES, PAGES, strict=True)
        if pattern.search(page.read_text(encoding="utf-8"))
    ] == []


def _broken_links(page: Path, text: str) -> list[str]:
    broken = []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / unquote(path) if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    return broken


def _anchors(page: Path) -> set[str]:
    """Headings, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert _broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/none.md) ![b](none.png) [c](docs/why.md#none) [d](docs/why.md) [e](#limits)"
    broken = ["docs/none.md", "none.png", "docs/why.md#none"]
    assert _broken_links(ROOT / "README.md", text) == broken


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(torchguard.__path__, "torchguard.")
    # Not the integrations: they import what they are for, and Lightning replaces torch.compile.
    return [
        importlib.import_module(each.name)
        for each in found
        if each.name != "torchguard.__main__" and "integrations." not in each.name
    ]


def test_the_examples_in_docstrings_do_what_they_say() -> None:
    results = {module.__name__: doctest.testmod(module) for module in _modules()}
    assert [name for name, result in results.items() if result.failed] == []
    # The two that have examples today: were they not found, this test would pass for no reason.
    assert results["torchguard.guarded"].attempted
    assert results["torchguard.rollback"].attempted


def test_every_public_name_is_on_a_page() -> None:
    pages = [page for page in PAGES if page.name != "reference.md"]  # which has all of them
    page = "".join(each.read_text(encoding="utf-8") for each in pages)
    functions = [name for name in torchguard.__all__ if not name.startswith("_")]
    assert [name for name in functions if not re.search(rf"\b{name}\b", page)] == []


def test_help_of_the_program_names_what_the_readme_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"python -m torchguard (\w+)", readme))
    assert commands == {"doctor", "run"}
    assert all(command in shown for command in commands)


def test_the_reference_has_every_public_name_and_no_other() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    # A function that has the name of its module is found by the module's name and its own.
    names = [path.rpartition(".")[2] for path in listed]
    assert sorted(names) == sorted(name for name in torchguard.__all__ if name != "__version__")
