"""How README and the pages are written: what of it a test can hold."""

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

NOBODY_SEARCHES_FOR = [
    r"\bforeign memory\b",
    r"\bwholly\b",
    r"\bmend(?:s|ed)?\b",
    r"\banew\b",
    r"\bbut for\b",
]
"""Words that a reader would not type, with better ones: out-of-bounds memory, completely,
fix, again, except."""


@pytest.mark.parametrize("word", NOBODY_SEARCHES_FOR)
def test_pages_use_words_that_people_search_for(word: str) -> None:
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(word, line, re.IGNORECASE)
    ]
    assert found == []


def test_the_readme_is_one_screen() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(readme) <= 6500
    assert len(re.findall(r"`[^`]+`", prose)) <= 40
