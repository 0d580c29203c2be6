"""repository/typed/api.py runs, and satisfies pyright (and mypy)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.child_process import output_of, run_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "tests" / "repository" / "typed" / "api.py"


def test_the_program_runs(tmp_path: Path) -> None:
    output_of(PROGRAM.read_text(encoding="utf-8"), folder=tmp_path)


def pyright(path: Path) -> Any:
    line = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    return json.loads(run_command([*line, "--project", str(path)]).stdout)


@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None,
    reason="basedpyright, of the extra `dev`, is not installed",
)
def test_pyright_likes_the_program_and_finds_a_wrong_one(tmp_path: Path) -> None:
    found = pyright(ROOT / "pyproject.toml")
    assert found["summary"]["filesAnalyzed"] == 1
    assert found["generalDiagnostics"] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torchguard\ntorchguard.safe_resize_([1], 2)\ntorchguard.install(1)\n"
        "torchguard.install('rezise')\ntorchguard.uninstall('rezise')\n"
        "_ = torchguard.bucketed(len, dims={'x': {'t': 1}}, buckets=[8])\n"
        "_ = torchguard.bucketed(len, dims={'x': {1: 't'}}, buckets=[8], verify='never')\n"
        "_ = torchguard.bucketed(len, dims={'a': {'b': {1: 't'}, 'c': None}, 'd': [{0: 's'}]})\n"
    )
    config = {"include": ["wrong.py"], "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    lines = [each["range"]["start"]["line"] for each in pyright(tmp_path)["generalDiagnostics"]]
    assert set(lines) == {1, 2, 3, 4, 5, 6}
