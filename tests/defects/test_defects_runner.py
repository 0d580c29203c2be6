"""One process per probe: every way to end has its own verdict, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchguard
from support.planted import planted, row
from support.processes import wait_until_gone
from torchguard.defects import runner
from torchguard.defects.doctor import DoctorReport
from torchguard.defects.runner import Verdict

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


def bare(report: DoctorReport, name: str) -> Verdict:
    return row(report, name).bare


def guarded(report: DoctorReport, name: str) -> Verdict:
    return row(report, name).guarded


class TestBareRun:
    def test_absent(self, report: DoctorReport) -> None:
        """A probe that returns None has not found its defect."""
        assert bare(report, "absent").status == "absent"
        assert guarded(report, "absent").status == "-"
        assert not row(report, "absent").live

    def test_live(self, report: DoctorReport) -> None:
        """The row carries the sentence of the probe."""
        assert bare(report, "live").status == "corrupt"
        assert bare(report, "live").detail == "two plus two was 5"
        assert row(report, "live").live

    def test_output_of_the_probe(self, report: DoctorReport) -> None:
        """A verdict that a probe prints is not taken for its own."""
        assert bare(report, "noisy").detail == "printed a verdict and meant another"

    @posix_only
    @pytest.mark.parametrize(
        ("name", "end"),
        [("segfault", "SIGSEGV"), ("abort", "SIGABRT"), ("quits", "exit status 3")],
    )
    def test_crash(self, report: DoctorReport, name: str, end: str) -> None:
        """A process that dies is a live row with the signal or the exit status."""
        assert (bare(report, name).status, bare(report, name).detail) == ("crash", end)
        assert row(report, name).live

    def test_timeout(self, report: DoctorReport, plugin: Path) -> None:
        """A probe that hangs is killed with every process it has started."""
        assert bare(report, "hang").status == "timeout"
        assert bare(report, "hang").detail == "no answer after 12 seconds"
        assert not row(report, "hang").live
        for pid in (plugin / "hanging").read_text().split():
            assert wait_until_gone(int(pid))
        # Without its pipes a process looks as if it had ended.
        assert bare(report, "hangs-closed").status == "timeout"

    def test_children(self, report: DoctorReport, plugin: Path) -> None:
        """Processes that a probe leaves running end with it, and do not delay its verdict."""
        assert bare(report, "leaves-a-child").status == "absent"
        assert wait_until_gone(int((plugin / "left").read_text()))
        # A forked child has every pipe of its parent, so the runner must not wait for those.
        assert bare(report, "leaves-a-fork").status == "absent"
        assert wait_until_gone(int((plugin / "forked").read_text()))

    def test_not_run(self, report: DoctorReport) -> None:
        """A probe that lacks something is "not run", which is never "closed"."""
        assert bare(report, "not-run").status == "not run"
        assert bare(report, "not-run").detail == "needs two moons"
        assert guarded(report, "not-run").status == "not run"

    def test_exception(self, report: DoctorReport) -> None:
        """A probe that raises is "broken", and the row has the traceback."""
        found = bare(report, "raises")
        assert found.status == "broken"
        assert found.detail == 'KeyError: "the probe\'s own fault"'
        assert "on the way to the error" in found.log
        assert "in raises" in found.log
        assert guarded(report, "raises").status == "-"

    def test_exit_and_wrong_result(self, report: DoctorReport) -> None:
        """A probe that calls sys.exit(), or returns no sentence, is "broken"."""
        assert bare(report, "exits").detail == "SystemExit: 0"
        assert bare(report, "true").status == "broken"
        assert "expected None or one sentence" in bare(report, "true").detail

    def test_core_files(self, report: DoctorReport) -> None:
        """A process that crashes writes no core file."""
        assert bare(report, "limits").detail == "core files of 0 bytes"

    def test_environment(self, report: DoctorReport, plugin: Path) -> None:
        """Switches of the caller's do not reach a probe; it has one thread and a shared cache."""
        assert plugin.exists()
        assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
        seen = json.loads(bare(report, "switches").detail)
        assert seen["TORCH_COMPILE_DISABLE"] is None
        assert seen["OMP_NUM_THREADS"] == "1"
        assert not Path(seen["TORCHINDUCTOR_CACHE_DIR"]).parent.exists()  # temporary

    def test_process(self, report: DoctorReport) -> None:
        """Each probe has a process of its own."""
        names = ("process", "another-process")
        assert len({os.getpid(), *(int(bare(report, name).detail) for name in names)}) == 3


class TestGuardedRun:
    def test_absent(self, report: DoctorReport) -> None:
        """Where the defect is absent there is no guarded run."""
        assert guarded(report, "absent-with-guard").status == "-"

    @pytest.mark.parametrize("name", ["installed", "in-scope"])
    def test_guards(self, report: DoctorReport, name: str) -> None:
        """The guards that the defect names are installed, or their scope is entered."""
        assert bare(report, name).status == "corrupt"
        assert guarded(report, name).status == "closed"

    def test_guarded_probe(self, report: DoctorReport) -> None:
        """A guard that is called has a probe of its own."""
        assert bare(report, "closed").status == "crash"
        assert guarded(report, "closed").status == "closed"
        assert not row(report, "closed").failed

    def test_detected(self, report: DoctorReport) -> None:
        """A guard that only finds the damage makes a row "detected", not "closed"."""
        assert guarded(report, "detected").status == "detected"
        assert not row(report, "detected").failed
        assert guarded(report, "detects-nothing").status == "open"
        assert row(report, "detects-nothing").failed

    @pytest.mark.parametrize(
        ("name", "status", "detail"),
        [
            ("open", "open", "still 5"),
            ("guarded-crash", "open", "crash: SIGSEGV"),
            ("guarded-not-run", "not run", "only the bare run works here"),
            ("guarded-raises", "broken", "OSError: nothing to see"),
        ],
    )
    def test_failed(self, report: DoctorReport, name: str, status: str, detail: str) -> None:
        """A guard that does not close its defect fails, however its run ended."""
        assert (guarded(report, name).status, guarded(report, name).detail) == (status, detail)
        assert row(report, name).failed

    def test_unknown_guard(self, report: DoctorReport) -> None:
        """A guard that does not exist is "broken", and fails."""
        assert guarded(report, "no-such-guard").status == "broken"
        assert "no-such-guard" in guarded(report, "no-such-guard").detail
        assert row(report, "no-such-guard").failed

    def test_no_guard(self, report: DoctorReport) -> None:
        """A live defect without a guard is "open", and does not fail."""
        found = guarded(report, "live")
        assert (found.status, found.detail) == ("open", "no guard yet")
        assert not row(report, "live").failed


def in_front(folder: Path, patch: pytest.MonkeyPatch, sitecustomize: str) -> None:
    """Have every interpreter that is started from here run a few lines first."""
    (folder / "sitecustomize.py").write_text(sitecustomize)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))


class TestServer:
    def test_spawned(
        self, report: DoctorReport, plugin: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Spawned processes give the same rows as forked ones."""
        monkeypatch.setattr(runner, "forking_is_possible", lambda: False)
        names = ("absent", "live", "segfault", "raises", "installed", "leaves-a-child")
        spawned = torchguard.doctor(planted(*names))
        for found in spawned.rows:
            expected = row(report, found.id.removeprefix("planted-"))
            assert found.bare.status == expected.bare.status
            assert found.guarded.status == expected.guarded.status
        assert spawned.environment == report.environment
        (hanging,) = torchguard.doctor(planted("hang"), timeout=4).rows
        assert hanging.bare.status == "timeout"
        assert wait_until_gone(int((plugin / "left").read_text()))

    @pytest.mark.usefixtures("plugin")
    @pytest.mark.skipif(not runner.forking_is_possible(), reason="no process is forked here")
    def test_that_can_not_fork(
        self, report: DoctorReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server with a second thread ends, and the probes are spawned."""
        starts_a_thread = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
        in_front(tmp_path, monkeypatch, starts_a_thread)
        found = torchguard.doctor(planted("live"))
        assert found.rows[0].bare.detail == bare(report, "live").detail

    @pytest.mark.usefixtures("plugin")
    def test_that_dies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no server lives, every row is "broken" and has the server's log."""
        dies = """
import os, sys
if "serve()" in str(sys.orig_argv):
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(9)
"""
        in_front(tmp_path, monkeypatch, dies)
        found = torchguard.doctor(planted("live", "closed"))
        assert {row.bare.status for row in found.rows} == {"broken"}
        assert "out of luck" in found.rows[0].bare.log
        assert found.environment.torch.startswith("unknown (broken: ")

    @posix_only
    @pytest.mark.usefixtures("interruptible")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_that_is_orphaned(self, plugin: Path, tmp_path: Path, number: signal.Signals) -> None:
        """No process outlives a doctor that is interrupted or killed."""
        mark = plugin / "hanging"
        mark.unlink(missing_ok=True)
        line = [sys.executable, "-m", "torchguard", "doctor", "--only", "planted-hang"]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        doctor = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 240
        while not (mark.exists() and mark.read_text().count(" ")) and time.monotonic() < deadline:
            time.sleep(0.05)
        doctor.send_signal(number)
        _, errors = doctor.communicate(timeout=120)
        for pid in mark.read_text().split():
            assert wait_until_gone(int(pid))
        if number is signal.SIGINT:
            assert doctor.returncode == 130
            assert errors.endswith("torchguard doctor: interrupted\n")
            assert "Traceback" not in errors
            assert list(tmp_path.glob("tg-*")) == []
