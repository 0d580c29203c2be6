"""Run a program in a process of its own: it may crash, hang, or need to start clean.

A process is a fork of ``multiprocessing``'s server, which has imported torch: an import takes
a second. Nothing else of torch (Dynamo, torchguard) is imported there. ``fresh=True`` starts an
interpreter instead. A program that runs too long ends with the stacks of all its threads.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 400
"""Seconds after which a program is ended."""

_LIMITED = f"import faulthandler; faulthandler.dump_traceback_later({LIMIT}, exit=True)\n"

_processes: Any = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch"])


class _Program(NamedTuple):
    """A program and everything that it can see of how it was started."""

    source: str
    argv: list[str]
    file: str | None
    out: str
    err: str
    folder: str
    environment: dict[str, str]

    def run(self) -> None:
        """Run the program as the main module of this process."""
        os.setpgid(0, 0)  # a group that is killed together
        for number, name in ((0, os.devnull), (1, self.out), (2, self.err)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - multiprocessing closed it
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
        warnings.simplefilter("ignore")
        multiprocessing.set_start_method(None, force=True)  # the program's own default
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.argv = self.argv
        sys.path.insert(0, "" if self.file is None else str(Path(self.file).parent))
        main = types.ModuleType("__main__")
        main.__builtins__ = builtins  # type: ignore[attr-defined]
        if self.file is not None:
            main.__file__ = self.file
        sys.modules["__main__"] = main
        try:
            exec(compile(self.source, self.file or "<string>", "exec"), vars(main))  # noqa: S102
        finally:
            atexit._run_exitfuncs()


class _Running:
    """A program that has been started."""

    def __init__(self, source: str, argv: list[str], file: str | None, output: str) -> None:
        names = f"{output}.out", f"{output}.err"
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self._program = _Program(source, argv, file, *names, str(Path.cwd()), environment)
        self._begun = time.monotonic()
        self._process = _processes.Process(target=self._program.run)
        self._process.start()

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the program, and end what it has left running."""
        # It ends itself, with its stacks. This is for one that can't: it was stopped.
        self._process.join(self._begun + LIMIT + 30 - time.monotonic())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        texts = (
            Path(name).read_text(encoding="utf-8", errors="replace") if Path(name).exists() else ""
            for name in (self._program.out, self._program.err)
        )
        line = ["python", *self._program.argv]
        return subprocess.CompletedProcess(line, self._process.exitcode, *texts)


def run_python(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``program``; modules in ``folder`` can be imported, and it is written there as a file.

    Torch is imported already, except with ``fresh=True``.
    """
    source, file, start = textwrap.dedent(program), None, "-c"
    if folder is not None:  # a program that spawns workers has to be a file
        file = start = str(folder / "program.py")
        Path(file).write_text(source, encoding="utf-8")
    if not fresh:
        with tempfile.TemporaryDirectory() as output:
            return _Running(source, [start, *arguments], file, f"{output}/program").ended()
    if file is not None:
        source = f"import runpy\nrunpy.run_path({file!r}, run_name='__main__')\n"
    line = [sys.executable, "-c", _LIMITED + source, *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        line, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT + 30
    )


def output_of(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> str:
    """Return what ``program`` prints; it has to end well."""
    done = run_python(program, *arguments, folder=folder, fresh=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


JOIN_RANKS = """
import datetime, json, os, sys
import torch
import torch.distributed as dist

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
world_size, timeout = int(sys.argv[3]), datetime.timedelta(seconds=120)
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
"""
"""How a program for :func:`run_ranks` begins."""


def run_ranks(program: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """Run a program on some ranks, given rank, port and count; return the JSON each prints last.

    A rank ends as a process of ``multiprocessing`` does, without finalizing its interpreter:
    a thread of gloo that frees a tensor would end it with "terminate called".
    https://github.com/pytorch/pytorch/issues/190489
    """
    path = folder / "rank.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = path.read_text(encoding="utf-8")
    ranks = [
        _Running(source, [str(path), str(rank), port, str(count)], str(path), f"{path}.{rank}")
        for rank in range(count)
    ]
    done = [rank.ended() for rank in ranks]
    errors = [each.stdout + each.stderr for each in done]
    assert [each.returncode for each in done] == [0] * count, "\n".join(errors)
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


def wait_until_gone(pid: int) -> bool:
    """Wait until a process has ended; one that no parent waits for stays as a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
