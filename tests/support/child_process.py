"""Run a program in a process of its own: it may crash, hang, or need to start clean.

A process is a fork of ``multiprocessing``'s server, which has imported torch: an import takes
a second. Nothing else of torch (Dynamo, torchguard) is imported there. ``fresh=True`` starts an
interpreter instead.

All processes of a test end at its ``deadline``, before the test itself ends: each prints the
stacks of all its threads. A process that is started here has a group of its own, and the group
gets SIGABRT, which faulthandler answers. A fork of the test's own process gets SIGALRM.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import json
import math
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 420
"""Seconds that the processes of a test may take: three times what the longest takes alone."""
deadline = time.monotonic() + LIMIT
"""When the processes of the test that runs now are ended; conftest sets it for each test."""


def _left() -> float:
    return max(deadline - time.monotonic(), 1)


def _limit_this_fork() -> None:
    """Have the stacks printed on SIGALRM: no thread of a watchdog survives a fork."""
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
    signal.alarm(math.ceil(_left()))


def _only_print(_: object) -> None:
    """Have it go on: a loader's worker may outlive its test, and its death raise in another one."""
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=False)


os.register_at_fork(after_in_child=_limit_this_fork)
multiprocessing.util.register_after_fork(_limit_this_fork, _only_print)


def _kill(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def _limited(group: int) -> Iterator[threading.Event]:
    """End a group of processes after a block, and at the deadline with the stacks of all."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(group, signal.SIGABRT)
        time.sleep(5)  # to print
        _kill(group, signal.SIGKILL)

    timer = threading.Timer(_left(), end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()
        _kill(group, signal.SIGKILL)


@contextlib.contextmanager
def started(line: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and end it and what it has left running with the block."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options["env"] = {**options.get("env", os.environ), "PYTHONFAULTHANDLER": "1"}
    options = {**pipes, **options, "text": True, "start_new_session": True}
    with subprocess.Popen(line, **options) as running, _limited(running.pid) as late:
        try:
            yield running
        finally:
            if late.is_set():
                ends = (running.stdout, running.stderr)
                rest = [end.read() for end in ends if end is not None and not end.closed]
                raise AssertionError("\n".join([f"{line} took too long", *rest]))


def run_command(
    line: list[str], text: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command, which may read a text, to its end."""
    if text is not None:
        options["stdin"] = subprocess.PIPE
    printed = ["", ""]
    try:
        with started(line, **options) as running:
            printed = [each or "" for each in running.communicate(text)]
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *printed])) from None
    return subprocess.CompletedProcess(line, running.returncode, *printed)


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
    is_rank: bool

    def run(self) -> None:
        """Run the program as the main module of this process."""
        os.setpgid(0, 0)  # a group that is killed together
        for number, name in ((0, os.devnull), (1, self.out), (2, self.err)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - multiprocessing closed it
        faulthandler.enable(2)
        faulthandler.dump_traceback_later(LIMIT + 60, exit=True, file=2)  # if the test is killed
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
            if self.is_rank:
                _leave_group(vars(main))
        finally:
            atexit._run_exitfuncs()


def _leave_group(names: dict[str, Any]) -> None:
    """Drop what a program has made, then its group: whatever holds a group keeps its threads."""
    import torch.distributed as dist  # noqa: PLC0415  only in a rank

    if dist.is_initialized():
        dist.barrier()
    names.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


class _Running:
    """A program that has been started."""

    def __init__(
        self, source: str, argv: list[str], file: str | None, output: str, *, is_rank: bool = False
    ) -> None:
        names = f"{output}.out", f"{output}.err", str(Path.cwd())
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}
        self._program = _Program(source, argv, file, *names, environment, is_rank)
        self._process = _processes.Process(target=self._program.run)
        self._process.start()

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the program, and end what it has left running."""
        with _limited(self._process.pid) as late:
            self._process.join()
        texts = (
            Path(name).read_text(encoding="utf-8", errors="replace") if Path(name).exists() else ""
            for name in (self._program.out, self._program.err)
        )
        line = ["python", *self._program.argv]
        self.late = late.is_set()
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
            running = _Running(source, [start, *arguments], file, f"{output}/program")
            done = running.ended()
        assert not running.late, f"it took too long\n{done.stdout}{done.stderr}"
        return done
    if file is not None:
        source = f"import runpy\nrunpy.run_path({file!r}, run_name='__main__')\n"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return run_command([sys.executable, "-c", source, *arguments], env=environment)


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
import torch.distributed.nn  # DDP imports it, and its defaults hold the group that is there then

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
world_size, timeout = int(sys.argv[3]), datetime.timedelta(seconds=120)
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
"""
"""How a program for :func:`run_ranks` begins."""


def run_ranks(program: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """Run a program on some ranks, given rank, port and count; return the JSON each prints last.

    A rank then waits for the others, drops everything that the program has made, and destroys the
    group. It ends as a process of ``multiprocessing`` does, without finalizing its interpreter:
    a thread of gloo that frees a tensor would end it with "terminate called".
    https://github.com/pytorch/pytorch/issues/190489
    """
    source, path = textwrap.dedent(program), folder / "rank.py"
    path.write_text(source, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(count):
        arguments = [str(path), str(rank), port, str(count)]
        ranks.append(_Running(source, arguments, str(path), f"{path}.{rank}", is_rank=True))
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
