"""The process that imports torch once and forks a child for every probe.

It talks to the doctor over its standard streams: the plan comes in as one line of
JSON, every event goes out as one, and an end of file on its input ends it and its
children, so nothing stays behind when the doctor is interrupted or killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import sys
from typing import TYPE_CHECKING

from torchguard.defects.child import Task, no_core_dumps, perform
from torchguard.defects.processes import Plan, encode, loop

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["main"]

# torch.compile imports these; they take as long as torch itself.
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cpu_vec_isa")


def main() -> None:
    """Run the plan on standard input and write its events to standard output."""
    no_core_dumps()
    # Whatever an import prints goes to the log, not between the events.
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    plan = Plan(**json.loads(sys.stdin.readline()))
    _import_what_probes_need(plan)
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names are enough
        # A fork copies one thread, and the locks of all: no child could be trusted. The
        # doctor sees no event and starts every probe in a fresh interpreter instead.
        sys.exit("an import started a thread, so this process can't be forked safely")

    def fork(task: Task, verdict_path: Path, log_path: Path) -> _Forked:
        return _fork(task, verdict_path, log_path, channel)

    with contextlib.closing(loop(plan, fork, stopped=_doctor_is_gone)) as happening:
        for event in happening:
            os.write(channel, encode(event).encode())


def _import_what_probes_need(plan: Plan) -> None:
    from torchguard.defects.registry import built_in  # noqa: PLC0415 - imports torch

    built_in()
    if not plan.compiles:
        return
    # Only a head start: a probe that needs one of these itself reports what is wrong with it.
    with contextlib.suppress(Exception):
        for name in _COMPILER:
            module = importlib.import_module(name)
        # Which vector instructions work here is remembered per process, and finding out means
        # two compilations and two more interpreters that import torch: once is enough.
        module.pick_vec_isa()


def _doctor_is_gone() -> bool:
    # After the plan nothing is sent any more: readable means closed.
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _fork(task: Task, verdict_path: Path, log_path: Path, channel: int) -> _Forked:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        # The child does the same; whoever comes first, the group exists from here on.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return _Forked(pid)
    try:
        os.setpgid(0, 0)
        os.close(channel)
        _redirect(log_path)
        perform(task, verdict_path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    finally:
        os._exit(1)


def _redirect(log_path: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)


class _Forked:
    """A forked child, with the part of ``subprocess.Popen`` that the loop needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status
