"""Adds to the documentation site what is written elsewhere: README, changes, records, catalog."""  # noqa: INP001

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import torchguard
from torchguard.cli.doctor import guards_as_code
from torchguard.defects.catalog import Defect, built_in

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"

_UPSTREAM = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)$")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository; mkdocs calls this with what mkdocs.yml says.

    Not by ``repo_url``, for which the theme asks api.github.com how many stars there are:
    https://squidfunk.github.io/mkdocs-material/setup/adding-a-git-repository/
    """
    link = {"icon": "fontawesome/brands/github", "link": _repository(), "name": "Repository"}
    config.extra["social"] = [link]
    # What writes the reference finds what dir() lists, which leaves out what functions return.
    vars(torchguard)["__dir__"] = lambda: [*torchguard._HOME, "errors"]  # type: ignore[attr-defined]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; mkdocs calls this with the pages it has found."""
    pages = {
        "index.md": _readme(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "license.md": "# License\n\n" + (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "defects.md": _catalog(),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for record in sorted(RECORDS.glob("*.json")):
        files.append(File.generated(config, f"records/{record.name}", abs_src_path=str(record)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links to the records, which lie outside of the pages' folder, to their copies."""
    return markdown.replace("](../benchmarks/records/", "](records/")


def on_page_content(html: str, **_: object) -> str:
    """Take off what Python's own tools read as the kind of a reference: ``:func:``."""
    return re.sub(r":(?:func|class|meth|mod|data):(?=<code>)", "", html)


def _readme() -> str:
    """Return the README with its links, which are absolute, as seen from the pages' folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = f"]({_repository()}/blob/main/"
    pages = {
        "docs/": "",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "LICENSE": "license.md",
    }
    for before, after in pages.items():
        text = text.replace(files + before, f"]({after}")
    # The site fetches nothing: its pictures are its own.
    return text.replace(f"]({_repository()}/raw/main/docs/", "](")


def _repository() -> str:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Repository = "(.*)"$', project, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml says no Repository in [project.urls]")
    return found[1]


def _catalog() -> str:
    """Write a section for each defect, with its status for each torch of the matrix."""
    versions, statuses = _statuses()
    lines = [
        "# Defects",
        "",
        "Every defect that `python -m torchguard doctor` looks for on your torch. The tables say",
        "what its probes saw on each version of the [matrix](compatibility.md).",
    ]
    families = {"memory": "Memory", "compile": "Compiled code", "gradient": "Gradients"}
    rows = [row for row in built_in() if isinstance(row, Defect)]
    for family, title in families.items():
        lines += ["", f"## {title}"]
        for row in rows:
            if row.family == family:
                lines += ["", *_section(row, versions, statuses.get(row.id))]
    return "\n".join(lines) + "\n"


def _section(row: Defect, versions: list[str], seen: list[str] | None) -> Iterator[str]:
    yield f"### {row.id}"
    yield ""
    words = row.summary.split()
    # A name keeps its spelling, a word begins a sentence.
    first = words[0].capitalize() if words[0].isalpha() else f"`{words[0]}`"
    yield " ".join([first, *words[1:]]) + "."
    yield ""
    done = "detected, not prevented, by" if row.only_detects else "closed by"
    yield f"- {done}: " + (f"`{guards_as_code(row.guards)}`" if row.guards else "no guard yet")
    if row.limits:
        yield f"- limits: {row.limits}"
    if row.advice:
        yield f"- meanwhile: {row.advice}"
    if row.upstream:
        yield f"- upstream: {', '.join(map(_link, row.upstream))}"
    if seen:
        yield ""
        yield "| " + " | ".join(versions) + " |"
        yield "| " + " | ".join(["---"] * len(versions)) + " |"
        yield "| " + " | ".join(seen) + " |"


def _link(url: str) -> str:
    found = _UPSTREAM.match(url)
    return f"[{found[1]}#{found[2]}]({url})" if found else f"<{url}>"


def _statuses() -> tuple[list[str], dict[str, list[str]]]:
    """Read the table of defects from the compatibility page: the versions, and a row for each."""
    versions: list[str] = []
    statuses: dict[str, list[str]] = {}
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "defect":
            versions = cells[1:]
        elif versions and re.fullmatch(r"`[a-z0-9-]+`", cells[0]):
            statuses[cells[0].strip("`")] = cells[1:]
    return versions, statuses
