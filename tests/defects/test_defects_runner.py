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

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


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

    def test_processes(self, report: DoctorReport, plugin: Path) -> None:
        """What a probe leaves running ends with it, and does not delay its verdict."""
        # A forked child has every pipe of its parent, so the runner must not wait for those.
        for name in ("leaves-a-child", "leaves-a-fork"):
            assert row(report, name).bare.status == "absent"
        for name in ("hanging", "left", "forked"):
            for pid in (plugin / name).read_text().split():
                assert wait_until_gone(int(pid))

    def test_exception(self, report: DoctorReport) -> None:
        """A probe that raises has its output and the traceback in the row."""
        log = row(report, "raises").bare.log
        assert "on the way to the error" in log
        assert "in raises" in log

    def test_environment(self, report: DoctorReport, plugin: Path) -> None:
        """Switches of the caller's do not reach a probe; it has one thread and a shared cache."""
        assert plugin.exists()
        assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
        seen = json.loads(row(report, "switches").bare.detail)
        assert seen["TORCH_COMPILE_DISABLE"] is None
        assert seen["OMP_NUM_THREADS"] == "1"
        assert not Path(seen["TORCHINDUCTOR_CACHE_DIR"]).parent.exists()  # temporary

    def test_process(self, report: DoctorReport) -> None:
        """Each probe has a process of its own."""
        names = ("process", "another-process")
        assert len({os.getpid(), *(int(row(report, name).bare.detail) for name in names)}) == 3


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
        names = ("segfault", "raises", "installed", "leaves-a-child")
        spawned = torchguard.doctor(planted(*names))
        for found in spawned.rows:
            expected = row(report, found.id.removeprefix("planted-"))
            assert found.bare.status == expected.bare.status
            assert found.guarded.status == expected.guarded.status
        assert spawned.environment == report.environment
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
        assert found.rows[0].bare.detail == row(report, "live").bare.detail

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
