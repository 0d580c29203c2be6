"""Planted defects show that the doctor tells every way to end from every other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import torchguard
from torchguard.__main__ import main
from torchguard.cli import doctor as doctor_command
from torchguard.cli.doctor import shown_on
from torchguard.cli.table import guards_as_code, table
from torchguard.defects import FAMILIES, BrokenDefect, Defect, all_defects, runner
from torchguard.defects.catalog import built_in, find
from torchguard.defects.probes import failed_writes
from torchguard.defects.report import DoctorReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchguard.defects.doctor import DoctorProgress
    from torchguard.defects.report import Row, Verdict

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")

PLANTED = """
import ctypes, json, os, pathlib, resource, subprocess, sys, time
from torchguard.defects import Defect, NotRunHere

HERE = pathlib.Path(__file__).parent

def absent(): return None
def live(): return "two plus two was 5"
def noisy():
    print('{"kind": "absent", "text": ""}', flush=True)
    os.write(1, b'{"kind": "absent"}')
    os.write(2, b"bytes that are no text: \\xff\\xfe")
    return "printed a verdict and meant another"
def segfault(): ctypes.string_at(0)
def abort(): os.abort()
def quits(): os._exit(3)
def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "hanging").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
def leaves_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "left").write_text(str(child.pid))
def leaves_a_fork():
    pid = os.fork()
    if pid == 0: time.sleep(600)
    (HERE / "forked").write_text(str(pid))
def hangs_closed():
    os.closerange(0, 256)
    time.sleep(600)
def not_run(): raise NotRunHere("needs two moons")
def raises():
    print("on the way to the error")
    raise KeyError("the probe's own fault")
def exits(): sys.exit(0)
def true(): return True
def limits(): return f"core files of {resource.getrlimit(resource.RLIMIT_CORE)[0]} bytes"
def switches():
    return json.dumps({name: os.environ.get(name) for name in
                       ("TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")})
def process(): return str(os.getpid())
def installed():
    import torchguard
    return None if torchguard.is_installed("resize") else "the guard is off"
def in_scope():
    import numpy, torch
    t = torch.from_numpy(numpy.ones(4))
    try: t.unsqueeze_(0).resize_(5, 5)
    except RuntimeError: pass
    return None if tuple(t.shape) == (1, 4) else f"shape is {tuple(t.shape)}"
def closed_when_called(): return None
def still_open(): return "still 5"
def crashes_guarded(): ctypes.string_at(0)
def not_run_guarded(): raise NotRunHere("only the bare run works here")
def raises_guarded(): raise OSError("nothing to see")

def planted(name, probe, **more):
    return Defect(id=f"planted-{name}", summary=f"planted: {name}", upstream=(), family="memory",
                  probe=probe, **more)

CHECK = ("check_consistent",)  # a guard that is called by the probe itself
DEFECTS = [
    planted("absent", absent), planted("live", live, advice="count again"),
    planted("noisy", noisy), planted("segfault", segfault), planted("abort", abort),
    planted("quits", quits), planted("hang", hang), planted("leaves-a-child", leaves_a_child),
    planted("leaves-a-fork", leaves_a_fork), planted("hangs-closed", hangs_closed),
    planted("not-run", not_run, guards=CHECK), planted("raises", raises, guards=CHECK),
    planted("exits", exits), planted("true", true), planted("limits", limits),
    planted("switches", switches),
    planted("process", process), planted("another-process", process),
    planted("absent-with-guard", absent, guards=("resize",)),
    planted("installed", installed, guards=("resize",)),
    planted("in-scope", in_scope, guards=("guarded",)),
    planted("closed", segfault, guards=CHECK, guarded_probe=closed_when_called),
    planted("detected", segfault, guards=CHECK, guarded_probe=closed_when_called,
            only_detects=True, limits="look before you read"),
    planted("open", live, guards=CHECK, guarded_probe=still_open),
    planted("detects-nothing", live, guards=CHECK, guarded_probe=still_open, only_detects=True),
    planted("guarded-crash", live, guards=CHECK, guarded_probe=crashes_guarded),
    planted("guarded-not-run", live, guards=CHECK, guarded_probe=not_run_guarded),
    planted("guarded-raises", live, guards=CHECK, guarded_probe=raises_guarded),
    planted("no-such-guard", live, guards=("no-such-guard",)),
]
SINGLE = planted("single", absent)
AGAIN = planted("live", absent)
NOT_ONE = "a text is no defect"
WRONG = [planted("wrong-guards", absent, guards="resize"), planted("wrong-probe", "absent")]
"""

ENTRY_POINTS = """
[torchguard.defects]
a-planted = planted:DEFECTS
b-single = planted:SINGLE
c-again = planted:AGAIN
d-not-one = planted:NOT_ONE
e-missing = no_such_module_anywhere:DEFECT
f-exits = planted_exit:DEFECT
g-wrong = planted:WRONG
"""


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write what makes importlib.metadata believe that a package is installed in ``folder``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install a package of planted defects for this process and those it starts."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "planted.py").write_text(PLANTED)
    (folder / "planted_exit.py").write_text("print('noise'); import sys; sys.exit('bye')")
    distribution(folder, "planted", "1.0", ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        path = [str(folder), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield folder
        for name in ("planted", "planted_exit"):
            sys.modules.pop(name, None)


def planted(names: list[str]) -> list[str]:
    return [f"planted-{name}" for name in names]


@pytest.fixture(scope="module")
def report(plugin: Path) -> DoctorReport:
    """Probe every planted defect once; what hangs is given seconds."""
    del plugin
    names = [
        row.id
        for row in all_defects()
        if row.id.startswith(("planted-", "c-", "d-", "e-", "f-", "g-"))
    ]
    return torchguard.doctor(names, timeout=12)


def bare(report: DoctorReport, name: str) -> Verdict:
    return row(report, name).bare


def guarded(report: DoctorReport, name: str) -> Verdict:
    return row(report, name).guarded


def row(report: DoctorReport, name: str) -> Row:
    (found,) = (row for row in report.rows if row.id == f"planted-{name}")
    return found


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the doctor's command line with its output in pipes."""
    line = [sys.executable, "-m", "torchguard", "doctor", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, **options)


def wait_until_gone(pid: int) -> bool:
    """Wait until a process has ended; what nobody reaps here stays as a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            )
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


class TestABareRun:
    def test_without_the_defect_is_absent(self, report: DoctorReport) -> None:
        assert bare(report, "absent").status == "absent"
        assert guarded(report, "absent").status == "-"
        assert not row(report, "absent").live

    def test_that_shows_the_defect_carries_the_sentence_of_the_probe(
        self, report: DoctorReport
    ) -> None:
        assert bare(report, "live").status == "corrupt"
        assert bare(report, "live").detail == "two plus two was 5"
        assert row(report, "live").live

    def test_is_not_confused_by_what_the_probe_prints(self, report: DoctorReport) -> None:
        assert bare(report, "noisy").detail == "printed a verdict and meant another"

    @posix_only
    def test_that_dies_is_a_row_with_the_name_of_the_signal(self, report: DoctorReport) -> None:
        assert (bare(report, "segfault").status, bare(report, "segfault").detail) == (
            "crash",
            "SIGSEGV",
        )
        assert (bare(report, "abort").status, bare(report, "abort").detail) == ("crash", "SIGABRT")
        assert row(report, "segfault").live

    def test_that_ends_the_process_itself_says_the_exit_status(self, report: DoctorReport) -> None:
        assert (bare(report, "quits").status, bare(report, "quits").detail) == (
            "crash",
            "exit status 3",
        )

    def test_that_hangs_is_killed_with_everything_it_has_started(
        self, report: DoctorReport, plugin: Path
    ) -> None:
        assert bare(report, "hang").status == "timeout"
        assert bare(report, "hang").detail == "no answer after 12 seconds"
        assert not row(report, "hang").live
        for pid in (plugin / "hanging").read_text().split():
            assert wait_until_gone(int(pid))

    def test_leaves_no_process_behind(self, report: DoctorReport, plugin: Path) -> None:
        assert bare(report, "leaves-a-child").status == "absent"
        assert wait_until_gone(int((plugin / "left").read_text()))
        # A forked child holds every pipe that its parent had: nobody may wait for those.
        assert bare(report, "leaves-a-fork").status == "absent"
        assert wait_until_gone(int((plugin / "forked").read_text()))
        assert bare(report, "hangs-closed").status == "timeout"

    def test_that_lacks_something_is_not_run_and_never_closed(self, report: DoctorReport) -> None:
        assert bare(report, "not-run").status == "not run"
        assert bare(report, "not-run").detail == "needs two moons"
        assert guarded(report, "not-run").status == "not run"

    def test_that_raises_is_broken_and_keeps_the_traceback(self, report: DoctorReport) -> None:
        found = bare(report, "raises")
        assert found.status == "broken"
        assert found.detail == 'KeyError: "the probe\'s own fault"'
        assert "on the way to the error" in found.log
        assert "in raises" in found.log
        assert guarded(report, "raises").status == "-"

    def test_that_calls_exit_or_returns_no_sentence_is_broken(self, report: DoctorReport) -> None:
        assert bare(report, "exits").detail == "SystemExit: 0"
        assert bare(report, "true").status == "broken"
        assert "expected None or one sentence" in bare(report, "true").detail

    def test_writes_no_core_file(self, report: DoctorReport) -> None:
        assert bare(report, "limits").detail == "core files of 0 bytes"

    def test_is_not_silenced_by_switches_and_uses_one_thread_and_the_shared_cache(
        self, report: DoctorReport
    ) -> None:
        assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
        seen = json.loads(bare(report, "switches").detail)
        assert seen["TORCH_COMPILE_DISABLE"] is None
        assert seen["OMP_NUM_THREADS"] == "1"
        assert not Path(seen["TORCHINDUCTOR_CACHE_DIR"]).parent.exists()  # temporary

    def test_has_a_process_of_its_own(self, report: DoctorReport) -> None:
        pids = {os.getpid()} | {
            int(bare(report, name).detail) for name in ("process", "another-process")
        }
        assert len(pids) == 3


class TestAGuardedRun:
    def test_is_skipped_where_the_defect_is_absent(self, report: DoctorReport) -> None:
        assert guarded(report, "absent-with-guard").status == "-"

    def test_has_the_guards_of_the_defect_installed(self, report: DoctorReport) -> None:
        assert bare(report, "installed").status == "corrupt"
        assert guarded(report, "installed").status == "closed"

    def test_is_inside_guarded_where_the_defect_names_it(self, report: DoctorReport) -> None:
        assert bare(report, "in-scope").status == "corrupt"
        assert guarded(report, "in-scope").status == "closed"

    def test_uses_the_guarded_probe_of_a_guard_that_is_called(self, report: DoctorReport) -> None:
        assert bare(report, "closed").status == "crash"
        assert guarded(report, "closed").status == "closed"
        assert not row(report, "closed").failed

    def test_of_a_guard_that_only_finds_the_damage_is_detected_and_not_closed(
        self, report: DoctorReport
    ) -> None:
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
    def test_that_does_not_close_the_defect_fails(
        self, report: DoctorReport, name: str, status: str, detail: str
    ) -> None:
        assert (guarded(report, name).status, guarded(report, name).detail) == (status, detail)
        assert row(report, name).failed

    def test_with_a_guard_that_does_not_exist_is_broken_and_fails(
        self, report: DoctorReport
    ) -> None:
        assert guarded(report, "no-such-guard").status == "broken"
        assert "no-such-guard" in guarded(report, "no-such-guard").detail
        assert row(report, "no-such-guard").failed

    def test_is_missing_where_no_guard_exists_and_that_does_not_fail(
        self, report: DoctorReport
    ) -> None:
        assert (guarded(report, "live").status, guarded(report, "live").detail) == (
            "open",
            "no guard yet",
        )
        assert not row(report, "live").failed


class TestTheCatalog:
    def test_is_ordered_by_family_and_has_every_defect_of_every_file(self) -> None:
        rows = [row for row in built_in() if isinstance(row, Defect)]
        keys = [(FAMILIES.index(row.family), row.id) for row in rows]
        assert keys == sorted(keys)
        folder = Path(torchguard.__file__).parent / "defects" / "probes"
        written = [
            name
            for path in folder.glob("*.py")
            for name in re.findall(r'Defect\(\s+id="(.*)"', path.read_text(encoding="utf-8"))
        ]
        assert sorted(written) == sorted(row.id for row in rows)
        assert len(written) >= 37

    def test_says_for_each_defect_what_goes_wrong_and_where_it_is_discussed(self) -> None:
        for row in built_in():
            assert isinstance(row, Defect), row
            assert 20 < len(row.summary) <= 90, row.id
            assert all(url.startswith("https://") for url in row.upstream), row.id
            assert row.guards or row.planned or row.advice, row.id

    def test_says_which_guard_brings_elements_back_and_which_does_not(self) -> None:
        import torch  # noqa: PLC0415 - most of this file starts others that need it

        found = find("out-garbage")
        assert guards_as_code(found.guards) == "guarded(data=True)"
        assert found.guarded_probe is not None
        assert found.guarded_probe() is None
        assert 'guarded() and install("out") restore shape and storage' in found.limits
        for scope in (torchguard.guarded, lambda: torchguard.install("out")):
            damages = set()
            for _, dtype, call in failed_writes._OUT_CASES:
                for out in (torch.empty(0, dtype=dtype), torch.full((3, 3), 77, dtype=dtype)):
                    version = out._version
                    with scope():
                        damage = failed_writes._damage_of(out, call)
                    damages.add(damage)
                    assert damage is None or out._version > version
            assert damages == {None, "data overwritten"}

    def test_calls_a_guard_detected_only_where_the_damage_is_still_done(self) -> None:
        rows = [row for row in built_in() if isinstance(row, Defect)]
        finders = ("check_consistent",)
        assert {row.id for row in rows if row.only_detects} == {"storage-shrunk"}
        assert {row.id for row in rows if row.guards == finders} == {"storage-shrunk"}

    def test_is_not_imported_with_torchguard(self) -> None:
        program = """
            import sys, torchguard
            folder = "torchguard.defects."
            print(*(name for name in sys.modules if name.startswith(folder)))
        """
        line = [sys.executable, "-c", textwrap.dedent(program)]
        seen = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        assert seen == []

    def test_does_not_load_the_compiler(self) -> None:
        # The doctor's own process reads the catalog too, and a user's process may call doctor().
        program = """
            import sys
            from torchguard.defects import all_defects
            all_defects()
            print("torch._dynamo" in sys.modules)
        """
        line = [sys.executable, "-c", textwrap.dedent(program)]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        # The last line: a broken plug-in, planted by tests of this file, may print before it.
        assert done.stdout.split()[-1] == "False", "import torch._dynamo in the probe, not above it"

    def test_takes_defects_of_plugins_after_its_own(self, plugin: Path) -> None:
        del plugin
        names = [row.id for row in all_defects()]
        assert names.index("resize-locked") < names.index("planted-absent")
        assert "planted-single" in names
        assert len(names) == len(set(names))

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("c-again:planted-live", "repeats an id that belongs to the entry point 'a-planted'"),
            ("d-not-one", "gives a str where a torchguard.defects.Defect belongs"),
            ("e-missing", "fails to load: ModuleNotFoundError: No module named"),
            ("f-exits", "fails to load: SystemExit: bye"),
            ("g-wrong[0]", "guards is 'resize': it has to be a tuple of texts"),
            ("g-wrong[1]", "probe is 'absent': it has to be a function"),
        ],
    )
    def test_turns_a_broken_plugin_into_a_row_that_says_so(
        self, report: DoctorReport, name: str, reason: str
    ) -> None:
        (broken,) = (row for row in all_defects() if row.id == name)
        assert isinstance(broken, BrokenDefect)
        assert reason in broken.reason
        assert "of the package planted" in broken.reason
        (shown,) = (row for row in report.rows if row.id == name)
        assert (shown.bare.status, shown.bare.detail) == ("broken", broken.reason)


class TestChoosing:
    def test_an_unknown_defect_names_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"no defect 'resize-lock'.*mean resize-locked"):
            torchguard.doctor(["resize-lock"])

    def test_a_row_of_another_family_is_bad_usage_and_not_a_report_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="resize-locked is of the family 'memory'"):
            torchguard.doctor(only=["resize-locked"], family="gradient")

    def test_an_unknown_family_names_the_families(self) -> None:
        with pytest.raises(ValueError, match="memory, compile, gradient"):
            torchguard.doctor(family="graphics")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("option", "message"), [({"jobs": 0}, "jobs"), ({"timeout": -1.0}, "timeout")]
    )
    def test_numbers_have_to_be_positive(self, option: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            torchguard.doctor(["resize-locked"], **option)

    def test_nothing_to_probe_is_an_empty_report(self) -> None:
        assert torchguard.doctor([]).rows == ()


class TestStartingProcesses:
    NAMES = ("absent", "live", "segfault", "raises", "installed", "leaves-a-child")

    def test_in_fresh_interpreters_gives_the_same_rows(
        self, report: DoctorReport, plugin: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "forking_is_possible", lambda: False)
        names = planted(list(self.NAMES))
        cold = torchguard.doctor(names)
        for found in cold.rows:
            expected = row(report, found.id.removeprefix("planted-"))
            assert found.bare.status == expected.bare.status
            assert found.guarded.status == expected.guarded.status
        assert cold.environment == report.environment
        (hanging,) = torchguard.doctor(planted(["hang"]), timeout=4).rows
        assert hanging.bare.status == "timeout"
        assert wait_until_gone(int((plugin / "left").read_text()))

    @pytest.mark.skipif(not runner.forking_is_possible(), reason="no fork server here")
    def test_goes_on_in_fresh_interpreters_when_the_server_dies(
        self, report: DoctorReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # With a second thread the server can't fork safely, so it gives up.
        (tmp_path / "sitecustomize.py").write_text(
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        )
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        monkeypatch.setenv("PYTHONPATH", path)
        found = torchguard.doctor(planted(["live"]))
        assert found.rows[0].bare.detail == bare(report, "live").detail

    def test_has_a_row_for_each_defect_even_if_no_server_lives(
        self, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\n"
            "if 'serve()' in str(sys.orig_argv):\n"
            "    print('out of luck', file=sys.stderr, flush=True)\n"
            "    os._exit(9)\n"
        )
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        monkeypatch.setenv("PYTHONPATH", path)
        found = torchguard.doctor(planted(["live", "closed"]))
        assert {row.bare.status for row in found.rows} == {"broken"}
        assert "out of luck" in found.rows[0].bare.log
        assert found.environment.torch.startswith("unknown (broken: ")

    @posix_only
    @pytest.mark.usefixtures("interruptible")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_leaves_nothing_behind_when_the_doctor_is_stopped(
        self, plugin: Path, tmp_path: Path, number: signal.Signals
    ) -> None:
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


class TestTheReport:
    def test_survives_json(self, report: DoctorReport) -> None:
        again = DoctorReport.from_json(report.to_json())
        assert again == report
        assert json.loads(report.to_json())["exit_status"] == report.exit_status == 1

    def test_of_another_format_is_refused(self, report: DoctorReport) -> None:
        document = {**json.loads(report.to_json()), "format": 1}
        with pytest.raises(ValueError, match="format 2, got format 1"):
            DoctorReport.from_json(json.dumps(document))

    def test_names_what_it_was_measured_on(self, report: DoctorReport) -> None:
        import torch  # noqa: PLC0415 - for its version only

        shown = table(report)
        assert report.environment.torch == torch.__version__
        for fact in ("torch", "Python", "platform", "GPU", "torchguard"):
            assert any(line.startswith(f"{fact} ") for line in shown.splitlines()), fact
        assert "the foreign distribution named torchguard is not installed" in shown

    def test_warns_of_the_foreign_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        distribution(tmp_path, "torchguard", "9.9")
        monkeypatch.syspath_prepend(str(tmp_path))
        found = torchguard.doctor([])
        assert found.environment.foreign == "9.9"
        assert "WARNING: the distribution torchguard 9.9 is installed" in table(found)

    @pytest.mark.parametrize("width", [80, 100, 140])
    def test_as_a_table_keeps_to_its_width_and_loses_no_word(
        self, report: DoctorReport, width: int
    ) -> None:
        shown = table(report, width=width)
        assert max(map(len, shown.splitlines())) <= width
        words = " ".join(shown.split())
        for found in report.rows:
            assert f"{found.id} " in words
        assert "until then: count again" in words
        assert "with the guard on: still 5" in words
        assert 'install("resize")' in words
        assert "crash (SIGSEGV):" in words

    def test_counts_what_is_detected_apart_from_what_is_closed(self, report: DoctorReport) -> None:
        rows = tuple(row(report, name) for name in ("closed", "installed", "detected", "open"))
        counted = " ".join(table(DoctorReport(rows, report.environment)).split())
        assert "4 live; 2 of those closed by their guards; 1 detected, not prevented; " in counted
        assert "1 open in spite of their guards; 0 open, no guard yet" in counted
        assert "NOT CLOSED: planted-open torch" in counted

    def test_says_what_the_guards_leave_open(self, report: DoctorReport) -> None:
        assert "look before you read" in " ".join(table(report).split())

    def test_has_colors_only_when_asked(self, report: DoctorReport) -> None:
        plain, colored = table(report), table(report, color=True)
        assert "\x1b" not in plain
        assert "\x1b[32mclosed\x1b[0m" in colored


class TestTheCommand:
    def test_ends_with_0_when_all_that_have_a_guard_are_closed(
        self, plugin: Path, tmp_path: Path
    ) -> None:
        # rich must not be needed, nor even imported, for plain text.
        (tmp_path / "rich.py").write_text("raise SystemExit('rich was imported')")
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        done = command(
            *only("absent", "segfault", "closed", "installed", "detected"),
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "[5/5] planted-" in done.stderr
        assert "planted-segfault: crash (SIGSEGV), open, no guard yet" in done.stderr
        assert "planted-closed" in done.stdout
        assert "planted-detected: crash (SIGSEGV), detected" in done.stderr

    def test_ends_with_1_when_a_guard_leaves_its_defect_open(
        self,
        report: DoctorReport,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(doctor_command, "doctor", lambda *_, **__: report)
        assert main(["doctor"]) == 1
        assert "NOT CLOSED: planted-open" in capsys.readouterr().out

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
    def test_ends_with_2_on_bad_usage(
        self,
        plugin: Path,
        arguments: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.out == ""

    def test_prints_one_json_document_and_nothing_else(self, plugin: Path) -> None:
        done = command("--json", *only("noisy", "open"))
        assert [row.id for row in DoctorReport.from_json(done.stdout).rows] == planted(
            ["noisy", "open"]
        )
        assert done.returncode == 1
        # The plug-in that prints while it is imported is heard elsewhere.
        assert set(done.stderr.splitlines()) == {"noise"}

    def test_stops_quietly_when_nobody_reads_on(self, plugin: Path) -> None:
        line = [sys.executable, "-m", "torchguard", "doctor", *only("absent")]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
            assert doctor.stdout is not None
            doctor.stdout.close()
            assert doctor.stderr is not None
            assert b"Error" not in doctor.stderr.read()
        assert doctor.returncode == 0

    @posix_only
    def test_has_colors_on_a_terminal(self, plugin: Path) -> None:
        table = on_a_terminal(*only("closed")).partition("memory family")[2]
        assert "planted-closed" in table
        assert "\x1b[32mclosed\x1b[0m" in table

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
    def test_has_no_colors_when_told_so(
        self,
        report: DoctorReport,
        monkeypatch: pytest.MonkeyPatch,
        switches: list[str],
        environment: dict[str, str],
        colored: bool,
    ) -> None:
        monkeypatch.setattr(doctor_command, "doctor", lambda *_, **__: report)
        monkeypatch.setattr(sys, "stdout", Terminal())
        for name, value in {"NO_COLOR": "", "TERM": "xterm", **environment}.items():
            monkeypatch.setenv(name, value)
        main(["doctor", *switches])
        assert isinstance(sys.stdout, Terminal)
        assert ("\x1b[32mclosed\x1b[0m" in sys.stdout.getvalue()) is colored
        assert ("\x1b" in sys.stdout.getvalue()) is colored


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    def steps(self, report: DoctorReport) -> Iterator[DoctorProgress]:
        from torchguard.defects.doctor import DoctorProgress  # noqa: PLC0415 - only a type above

        yield DoctorProgress(0, 2, ("planted-live",), None, 121.0)
        yield DoctorProgress(1, 2, (), row(report, "live"))
        yield DoctorProgress(2, 2, (), row(report, "segfault"))

    def test_is_a_live_bar_on_a_terminal_with_rich(self, report: DoctorReport) -> None:
        pytest.importorskip("rich")
        terminal = Terminal()
        with shown_on(terminal, color=True) as show:
            for step in self.steps(report):
                show(step)
        shown = terminal.getvalue()
        assert "2/2" in shown
        assert "\x1b[" in shown  # a bar is redrawn in place
        assert "\n[2/2]" not in shown

    @pytest.mark.parametrize("stream", [Terminal, io.StringIO])
    def test_is_plain_lines_without_rich_and_elsewhere(
        self, report: DoctorReport, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
    ) -> None:
        monkeypatch.setitem(sys.modules, "rich", None)
        log = stream()
        with shown_on(log, color=True) as show:
            for step in self.steps(report):
                show(step)
        assert log.getvalue().splitlines() == [
            "2 defects to probe, about 2 minutes",
            "[1/2] planted-live: corrupt, open, no guard yet",
            "[2/2] planted-segfault: crash (SIGSEGV), open, no guard yet",
        ]

    def test_says_how_long_the_rest_will_take(self, plugin: Path) -> None:
        steps: list[DoctorProgress] = []
        torchguard.doctor(planted(["absent", "closed"]), progress=steps.append)
        left = [step.remaining for step in steps]
        assert left[0] is not None
        assert left[0] > 1
        assert left[-1] == 0

    def test_counts_every_row_and_names_what_runs(self, plugin: Path) -> None:
        steps: list[DoctorProgress] = []
        names = planted(["absent", "closed"])
        torchguard.doctor(names, progress=steps.append)
        assert {name for step in steps for name in step.running} == set(names)
        assert [step.done for step in steps if step.row is not None] == [1, 2]
        assert {step.total for step in steps} == {2}
        assert steps[-1].running == ()


def only(*names: str) -> list[str]:
    return [part for name in names for part in ("--only", f"planted-{name}")]


def on_a_terminal(*arguments: str) -> str:
    """Run the command with a terminal for its output and return what that has shown."""
    import pty  # noqa: PLC0415 - POSIX only

    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "torchguard", "doctor", *arguments]
    environment = {**os.environ, "NO_COLOR": "", "TERM": "xterm-256color"}
    with subprocess.Popen(line, stdout=theirs, stderr=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says EIO when the other side has closed
            while part := os.read(ours, 65536):
                shown += part
    os.close(ours)
    return shown.decode()
