"""``torchguard.doctor``: its arguments, its progress, its report."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import torchguard
from support.planted import planted
from torchguard.defects.doctor import DoctorProgress, DoctorReport


class TestArguments:
    def test_unknown_id(self) -> None:
        """The error names the nearest identifier."""
        with pytest.raises(ValueError, match=r"no defect 'resize-lock'.*mean resize-locked"):
            torchguard.doctor(["resize-lock"])

    def test_other_family(self) -> None:
        """A defect that is not of the family is an error, not an empty report."""
        with pytest.raises(ValueError, match="resize-locked is of the family 'memory'"):
            torchguard.doctor(only=["resize-locked"], family="gradient")

    def test_unknown_family(self) -> None:
        """The error names the families."""
        with pytest.raises(ValueError, match="memory, compile, gradient"):
            torchguard.doctor(family="graphics")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("option", "message"), [({"jobs": 0}, "jobs"), ({"timeout": -1.0}, "timeout")]
    )
    def test_not_positive(self, option: dict[str, Any], message: str) -> None:
        """Numbers have to be positive."""
        with pytest.raises(ValueError, match=message):
            torchguard.doctor(["resize-locked"], **option)

    def test_nothing(self) -> None:
        """No defect to probe gives an empty report."""
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


class TestReport:
    def test_json(self, report: DoctorReport) -> None:
        """A report survives the round trip through JSON."""
        assert DoctorReport.from_json(report.to_json()) == report
        assert json.loads(report.to_json())["exit_status"] == report.exit_status == 1

    def test_other_format(self, report: DoctorReport) -> None:
        """A document of another format is refused."""
        document = {**json.loads(report.to_json()), "format": 1}
        with pytest.raises(ValueError, match="format 2, got format 1"):
            DoctorReport.from_json(json.dumps(document))

    def test_environment(self, report: DoctorReport) -> None:
        """It names the torch that the probes ran on."""
        assert report.environment.torch == torch.__version__
        assert report.environment.foreign is None
