"""``python -m torchguard doctor``: options, exit status, table, lines and progress."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchguard
from support.planted import distribution, only, planted, row
from support.terminal import Terminal
from torchguard.__main__ import main
from torchguard.cli import doctor as doctor_command
from torchguard.cli.doctor import lines, shown_on, table, wrapped
from torchguard.defects.doctor import DoctorProgress, DoctorReport


@pytest.fixture(scope="module")
def report(plugin: Path) -> DoctorReport:
    """Rows of each kind, but for those that wait for a timeout."""
    del plugin
    names = ("absent", "live", "segfault", "not-run", "raises", "installed", "closed", "detected")
    return torchguard.doctor(planted(*names, "open"))


class TestTable:
    @pytest.mark.parametrize("width", [80, 140])
    def test_width(self, report: DoctorReport, width: int) -> None:
        """The table keeps to its width and loses no word; it has colors only when asked."""
        shown = table(report, width=width)
        assert max(map(len, shown.splitlines())) <= width
        words = " ".join(shown.split())
        for found in report.rows:
            assert f"{found.id} " in words
        for text in (
            "until then: count again",
            "with the guard on: still 5",
            'install("resize")',
            "crash (SIGSEGV):",
            "look before you read",  # what the guard leaves open
        ):
            assert text in words
        assert "\x1b" not in shown
        assert "\x1b[32mclosed\x1b[0m" in table(report, color=True)

    @pytest.mark.parametrize("form", [table, lines])
    def test_counts_and_environment(self, report: DoctorReport, form: Any) -> None:
        """What is detected is counted apart from what is closed; at the end, what it ran on."""
        rows = tuple(row(report, name) for name in ("closed", "installed", "detected", "open"))
        shown = form(DoctorReport(rows, report.environment))
        counted = " ".join(shown.split())
        assert "4 live; 2 of those closed by their guards; 1 detected, not prevented; " in counted
        assert "1 open in spite of their guards; 0 open, no guard yet" in counted
        assert "NOT CLOSED: planted-open torch" in counted
        *_, torch, python, platform, gpu, ours, foreign = shown.splitlines()
        for fact in (torch, python, platform, gpu, ours):
            assert fact.partition(" ")[0] in {"torch", "Python", "platform", "GPU", "torchguard"}
        assert foreign == "the foreign distribution named torchguard is not installed"

    def test_foreign_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It warns of the distribution that owns the same folder."""
        distribution(tmp_path, "torchguard", "9.9")
        monkeypatch.syspath_prepend(str(tmp_path))
        found = torchguard.doctor([])
        assert found.rows == ()
        assert found.environment.foreign == "9.9"
        assert "WARNING: the distribution torchguard 9.9 is installed" in table(found)

    def test_lines(self, report: DoctorReport) -> None:
        """As plain text each defect is one line; on a terminal without rich they fit its width."""
        text = lines(report)
        assert len(text.splitlines()) == len(report.rows) + 1 + 2 + 1 + 6
        assert (
            "\nplanted-detected: crash (SIGSEGV), detected; planted: detected; "
            "guard: check_consistent(); look before you read\n"
        ) in text
        shown = wrapped(text, 60)
        assert max(map(len, shown.splitlines())) < 60
        assert shown.split() == text.split()
        assert "\n\n" in shown


@pytest.mark.usefixtures("plugin")
class TestCommand:
    def test_lines(self, tmp_path: Path) -> None:
        """It ends with 0 when every live defect that has a guard is closed; it needs no rich."""
        (tmp_path / "rich.py").write_text("raise SystemExit('rich was imported')")
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        names = only("absent", "segfault", "closed", "installed", "detected")
        done = subprocess.run(
            [sys.executable, "-m", "torchguard", "doctor", *names],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "[5/5] planted-" in done.stderr
        assert "planted-segfault: crash (SIGSEGV), open, no guard yet" in done.stderr
        assert "planted-closed" in done.stdout
        assert "planted-detected: crash (SIGSEGV), detected" in done.stderr

    def test_json(self, capfd: pytest.CaptureFixture[str]) -> None:
        """--json prints one document and nothing else, whatever a plug-in prints."""
        assert main(["doctor", "--json", *only("noisy", "open")]) == 1
        shown = capfd.readouterr()
        found = DoctorReport.from_json(shown.out)
        assert [row.id for row in found.rows] == planted("noisy", "open")
        assert set(shown.err.splitlines()) == {"noise"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only", "planted-liv"], "did you mean planted-live"),
            (["--only", ""], "no defect ''"),
            (
                ["--only", "resize-locked", "--family", "compile"],
                "nothing to probe in the family 'compile': resize-locked is of the family 'memory'",
            ),
            (["--family", "graphics"], "invalid choice: 'graphics'"),
            (["--jobs", "0"], "argument --jobs"),
            (["--timeout", "soon"], "argument --timeout"),
            (["extra"], "unrecognized arguments: extra"),
        ],
    )
    def test_bad_usage(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It ends with 2."""
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.out == ""


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    """Where its output is not read to the end, as by ``head``."""
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-c", "from torchguard.cli import write; write('a report')"]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, check=True)
    os.close(writing)
    assert not done.stderr


@pytest.mark.parametrize(
    ("switches", "environment", "colored"),
    [
        ([], {}, True),
        (["--no-color"], {}, False),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"NO_COLOR": ""}, True),  # https://no-color.org: "not an empty string"
        ([], {"TERM": "dumb"}, False),
    ],
)
def test_on_a_terminal(
    report: DoctorReport,
    monkeypatch: pytest.MonkeyPatch,
    switches: list[str],
    environment: dict[str, str],
    colored: bool,
) -> None:
    """It is a table, with colors unless they are switched off; 1 when a guard fails."""
    monkeypatch.setattr(doctor_command, "doctor", lambda *_, **__: report)
    monkeypatch.setattr(sys, "stdout", Terminal())
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", *switches]) == 1
    assert isinstance(sys.stdout, Terminal)
    shown = sys.stdout.getvalue()
    assert ("\x1b[32mclosed\x1b[0m" in shown) is colored
    assert ("\x1b" in shown) is colored
    assert "NOT CLOSED: planted-open" in " ".join(shown.split())


class TestProgress:
    @pytest.mark.parametrize(
        ("stream", "rich"), [(Terminal, True), (Terminal, False), (io.StringIO, True)]
    )
    def test_bar_or_lines(
        self,
        report: DoctorReport,
        monkeypatch: pytest.MonkeyPatch,
        stream: type[io.StringIO],
        rich: bool,
    ) -> None:
        """On a terminal, with rich, it is a bar drawn in place; else one line for each defect."""
        if not rich:
            monkeypatch.setitem(sys.modules, "rich", None)
        log = stream()
        with shown_on(log, color=True) as show:
            show(DoctorProgress(0, 2, ("planted-live",), None, 121.0))
            show(DoctorProgress(1, 2, (), row(report, "live")))
            show(DoctorProgress(2, 2, (), row(report, "segfault")))
        shown = log.getvalue()
        if stream is Terminal and rich:
            assert "2/2" in shown
            assert "\x1b[" in shown
            assert "\n[2/2]" not in shown
        else:
            assert shown.splitlines() == [
                "2 defects to probe, about 2 minutes",
                "[1/2] planted-live: corrupt, open, no guard yet",
                "[2/2] planted-segfault: crash (SIGSEGV), open, no guard yet",
            ]
