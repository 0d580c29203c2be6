"""The programs of the page of defects: each shows its defect in PyTorch alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from support.child_process import run_command
from torchguard.defects.catalog import all_ids, find

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "make_defects.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in all_ids() if n not in MADE["NEED_A_GPU"]])
def test_a_reproducer_shows_its_defect_if_this_torch_has_it(name: str) -> None:
    program = MADE["reproducer"](find(name))
    done = run_command([sys.executable, "-c", program])
    crashed = done.returncode < 0  # some of the defects end the process
    assert crashed or done.returncode == 0, done.stderr
    page = (DOCS / "project" / "compatibility.md").read_text(encoding="utf-8")
    versions, seen = MADE["statuses"](page)
    version = torch.__version__.partition("+")[0]
    if version in versions and name in seen:
        absent = seen[name][versions.index(version)] == "-"
        assert absent == (not crashed and done.stdout.strip() == "None")
