"""``torchguard.doctor``: its arguments, its progress, its report, and the catalog as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import torchguard
from support.planted import planted
from torchguard.defects.catalog import all_defects
from torchguard.defects.doctor import DoctorProgress, DoctorReport


@pytest.mark.parametrize(
    ("only", "options", "message"),
    [
        (["resize-lock"], {}, r"no defect 'resize-lock'.*mean resize-locked"),
        (["resize-locked"], {"family": "gradient"}, "resize-locked is of the family 'memory'"),
        (None, {"family": "graphics"}, "memory, compile, gradient"),
        (["resize-locked"], {"jobs": 0}, "jobs"),
        (["resize-locked"], {"timeout": -1.0}, "timeout"),
    ],
)
def test_wrong_arguments(only: Any, options: dict[str, Any], message: str) -> None:
    """The error names what there is."""
    with pytest.raises(ValueError, match=message):
        torchguard.doctor(only, **options)
    assert torchguard.doctor([]).rows == ()


@pytest.mark.usefixtures("plugin")
def test_progress() -> None:
    """Each step names what runs, counts the rows, and estimates the rest."""
    steps: list[DoctorProgress] = []
    names = planted("absent", "closed")
    torchguard.doctor(names, progress=steps.append)
    assert {name for step in steps for name in step.running} == set(names)
    assert [step.done for step in steps if step.row is not None] == [1, 2]
    assert {step.total for step in steps} == {2}
    assert steps[-1].running == ()
    left = [step.remaining for step in steps]
    assert left[0] is not None
    assert left[0] > 1
    assert left[-1] == 0


def test_json(report: DoctorReport) -> None:
    """A report survives the round trip through JSON; a document of another format is refused."""
    assert DoctorReport.from_json(report.to_json()) == report
    document = json.loads(report.to_json())
    assert document["exit_status"] == report.exit_status == 1
    with pytest.raises(ValueError, match="format 2, got format 1"):
        DoctorReport.from_json(json.dumps({**document, "format": 1}))
    assert report.environment.torch == torch.__version__
    assert report.environment.foreign is None


@pytest.mark.slow
def test_whole_table() -> None:
    """On the torch at hand every row has an answer, and every guard closes its defect."""
    line = [sys.executable, "-m", "torchguard", "doctor", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    report = DoctorReport.from_json(done.stdout)
    assert [row.id for row in report.rows] == [row.id for row in all_defects()]
    unanswered = [row for row in report.rows if row.bare.status in {"timeout", "broken"}]
    assert unanswered == []
    assert report.failed == ()
    assert done.returncode == 0
    # A table in which everything is absent would show nothing of the guards: these two defects
    # are live on every torch there is.
    closed = {row.id for row in report.rows if row.guarded.status == "closed"}
    assert closed >= {"resize-locked", "resize-shared"}
