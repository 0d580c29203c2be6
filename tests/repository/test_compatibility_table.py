"""The page of versions says what the matrix has found."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "make_compatibility.py"

ENVIRONMENT = {
    "torch": "2.9.1+cpu",
    "python": "CPython 3.11.7",
    "platform": "Linux-6",
    "gpu": "none",
}
FAILED = "<failure/>"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "make_compatibility", module)
        spec.loader.exec_module(module)
    return module


def write_junit(path: Path, outcomes: dict[str, str]) -> None:
    cases = "".join(
        f'<testcase classname="tests" name="{name}">{outcome}</testcase>'
        for name, outcome in outcomes.items()
    )
    head = '<testsuite name="abc1234" time="60" timestamp="2026-11-22T01:02:03">'
    path.write_text(f"<testsuites>{head}{cases}</testsuite></testsuites>", encoding="utf-8")


def write_report(path: Path) -> None:
    rows = [
        {"id": f"{name}-one", "bare": {"status": bare}, "guarded": {"status": now}, "guards": by}
        for name, bare, now, by in (
            ("absent", "absent", "absent", ["out"]),
            ("closed", "corrupt", "closed", ["out"]),
            ("found", "corrupt", "detected", ["check_consistent"]),
            ("open", "corrupt", "open", ["out"]),
            ("bare", "corrupt", "open", []),
            ("gpu", "not run", "not run", ["out"]),
        )
    ]
    path.write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}), encoding="utf-8")


def test_table(script: ModuleType, tmp_path: Path) -> None:
    """Each version is a column: its tests, where they have run, and what the doctor has found."""
    for name in ("torch-2.11.0", "torch-2.9.1", "python-3.9"):
        write_report(tmp_path / f"{name}.json")
        if name != "python-3.9":
            write_junit(tmp_path / f"{name}.xml", {"a": "", "b": FAILED, "c": "<skipped/>"})
    table = script.table(script.read(tmp_path))
    assert table.startswith("|  | torch 2.9.1 | torch 2.11.0 | python 3.9 |\n")
    for name, tested, doctor_alone in (
        ("torch", "2.9.1+cpu", "2.9.1+cpu"),
        ("Python", "3.11.7", "3.11.7"),
        ("commit", "abc1234, 2026-11-22", "not run"),
        ("minutes of tests", "1", "not run"),
        ("tests passed", "1", "not run"),
        ("tests failed", "1", "not run"),
        ("tests skipped", "1", "not run"),
        *((f"`{name}-one`", name, name) for name in ("closed", "open")),
        ("`absent-one`", "-", "-"),
        ("`found-one`", "detected", "detected"),
        ("`bare-one`", "no guard", "no guard"),
        ("`gpu-one`", "not run", "not run"),
    ):
        assert f"\n| {name} | {tested} | {tested} | {doctor_alone} |" in table
    assert "expected to fail" not in table


def test_workflow() -> None:
    """The workflow and nox run the same versions."""
    root = SCRIPT.parent.parent
    nox = (root / "noxfile.py").read_text(encoding="utf-8")
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    for name, key in (("TORCH_VERSIONS", "torch"), ("PYTHON_VERSIONS", "python")):
        listed = re.search(rf"^{name} = \((.*)\)$", nox, re.MULTILINE)
        run = re.search(rf"^ +{key}: \[(.*)\]$", workflow, re.MULTILINE)
        assert listed is not None
        assert run is not None
        assert run[1] == listed[1]
