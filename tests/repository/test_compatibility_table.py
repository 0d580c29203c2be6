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
    suite = f'<testsuite time="60" timestamp="2026-11-22T01:02:03">{cases}</testsuite>'
    path.write_text(f"<testsuites>{suite}</testsuites>", encoding="utf-8")


def write_report(path: Path) -> None:
    def row(name: str, bare: str, guarded: str, *guards: str) -> dict[str, object]:
        return {
            "id": name,
            "bare": {"status": bare},
            "guarded": {"status": guarded},
            "guards": list(guards),
        }

    rows = [
        row("absent-one", "absent", "absent", "out"),
        row("closed-one", "corrupt", "closed", "out"),
        row("found-one", "corrupt", "detected", "check_consistent"),
        row("open-one", "corrupt", "open", "out"),
        row("bare-one", "corrupt", "open"),
        row("gpu-one", "not run", "not run", "out"),
    ]
    path.write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}), encoding="utf-8")


def test_torch_version(script: ModuleType, tmp_path: Path) -> None:
    """A version of torch is a row of tests and a column of defects."""
    for version in ("2.11.0", "2.9.1"):
        write_report(tmp_path / f"torch-{version}.json")
        write_junit(tmp_path / f"torch-{version}.xml", {"a": "", "b": FAILED, "c": "<skipped/>"})
    page = script.tables(script.read(tmp_path))
    assert (
        page.count("| 2.9.1+cpu | CPython 3.11.7 | Linux | none | 1 | 1 | 0 | 1 | 0 | 1.0 |") == 2
    )
    assert "| defect | 2.9.1 | 2.11.0 |" in page
    for name, word in {
        "absent-one": "-",
        "closed-one": "closed",
        "found-one": "detected",
        "open-one": "open",
        "bare-one": "no guard yet",
        "gpu-one": "not run",
    }.items():
        assert f"| `{name}` | {word} | {word} |" in page


def test_python_version(script: ModuleType, tmp_path: Path) -> None:
    """A version of Python is a row of tests alone."""
    for name in ("python-3.13", "python-3.9", "torch-2.9.1"):
        write_report(tmp_path / f"{name}.json")
        write_junit(tmp_path / f"{name}.xml", {"a": ""})
    results = script.read(tmp_path)
    assert [result.asked for result in results] == ["2.9.1", "3.9", "3.13"]
    page = script.tables(results)
    assert page.count("| 2.9.1+cpu | CPython 3.11.7 | Linux |") == 3
    assert "| defect | 2.9.1 |\n" in page


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


def test_second_run(script: ModuleType, tmp_path: Path) -> None:
    """A test that failed and passed later has a count of its own."""
    write_report(tmp_path / "torch-2.9.1.json")
    first = {"kept": "", "mended": FAILED, "still wrong": FAILED, "not run again": FAILED}
    write_junit(tmp_path / "torch-2.9.1.xml", first)
    write_junit(
        tmp_path / "torch-2.9.1.again.xml", {"kept": "", "mended": "", "still wrong": FAILED}
    )
    [result] = script.read(tmp_path)
    assert result.tests["passed"] == 1
    assert result.tests["failed"] == 2
    assert result.tests[script.MENDED] == 1


def test_unfinished(script: ModuleType, tmp_path: Path) -> None:
    """A session that has not ended is left out."""
    write_report(tmp_path / "torch-2.9.1.json")
    assert script.read(tmp_path) == []
