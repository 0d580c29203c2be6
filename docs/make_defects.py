"""Writes ``docs/reference/defects.md``: a section for each defect of the catalog.

``python docs/make_defects.py`` after the catalog or ``docs/project/compatibility.md`` has
changed; a test compares the page with this.
"""  # noqa: INP001

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torchguard.cli.doctor import guards_as_code
from torchguard.defects.catalog import Defect, built_in

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "defects.md"

_FAMILIES = {
    "memory": "Tensors, files and training steps",
    "compile": "Compiled code",
    "gradient": "Gradients",
}
_UPSTREAM = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)$")
_LIVE = {"closed", "detected", "open"}
_INTRODUCTION = """\
# Known PyTorch defects

Each section names what you see, the torch releases on which the probe saw it, what helps in PyTorch
alone, and the guard that closes it. `python -m torchguard doctor --only NAME` tries one on your
torch. The words in the tables are those of [compatibility](../project/compatibility.md): `-`
absent, `closed` live and closed by its guard, `detected` live and found after it has happened,
`no guard` live.
"""


def page() -> str:
    """Return the whole page."""
    versions, seen = statuses((DOCS / "project" / "compatibility.md").read_text(encoding="utf-8"))
    rows = [row for row in built_in() if isinstance(row, Defect)]
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
    return [header[place].removeprefix("torch ") for place in columns], found


def _section(row: Defect, versions: list[str], seen: list[str] | None) -> Iterator[str]:
    yield f"### {row.id}\n"
    words = row.summary.split()
    # A name keeps its spelling, a word begins a sentence.
    first = words[0].capitalize() if words[0].isalpha() else f"`{words[0]}`"
    yield " ".join([first, *words[1:]]) + ".\n"
    does = "Detected, not prevented, by" if row.only_detects else "Closed by"
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
        if not row.guards:  # the matrix may be older than the day on which its guard went
            seen = ["no guard" if cell in _LIVE else cell for cell in seen]
        yield "| " + " | ".join(seen) + " |\n"
    yield f"The probe:\n\n```text\n{_source(row.probe)}```\n"


def _source(probe: Callable[..., object]) -> str:
    """Return the code that shows the defect, without the decorators that name it."""
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(probe))).splitlines(keepends=True)
    start = next(place for place, line in enumerate(lines) if line.startswith("def "))
    return "".join(lines[start:])


def _link(url: str) -> str:
    found = _UPSTREAM.match(url)
    return f"[{found[1]}#{found[2]}]({url})" if found else f"<{url}>"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
