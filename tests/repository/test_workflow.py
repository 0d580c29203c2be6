"""The workflows run the versions of nox, and actions that nobody can exchange."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_workflow() -> None:
    """The workflow and nox run the same versions."""
    nox = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    for name, key in (("TORCH_VERSIONS", "torch"), ("PYTHON_VERSIONS", "python")):
        listed = re.search(rf"^{name} = \((.*)\)$", nox, re.MULTILINE)
        run = re.search(rf"^ +{key}: \[(.*)\]$", workflow, re.MULTILINE)
        assert listed is not None
        assert run is not None
        assert run[1] == listed[1]


def test_actions_are_pinned_by_hash() -> None:
    """A tag can be moved to other code."""
    used = [
        line
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    ]
    assert len(used) > 5
    assert [line for line in used if not re.search(r"@[0-9a-f]{40}  # v\d", line)] == []
