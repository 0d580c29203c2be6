"""What README.md and the pages say: their code runs, their figures and links are right."""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import functools
import importlib
import inspect
import io
import pkgutil
import re
import runpy
import shlex
import symtable
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

import torchguard
from support.document import blocks, faults
from torchguard.__main__ import main
from torchguard.cli import DOCUMENTATION
from torchguard.defects.catalog import all_ids
from torchguard.patching.guards import GUARDS

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REPOSITORY = re.findall(
    r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
)[0]
FILES = f"{REPOSITORY}/blob/main/"
SITE = DOCUMENTATION
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code on a page runs and prints what its comments say."""
    monkeypatch.chdir(tmp_path)
    assert faults(page) == []


def _names_from_elsewhere(code: str) -> set[str]:
    """The global names that a program uses and neither binds itself nor has from Python."""
    used, bound = set(), set(dir(builtins))
    unread = [symtable.symtable(code, "block", "exec")]
    while unread:
        table = unread.pop()
        unread += table.get_children()
        for symbol in table.get_symbols():
            at_module_level = table.get_type() == "module"
            if symbol.is_assigned() or symbol.is_imported():
                bound |= {symbol.get_name()} if at_module_level else set()
            elif at_module_level or symbol.is_global():
                used.add(symbol.get_name())
    return used - bound


def test_blocks_of_the_readme() -> None:
    """None is wider than a desktop shows, and each program can be pasted by itself."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = [block.code for block in blocks(readme)]
    assert [line for each in code for line in each.splitlines() if len(line) > 90] == []
    code = [block.code for block in blocks(readme) if block.language == "python"]
    assert code
    # No name of another: nobody has to compile twice to try one.
    assert [each for each in code if _names_from_elsewhere(each)] == []


WIDE = {"design.md", "messages.md", *(p.name for p in PAGES if p.parent.name == "defects")}
"""A map of files; texts of messages, which the site folds; and programs that it hides."""


def test_code_fits_its_column() -> None:
    """A line of 80 characters is as wide as the site shows; what a line prints may be longer."""
    wide = [
        f"{page.name}: {line}"
        for page in PAGES
        if not (page.name in WIDE and page.parent.name in {"defects", "project", "reference"})
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language not in {"text", ""}
        for line in block.code.splitlines()
        if len(line) > 80 and not line.lstrip().startswith("# -> ")
    ]
    assert wide == []


@functools.cache
def _help(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return shown.getvalue()


def _is_python(arguments: list[str]) -> bool:
    if arguments[:2] == ["-m", "torchguard"]:
        command, *given = arguments[2:]
        if command == "run":  # what follows the script belongs to the script
            given = given[: next(i for i, name in enumerate(given) if name.endswith(".py"))]
        options = [name for name in given if name.startswith("--")]
        return bool(_help(command)) and all(option in _help(command) for option in options)
    if arguments[0] != "-m":
        return (ROOT / arguments[0]).is_file()
    if arguments[1] == "pytest":
        return arguments[2:4] == ["-m", "cuda"] and (ROOT / arguments[4]).is_dir()
    module = ROOT / arguments[1].replace(".", "/")
    return module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([\w.-]+):", MAKEFILE, re.MULTILINE)
# Whether what comes after the name of a command, on a page that shows it, exists.
COMMANDS: dict[str, Callable[[list[str]], bool]] = {
    "git": lambda arguments: arguments == ["clone", REPOSITORY, "&&", "cd", "torchguard"],
    "make": lambda arguments: set(arguments) <= set(TARGETS),
    "pip": lambda arguments: (
        arguments in (["install", "-e", "."], ["install", f"torchguard-runtime @ git+{REPOSITORY}"])
    ),
    "python": _is_python,
}


def _exists(line: str) -> bool:
    program, *arguments = shlex.split(line, comments=True)
    if program == "PYTHONPATH=src:tests":  # for one command
        program, *arguments = arguments
    return program in COMMANDS and COMMANDS[program](arguments)


def test_commands() -> None:
    """Every command on a page exists."""
    lines = {
        line
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language in {"bash", "sh", "console"}
        for line in block.code.splitlines()
        if line.strip() and not line.startswith("#")
    }
    assert [line for line in sorted(lines) if not _exists(line)] == []


def test_foreign_package() -> None:
    """No page says to install the other package of that name."""
    pattern = re.compile(r"install\s+(-\S+\s+)*torchguard(?![-\w])")
    assert [page for page in PAGES if pattern.search(page.read_text(encoding="utf-8"))] == []


def _broken_links(page: Path, text: str) -> list[str]:
    broken = []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        on_site = target.startswith(SITE)
        inside = target.startswith(FILES) or on_site
        if target.startswith("https://") and not inside:
            continue
        path, _, anchor = target.removeprefix(FILES).removeprefix(SITE).partition("#")
        if on_site:  # each page of the site is written from a file
            path = f"docs/{path.removesuffix('.html') or 'index'}.md"
        folder = ROOT if inside else page.parent
        file = folder / unquote(path) if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    return broken


def _anchors(page: Path) -> set[str]:
    """Headings, as GitHub turns them into anchors, and anchors that are written out."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', text))


def test_links() -> None:
    """Every link leads to a file and a heading."""
    for page in PAGES:
        assert _broken_links(page, page.read_text(encoding="utf-8")) == [], page


def test_absolute_links() -> None:
    """On a package index, and in what a workflow shows, a relative link leads nowhere."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
        assert [target for target in targets if not target.startswith("https://")] == []


def test_addresses() -> None:
    """Every page and file has the repository's address of pyproject.toml; there is one site."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'Documentation = "{SITE}"' in project
    owner, name = REPOSITORY.split("/")[-2:]
    assert f"https://{owner}.github.io/{name}/" == SITE
    folders = ("src", "docs", "tests", "benchmarks", ".github")
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    other = []
    for path in files:
        if path.suffix in {".md", ".py", ".yml", ".toml"}:
            text = path.read_text(encoding="utf-8")
            found = re.findall(r"https://github\.com/[\w-]*/torchguard(?![\w-])", text)
            other += [(path.name, address) for address in found if address != REPOSITORY]
    assert other == []


# What a user imports and can call; the exceptions have their table on a page.
PUBLIC = {
    name
    for name in torchguard._HOME  # type: ignore[attr-defined]
    if not (isinstance(found := getattr(torchguard, name), type) and issubclass(found, Exception))
}
_SLOW = {"doctor", "DoctorReport", "load_sharded", "verified", "verification_report"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in sorted(PUBLIC)],
)
@pytest.mark.filterwarnings("ignore")
def test_example(name: str) -> None:
    """Each public function and class has an example that does what it says."""
    found = getattr(torchguard, name)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(found, name, module=False, globs={}):
        runner.run(test)
    done = runner.summarize(verbose=False)
    assert done.attempted
    assert not done.failed


@pytest.mark.slow
def test_examples_of_private_functions() -> None:
    """They do what they say. (Integrations import what they are for, so they are left out.)"""
    runner = doctest.DocTestRunner()
    for each in pkgutil.walk_packages(torchguard.__path__, "torchguard."):
        if each.name == "torchguard.__main__" or "integrations." in each.name:
            continue
        for test in doctest.DocTestFinder().find(importlib.import_module(each.name)):
            if test.name.removeprefix(f"{each.name}.").partition(".")[0] not in PUBLIC:
                runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries


def test_sections_of_docstrings() -> None:
    """A public function says what its arguments are, what it costs, and shows an example."""
    missing = []
    for name in sorted(PUBLIC & {*torchguard.__all__}):
        found = getattr(torchguard, name)
        text = inspect.getdoc(found) or ""
        needed = ["Cost:", "Example:"]
        needed += ["Args:"] if inspect.signature(found).parameters else []
        missing += [f"{name}: {section}" for section in needed if f"\n{section}\n" not in text]
    assert missing == []


def test_public_names() -> None:
    """Every public name is on a page besides the reference."""
    pages = [page for page in PAGES if page.name != "api.md"]  # which has all of them
    page = "".join(each.read_text(encoding="utf-8") for each in pages)
    functions = [name for name in torchguard.__all__ if not name.startswith("_")]
    assert [name for name in functions if not re.search(rf"\b{name}\b", page)] == []


def test_reference() -> None:
    """The reference has every public name, and no other."""
    pages = [ROOT / "docs" / "reference" / name for name in ("api.md", "errors.md")]
    page = "".join(each.read_text(encoding="utf-8") for each in pages)
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE)
    of_trainers = {name for name in listed if name.startswith("torchguard.integrations.")}
    own = {  # read, for what they import need not be there
        f"torchguard.integrations.{path.stem}.{name}"
        for path in Path(torchguard.__file__).with_name("integrations").glob("[!_]*.py")
        for line in re.findall(r"^__all__ = (\[.*\])$", path.read_text("utf-8"), re.MULTILINE)
        for name in ast.literal_eval(line)
    }
    assert of_trainers == own
    listed = [name for name in listed if name not in of_trainers]
    returned = {name for names in torchguard._RETURNED.values() for name in names}  # type: ignore[attr-defined]
    errors = {
        f"errors.{name}" for name in vars(torchguard.errors) if name.endswith(("Error", "Warning"))
    }
    names = {path.removeprefix("torchguard.") for path in listed}
    assert len(names) == len(listed)
    assert {*torchguard.__all__, *returned} - names == {"__version__"}
    assert names - {*torchguard.__all__} <= returned | errors
    assert {name.rpartition(".")[2] for name in errors} <= {n.rpartition(".")[2] for n in names}


def test_pages_of_defects() -> None:
    """They are what the catalog and the compatibility page say, for each torch of the matrix."""
    made = runpy.run_path(str(ROOT / "docs" / "make_defects.py"))["pages"]()
    folder = ROOT / "docs" / "reference"
    assert {*made} == {folder / "defects.md", *(folder / "defects").glob("*.md")}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "run python docs/make_defects.py"
    sections = "".join(text for path, text in made.items() if path.name != "defects.md")
    # Each reproducer is whole, and needs PyTorch alone.
    programs = [block.code for block in blocks(sections) if block.language == "py"]
    assert len(programs) == sections.count("\n## ") == len(all_ids())
    assert [each for each in programs if _names_from_elsewhere(each) - {"__name__"}] == []
    assert not any("torchguard" in each for each in programs)


def test_printed_addresses_lead_to_a_page() -> None:
    """What the source prints of the site exists: pages, and the anchors of entries."""
    printed = {
        found
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for found in re.findall(rf"^(?:{SITE})?([a-z][\w/-]*)\.html#?([\w-]*)$", node.value)
    }
    assert {"reference/messages", "reference/defects", "reference/events"} <= {*dict(printed)}
    for page, anchor in printed:
        file = ROOT / "docs" / f"{page}.md"
        assert file.exists(), page
        assert not anchor or anchor in _anchors(file), (page, anchor)
    # What follows a "#" is the name of an entry: test_messages.py has those of messages.
    assert {*all_ids()} <= _anchors(ROOT / "docs" / "reference" / "defects.md")


def test_table_of_guards() -> None:
    """It says what the docstring of install says, of each guard."""
    made = runpy.run_path(str(ROOT / "docs" / "make_guards.py"))
    page = (ROOT / "docs" / "process" / "patching.md").read_text(encoding="utf-8")
    assert page == made["page"](), "run python docs/make_guards.py"
    assert all(f'[`"{name}"`]' in page for name in GUARDS)
