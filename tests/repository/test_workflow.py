"""The workflow and nox run the same versions."""

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
