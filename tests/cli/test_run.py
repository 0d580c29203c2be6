"""``python -m torchguard run``: the same program under ``python`` behaves the same."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from support.child_process import run_command, run_python, started
from torchguard.__main__ import main
from torchguard.patching.guards import GUARDS

if TYPE_CHECKING:
    from pathlib import Path

RUN = ("-m", "torchguard", "run")
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def execute(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, *arguments], cwd=folder, **options)


# What ``python -m torchguard`` does, in a process that has imported torch.
AS_A_COMMAND = """
import os, runpy, sys
os.dup2(os.open("input", os.O_RDONLY), 0)
sys.path[0], sys.argv[0] = os.getcwd(), "-m"
runpy._run_module_as_main("torchguard")
"""


def run_inside(
    folder: Path, *arguments: str, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -m torchguard run`` does; it can read a text."""
    (folder / "input").write_text("hear me")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_python(AS_A_COMMAND, "run", *arguments, fresh=fresh)


def both(
    *arguments: str, folder: Path
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run a program under python and under torchguard."""
    guarded = run_inside(folder, *arguments)
    with (folder / "input").open() as stdin:
        return execute(*arguments, folder=folder, stdin=stdin), guarded


def write(path: Path, program: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return path


# What a program can see of how it was started.
MIRROR = """
import __main__, os, sys
print(sys.argv, __name__, __file__, __package__)
print(__spec__ and __spec__.name, __main__.__dict__ is globals())
print(sys.path[0], os.getcwd(), sys.modules["__main__"].__file__)
print(sys.stdin.read().upper())
"""

# Programs that end in their own way; what they print and their status have to be python's.
ENDINGS = {
    "a_text.py": "import sys; sys.exit('all lost')",
    "an_error.py": """
        def first():
            second()
        def second():
            raise ValueError("two\\nlines")
        first()
    """,
    "a_syntax_error.py": "x = (1,\nprint('never')\n1 1",
    "an_error_in_an_import.py": "import no_such_module",
}
LATE = """
import atexit, pickle, threading, time, warnings
class Late: pass
atexit.register(lambda: print("late", type(pickle.loads(pickle.dumps(Late()))).__name__))
def go_on():
    time.sleep(0.2)
    import __main__
    print("done", __main__.Late.__name__)
threading.Thread(target=go_on).start()
warnings.warn("old", DeprecationWarning)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts and a package that print what they see of how they were started."""
    write(tmp_path / "sub" / "in.py", MIRROR)
    write(tmp_path / "real" / "mirror.py", "import beside\n" + MIRROR)
    write(tmp_path / "real" / "beside.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "mirror.py")
    write(tmp_path / "package" / "__init__.py", "import sys; print('parent', sys.argv)\n")
    write(tmp_path / "package" / "__main__.py", "from . import beside\n" + MIRROR)
    write(tmp_path / "package" / "beside.py", MIRROR)
    write(tmp_path / "empty" / "__init__.py", "")
    return tmp_path


class TestProgram:
    @pytest.mark.parametrize(
        "program",
        [["sub/../sub/in.py"], ["link.py"], ["-m", "package"], ["-m", "package.beside"]],
        ids=" ".join,
    )
    def test_mirror(self, folder: Path, program: list[str]) -> None:
        """It sees the same as under ``python``; behind a link, the modules beside the file."""
        arguments = ("--guards", "-m", "-h", "a b", "")
        python, guarded = both(*program, *arguments, folder=folder)
        assert "'--guards', '-m', '-h', 'a b', ''" in python.stdout
        assert "HEAR ME" in python.stdout
        assert guarded.stdout == python.stdout, guarded.stderr

    @pytest.mark.parametrize(
        "program",
        [*([name] for name in ENDINGS), ["-m", "package.missing"], ["-m", "empty"]],
        ids=" ".join,
    )
    def test_end(self, folder: Path, program: list[str]) -> None:
        """It ends as under ``python``; the traceback has frames of torchguard before its own."""
        if program[0] in ENDINGS:
            write(folder / program[0], ENDINGS[program[0]])
        python, guarded = both(*program, folder=folder)
        assert guarded.returncode == python.returncode == 1
        assert guarded.stdout == python.stdout
        assert guarded.stderr.splitlines()[-3:] == python.stderr.splitlines()[-3:]

    def test_late(self, tmp_path: Path) -> None:
        """An exit handler and a thread that goes on find their ``__main__``; it warns."""
        write(tmp_path / "late.py", LATE)
        python, guarded = (execute(*way, "late.py", folder=tmp_path) for way in ((), RUN))
        assert guarded.returncode == python.returncode == 0
        assert (guarded.stdout, guarded.stderr) == (python.stdout, python.stderr)

    @posix_only
    @pytest.mark.usefixtures("interruptible")
    def test_interrupt(self, tmp_path: Path) -> None:
        """Interrupted, it dies of the signal."""
        write(tmp_path / "waits.py", "import time; print('ready', flush=True); time.sleep(60)")
        line = [sys.executable, *RUN, "waits.py"]
        with started(line, cwd=tmp_path) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate()
        assert program.returncode == -signal.SIGINT
        assert errors.splitlines()[-1] == "KeyboardInterrupt"


# Says in one word whether the guard works here: a resize_ that fails must leave the shape alone.
BEHAVIOUR = """
import multiprocessing, pickle, sys
from concurrent.futures import ProcessPoolExecutor
import numpy, torch

def behaviour(_=None):
    t = torch.from_numpy(numpy.ones(4))
    try:
        t.resize_(5, 5)
    except RuntimeError:
        pass
    return "guarded" if tuple(t.shape) == (4,) else "bare"

AT_IMPORT = behaviour()  # in a worker: before it gets its first task

class Mine:
    where = AT_IMPORT

def worker(_):
    return [behaviour(), AT_IMPORT, multiprocessing.get_start_method(), Mine]

if __name__ == "__main__":
    print("main", behaviour())
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            now, at_import, _, mine = pool.submit(worker, 0).result()
            assert mine is Mine
            print(method, now, at_import)
"""


@pytest.mark.slow
class TestGuards:
    @pytest.mark.parametrize(
        ("program", "methods"),
        [
            (["behaves.py"], multiprocessing.get_all_start_methods()),
            (["-m", "behaves"], ["spawn"]),
        ],
    )
    def test_workers(self, tmp_path: Path, program: list[str], methods: list[str]) -> None:
        """The guards are on in the program and in forked and spawned workers."""
        write(tmp_path / "behaves.py", BEHAVIOUR)
        # Forkserver's workers come from a server of the program's own.
        done = run_inside(tmp_path, *program, *methods, fresh=True)
        workers = [f"{method} guarded guarded" for method in methods]
        assert done.stdout.splitlines() == ["main guarded", *workers], done.stderr

    def test_torchrun(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are on in every rank of torchrun, and are those asked for."""
        program = """
            import faulthandler
            import torch.distributed as ranks
            import torchguard
            # torchrun gives each rank a group of its own.
            faulthandler.dump_traceback_later(300, exit=True)
            ranks.init_process_group("gloo")
            seen = [None, None]
            ranks.all_gather_object(seen, sorted(torchguard.installed()))
            if ranks.get_rank() == 0:
                print("seen:", *seen)
            ranks.destroy_process_group()
        """
        write(tmp_path / "trains.py", program)
        monkeypatch.chdir(tmp_path)
        torchrun = "from torch.distributed.run import main; main()"
        ranks = ("--standalone", "--nproc-per-node", "2")
        done = run_python(torchrun, *ranks, *RUN, "--guards=setitem, out", "trains.py")
        # gloo may talk too
        expected = "seen: ['out', 'setitem'] ['out', 'setitem']"
        assert expected in done.stdout.splitlines(), done.stderr


class TestBadUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--guards", "resize,rezise", "x.py"], r"no guard called 'rezise'"),
            (["--guards", "", "x.py"], r"no guard called ''"),
            ([], r"expected a script, or -m and a module"),
            (["no_such_file.py"], r"can't open file 'no_such_file.py'"),
            (["-m"], r"expected a script, or -m and a module"),
            (["--fast", "x.py"], r"unrecognized arguments: --fast"),
            (["--guards", "none", "x.py"], f"the guards are {', '.join(GUARDS)}"),
        ],
    )
    def test_message(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It ends with 2 and says what is wrong."""
        with pytest.raises(SystemExit) as ended:
            main(["run", *arguments])
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert re.search(message, shown.err), shown.err
        assert shown.out == ""
