"""``python -m torchguard doctor``: options, exit status, lines and progress."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

import torchguard
from support.child_process import run_command
from support.planted import planted, row
from torchguard.__main__ import main
from torchguard.cli import DOCUMENTATION
from torchguard.cli.doctor import lines, overview, stories
from torchguard.cli.terminal import Bar, Paint
from torchguard.defects.catalog import all_defects
from torchguard.defects.diagnosis import DoctorReport


class TestLines:
    def test_counts_and_environment(self, report: DoctorReport) -> None:
        """What is detected is counted apart from what is closed; at the end, what it ran on."""
        rows = tuple(row(report, name) for name in ("closed", "installed", "detected", "open"))
        shown = lines(DoctorReport(rows, report.environment))
        assert "4 live; 2 of those closed by their guards; 1 detected, not prevented; " in shown
        assert "1 open in spite of their guards; 0 open, no guard yet" in shown
        assert "NOT CLOSED: planted-open\n" in shown
        *_, torch, python, platform, gpu, ours, foreign = shown.splitlines()
        for fact in (torch, python, platform, gpu, ours):
            assert fact.partition(" ")[0] in {"torch", "Python", "platform", "GPU", "torchguard"}
        assert foreign == "the foreign distribution named torchguard is not installed"

    def test_foreign_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It warns of the distribution that owns the same folder."""
        (tmp_path / "torchguard-9.9.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: torchguard\nVersion: 9.9\n"
        (tmp_path / "torchguard-9.9.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(str(tmp_path))
        found = torchguard.doctor([])
        assert found.rows == ()
        assert found.environment.foreign == "9.9"
        assert "WARNING: the distribution torchguard 9.9 is installed" in lines(found)

    def test_rows(self, report: DoctorReport) -> None:
        """Each defect is one line with all there is to say."""
        text = lines(report)
        assert len(text.splitlines()) == len(report.rows) + 1 + 2 + 1 + 6
        assert (
            "\nplanted-detected: crash (SIGSEGV), detected; planted: detected; "
            "guard: check_consistent(); look before you read\n"
        ) in text
        assert "; until then: count again\n" in text
        assert "; with the guard on: still 5\n" in text
        assert '; guard: install("resize")\n' in text


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class TestTerminal:
    @pytest.mark.parametrize("columns", [80, 120])
    def test_overview(self, report: DoctorReport, columns: int) -> None:
        """It begins with a summary and groups what there is to do, in lines that fit."""
        shown = overview(report, Paint(io.StringIO()), columns)
        assert max(map(len, shown.splitlines())) <= columns
        assert shown.startswith(f"{len(report.rows)} defects on PyTorch ")
        order = [shown.index(text) for text in ("\nOpen, nothing", "\nClosed by ", "\nAbsent: ")]
        assert order == sorted(order)
        opened = shown[order[0] : order[1]]
        assert "planted-open" in opened
        assert "planted-live" in opened
        assert "planted-closed" not in opened
        assert [each.id for each in report.rows if each.id not in shown] == []

    def test_the_title_of_each_defect_fits(self) -> None:
        known = [each for each in all_defects() if not each.id.startswith("planted-")]
        assert [each.id for each in known if not 0 < len(each.title) <= 50] == []
        assert [each.id for each in known if len(each.id) > 23] == []

    def test_story(self, report: DoctorReport) -> None:
        """All that is known about one defect: what happened, the guard, its limits."""
        one = DoctorReport((row(report, "detected"),), report.environment)
        shown = stories(one, Paint(io.StringIO()), 80)
        for text in ("planted: detected", "crash: SIGSEGV", "check_consistent(): detected"):
            assert text in shown
        assert "look before you read" in shown
        assert f"  page     {DOCUMENTATION}reference/defects.html#planted-detected\n" in shown

    def test_colors_are_for_terminals_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        assert Paint(Terminal())("open", "31") == "\x1b[31mopen\x1b[0m"
        assert Paint(io.StringIO())("open", "31") == "open"
        monkeypatch.setenv("NO_COLOR", "1")
        assert Paint(Terminal())("open", "31") == "open"

    def test_the_bar_leaves_an_empty_line(self) -> None:
        """On a terminal it stays in one line; elsewhere each step has a line of its own."""
        terminal, pipe = Terminal(), io.StringIO()
        for stream in (terminal, pipe):
            bar = Bar(stream, 2, "defects")
            for name in ("one", "two"):
                bar.step(name, f"{name}: live")
        assert "\n" not in terminal.getvalue()
        assert terminal.getvalue().endswith("\r\x1b[K")
        assert pipe.getvalue() == "2 defects\n[1/2] one: live\n[2/2] two: live\n"


@pytest.mark.usefixtures("with_planted")
class TestCommand:
    def test_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It ends with 0 when every live defect that has a guard is closed."""
        names = ("absent", "segfault", "closed", "installed", "detected")
        assert main(["doctor", *planted(*names)]) == 0
        shown = capsys.readouterr()
        assert shown.err.startswith("5 defects to probe\n[1/5] planted-")
        assert "\n[5/5] planted-" in shown.err
        assert "planted-segfault: crash (SIGSEGV), open, no guard yet" in shown.err
        assert "planted-detected: crash (SIGSEGV), detected" in shown.err
        assert "\nplanted-closed: planted: closed\n" in shown.out

    def test_json(self, capfd: pytest.CaptureFixture[str]) -> None:
        """--json prints one document and nothing else."""
        assert main(["doctor", "--json", *planted("noisy", "open")]) == 1
        shown = capfd.readouterr()
        found = json.loads(shown.out)
        assert [row["id"] for row in found["rows"]] == planted("noisy", "open")
        assert not shown.err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["planted-liv"], "did you mean planted-live"),
            (["--family", "graphics"], "invalid choice: 'graphics'"),
            (["--jobs", "0"], "jobs is 0, expected 1 or more"),
            (["--timeout", "soon"], "argument --timeout"),
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
    done = run_command(line, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
