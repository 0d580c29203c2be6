"""The notebook of docs/tutorials: its cells run, and print what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.child_process import run_python

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "three-failures.ipynb"
ENDS = "\x1e\n"
"""What the program prints behind each cell."""


@pytest.mark.slow
def test_the_cells_print_what_the_notebook_shows(tmp_path: Path) -> None:
    """One after the other, in one process, as Jupyter runs them; it need not be installed."""
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    end = f"\nprint({ENDS[0]!r}, flush=True)\n"
    done = run_python(end.join("".join(cell["source"]) for cell in cells) + end, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = ["".join(text for out in cell["outputs"] for text in out["text"]) for cell in cells]
    assert done.stdout.split(ENDS)[:-1] == shown
    assert sum(map(bool, shown)) == 5
