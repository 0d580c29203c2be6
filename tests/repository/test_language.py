"""How README and the pages are written: what of the rules can be counted.

The rules: a sentence has a named subject or "you"; a condition is "if" or "when"; one fact a
sentence; few nouns that begin with "what" or "one that"; plain verbs. Pages that are written by a
program, and the changes, are not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = {"benchmarks.md", "defects.md", "compatibility.md", "changelog.md", "license.md"}
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED),
]


def sentences(page: str) -> list[str]:
    """Return the sentences of a page: no code, tables, headings, comments or targets of links."""
    text = re.sub(r"^(```|:::).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[)", line)]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*>]|\d+\.) ", f"\n{text}")
    found = []
    for paragraph in paragraphs:
        words = re.sub(r"^(?:[-*>]|\d+\.) ", "", " ".join(paragraph.split()))
        found += [each for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[\"])", words) if " " in each]
    return found


ALL = [sentence for page in PAGES for sentence in sentences(page.read_text(encoding="utf-8"))]


def share(pattern: str) -> float:
    """Return how many of the sentences match, in percent."""
    return 100 * sum(bool(re.search(pattern, each)) for each in ALL) / len(ALL)


# Not an indirect question ("says what is missing"), and not a question.
_ASKS = ["say", "says", "said", "tell", "tells", "see", "sees", "show", "shows", "know", "knows"]
_WHAT = "(?i)" + "".join(rf"(?<!\b{verb} )" for verb in _ASKS) + r"(?<!\w)what \w+(?=.*[^?]$)"

_TRANSLATED = (
    r"\bbut for\b|\bgo(?:es)? on\b|\bof (?:yours|ours)\b|\b(?:is|are) no [a-z]+"
    r"|\b(?:put|puts|give|gives|come|comes|bring|brings) (?:\w+ )?back\b"
    r"|\b(?:is|are) (?:as )?(?:it|they) (?:was|were)\b|\bas (?:it was|they were)\b"
)

AT_MOST = {
    "what as a noun": (_WHAT, 1.5),
    "begins with Where": (r"^Where\b", 0.3),
    "a semicolon": (r";", 5.0),
    "one that, one of, one in": (r"\bone (?:that|of|in)\b", 1.5),
    "translated": (_TRANSLATED, 0.3),
}


@pytest.mark.parametrize("name", AT_MOST)
def test_few_sentences_are_written_like_this(name: str) -> None:
    pattern, limit = AT_MOST[name]
    found = [each for each in ALL if re.search(pattern, each)]
    assert share(pattern) <= limit, "\n".join(found)


def test_many_sentences_address_the_reader() -> None:
    assert share(r"(?i)\byou(?:r|rs)?\b") >= 15


def test_the_readme_is_one_screen() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(readme) <= 6500
    assert len(re.findall(r"`[^`]+`", prose)) <= 40
