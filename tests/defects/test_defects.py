"""The doctor: a process for each probe, a verdict for each end; the catalog; the report."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.child_process import output_of, started, wait_until_gone
from support.planted import STEPS, row
from torchguard.defects.catalog import FAMILIES, all_defects, all_ids
from torchguard.defects.diagnosis import DoctorReport


class TestBareRun:
    @pytest.mark.parametrize(
        ("name", "status", "detail"),
        [
            ("absent", "absent", ""),
            ("live", "corrupt", "two plus two was 5"),
            # A verdict that a probe prints is not taken for its own.
            ("noisy", "corrupt", "printed a verdict and meant another"),
            # A process that dies is a live row with the signal or the exit status.
            ("segfault", "crash", "SIGSEGV"),
            ("abort", "crash", "SIGABRT"),
            ("quits", "crash", "exit status 3"),
            ("not-run", "not run", "needs two moons"),
            ("raises", "broken", 'KeyError: "the probe\'s own fault"'),
            ("exits", "broken", "SystemExit: 0"),
            ("true", "broken", "expected None or one sentence"),
            ("limits", "corrupt", "core files of 0 bytes"),
            ("hang", "timeout", "no answer after 12 seconds"),
            # Without its pipes a process looks as if it had ended.
            ("hangs-closed", "timeout", "no answer after 12 seconds"),
        ],
    )
    def test_verdict(self, report: DoctorReport, name: str, status: str, detail: str) -> None:
        """Each way to end has its own; a defect that was shown, or a crash, is live."""
        found = row(report, name)
        assert found.bare.status == status
        assert detail in found.bare.detail
        assert found.live == (status in {"corrupt", "crash"})

    def test_processes(self, report: DoctorReport, with_planted: Path) -> None:
        """What a probe leaves running ends with it, and does not delay its verdict."""
        # A forked child has every pipe of its parent, so the runner must not wait for those.
        for name in ("leaves-a-child", "leaves-a-fork"):
            assert row(report, name).bare.status == "absent"
        for name in ("hanging", "left", "forked"):
            for pid in (with_planted / name).read_text().split():
                assert wait_until_gone(int(pid))

    def test_exception(self, report: DoctorReport) -> None:
        """A probe that raises has its output and the traceback in the row."""
        log = row(report, "raises").bare.log
        assert "on the way to the error" in log
        assert "in raises" in log

    def test_environment(self, report: DoctorReport, with_planted: Path) -> None:
        """Switches of the caller's do not reach a probe; it has one thread and a shared cache."""
        assert with_planted.exists()
        assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
        seen = json.loads(row(report, "switches").bare.detail)
        assert seen["TORCH_COMPILE_DISABLE"] is None
        assert seen["OMP_NUM_THREADS"] == "1"
        assert not Path(seen["TORCHINDUCTOR_CACHE_DIR"]).parent.exists()  # temporary


@pytest.mark.parametrize(
    ("name", "status", "detail", "failed"),
    [
        # Where the defect is absent, or the bare run says nothing, there is no guarded run.
        ("absent", "-", "", False),
        ("absent-with-guard", "-", "", False),
        ("raises", "-", "", False),
        ("not-run", "not run", "", False),  # which is never "closed"
        ("live", "open", "no guard yet", False),
        ("installed", "closed", "", False),
        ("in-scope", "closed", "", False),
        ("closed", "closed", "", False),  # a guard that is called has a probe of its own
        ("detected", "detected", "", False),  # it only finds the damage
        ("detects-nothing", "open", "", True),
        ("open", "open", "still 5", True),
        ("guarded-crash", "open", "crash: SIGSEGV", True),
        ("guarded-not-run", "not run", "only the bare run works here", True),
        ("guarded-raises", "broken", "OSError: nothing to see", True),
        ("no-such-guard", "broken", "no-such-guard", True),
    ],
)
def test_guarded_run(
    report: DoctorReport, name: str, status: str, detail: str, *, failed: bool
) -> None:
    """A guard that does not close its defect fails, however its run ended."""
    found = row(report, name)
    assert found.guarded.status == status
    assert detail in found.guarded.detail
    assert found.failed == failed


class TestSupervisor:
    def test_that_dies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no supervisor lives, every row is "broken" and has its log."""
        dies = """
import os, sys
if "supervise()" in str(sys.orig_argv):
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(9)
"""
        (tmp_path / "sitecustomize.py").write_text(dies)  # what each interpreter runs first
        monkeypatch.syspath_prepend(str(tmp_path))
        found = torchguard.doctor(["resize-locked", "index-partial"])
        assert {row.bare.status for row in found.rows} == {"broken"}
        assert "out of luck" in found.rows[0].bare.log
        assert found.environment.torch.startswith("unknown (broken: ")

    def test_a_long_temporary_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The path of a socket has at most 108 bytes."""
        folder = tmp_path / ("x" * 100)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        [found] = torchguard.doctor(["resize-locked"]).rows
        assert found.bare.status == "corrupt"

    @pytest.mark.usefixtures("interruptible")
    @pytest.mark.parametrize(
        "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
    )
    def test_that_is_orphaned(
        self, with_planted: Path, tmp_path: Path, number: signal.Signals
    ) -> None:
        """No process outlives a doctor that is interrupted or killed."""
        mark = with_planted / "hanging"
        mark.unlink(missing_ok=True)
        line = [sys.executable, "-m", "torchguard", "doctor", "planted-hang"]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        with started(line, env=environment) as doctor:
            while doctor.poll() is None and not (mark.exists() and " " in mark.read_text()):
                time.sleep(0.05)
            doctor.send_signal(number)
            _, errors = doctor.communicate()
            for pid in mark.read_text().split():
                assert wait_until_gone(int(pid))
        if number is signal.SIGINT:
            assert doctor.returncode == 130
            assert errors.endswith("torchguard doctor: interrupted\n")
            assert "Traceback" not in errors
            assert list(tmp_path.glob("tg-*")) == []


OWN = all_defects()


class TestOwn:
    def test_complete(self) -> None:
        """Every defect that a file of probes/ defines is in, by family and then by id."""
        keys = [(FAMILIES.index(row.family), row.id) for row in OWN]
        assert keys == sorted(keys)
        assert sorted(row.id for row in OWN) == all_ids()  # read from the files
        assert len(OWN) >= 37

    def test_texts(self) -> None:
        """Each says what goes wrong, where it is discussed, and what to do."""
        for own in OWN:
            assert 20 < len(own.summary) <= 90, own.id
            assert all(url.startswith("https://") for url in own.upstream), own.id
            assert own.guards or own.advice, own.id


def test_the_catalog_imports_no_compiler() -> None:
    program = """
        import sys
        from torchguard.defects.catalog import all_defects
        all_defects()
        print("torch._dynamo" in sys.modules)
    """
    assert output_of(program) == "False\n"


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


def test_progress(report: DoctorReport) -> None:
    """It is called with each row, once."""
    assert sorted(row.id for row in STEPS) == sorted(row.id for row in report.rows)


def test_json(report: DoctorReport) -> None:
    """A report is one document, with a row for each defect."""
    document = json.loads(report.to_json())
    assert document["format"] == 2
    assert document["exit_status"] == report.exit_status == 1
    assert [row["id"] for row in document["rows"]] == [row.id for row in report.rows]
    assert document["environment"]["torch"] == report.environment.torch == torch.__version__
    assert report.environment.foreign is None
