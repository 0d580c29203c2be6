"""Runs each probe in a process of its own, side by side, and survives whatever they do.

Importing torch takes seconds, and torch.compile seconds more. Where processes can
be forked safely (Linux), one server imports both once and forks a child per probe;
elsewhere every probe pays for a fresh interpreter. Both ways share the same loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torchguard.defects.child import Task, Verdict

__all__ = ["Event", "Plan", "Process", "encode", "events", "forking_is_possible", "loop"]

_SERVER = "server"  # the module that forks the probes
_TICK = 0.01  # seconds between two looks at the children
_LOG_TAIL = 4000  # bytes kept of what a process wrote


@dataclass(frozen=True)
class Plan:
    """Everything the loop needs to know; it travels to the server as JSON."""

    bare: tuple[str, ...]
    """Identifiers in the order in which they start; that of the environment among them."""

    with_guards: tuple[str, ...]
    """Those of them that are run a second time, guarded, when they are live."""

    folder: str
    """Temporary folder for verdicts, logs, the shared compile cache and the probes' own files."""

    workers: int
    timeout: float
    compiles: bool
    """Whether any of them uses torch.compile: then its modules are imported before forking."""


@dataclass(frozen=True)
class Event:
    """A process has started (no verdict yet) or ended."""

    task: Task
    verdict: Verdict | None = None


class Process(Protocol):
    """What the loop needs of a process, however it was started."""

    @property
    def pid(self) -> int:
        """Its identifier, which is that of its process group as well."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""


Start = Callable[[Task, Path, Path], Process]
"""Starts a process for a task; the paths are those of its verdict and its log."""


def events(plan: Plan) -> Generator[Event]:
    """Run the plan; yields as things happen, and ends every process when it is closed."""
    done: dict[Task, Verdict] = {}
    if forking_is_possible():
        with contextlib.closing(_from_server(plan)) as forked:
            for event in forked:
                if _fork_is_unsafe(event):
                    break
                if event.verdict is not None:
                    done[event.task] = event.verdict
                yield event
    # All of it where forking is not possible, and what is left where the server died.
    start = functools.partial(_start_cold, plan)
    with contextlib.closing(loop(plan, start, done)) as cold:
        yield from cold


def loop(
    plan: Plan,
    start: Start,
    done: Mapping[Task, Verdict] = MappingProxyType({}),
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """Keep ``plan.workers`` processes running until every task has a verdict.

    ``done`` holds verdicts that are known already. ``stopped`` is asked every tick;
    when it answers True, everything ends.
    """
    waiting = deque(task for task in map(Task, plan.bare) if task not in done)
    guarded = (_guarded_run(plan, task, verdict) for task, verdict in done.items())
    waiting.extend(task for task in guarded if task is not None and task not in done)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < plan.workers:
                task = waiting.popleft()
                running.append(_Running(task, plan, start))
                yield Event(task)
            time.sleep(_TICK)
            if stopped():
                return
            for process in list(running):
                verdict = process.verdict()
                if verdict is None:
                    continue
                running.remove(process)
                guarded_run = _guarded_run(plan, process.task, verdict)
                if guarded_run is not None:
                    waiting.appendleft(guarded_run)
                yield Event(process.task, verdict)
    finally:
        for process in running:
            process.kill()


def _guarded_run(plan: Plan, task: Task, verdict: Verdict) -> Task | None:
    """Return the run that has to follow ``task``: a live defect is tried again, guarded."""
    if task.guarded or not verdict.live or task.id not in plan.with_guards:
        return None
    return Task(task.id, guarded=True)


def forking_is_possible() -> bool:
    """Whether a child may be forked from a process that has imported torch.

    macOS has ``fork`` too, but its system libraries refuse to work in the child.
    """
    return sys.platform == "linux"


def _from_server(plan: Plan) -> Generator[Event]:
    """Let the server run the plan; ends early when the server does."""
    with Path(plan.folder, "server.log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603 - our own interpreter and our own code
            _command(_SERVER),
            env=_environment(plan),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C at a terminal is for this process, which ends the server in good order.
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps(asdict(plan)) + "\n")
            server.stdin.flush()
        for line in server.stdout:
            yield _decode(line)
    finally:
        # An end of file on its input is what tells the server to end its children.
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def encode(event: Event) -> str:
    """Write an event as one line; the server sends these."""
    return json.dumps(asdict(event)) + "\n"


def _decode(line: str) -> Event:
    values = json.loads(line)
    verdict = values["verdict"]
    return Event(Task(**values["task"]), None if verdict is None else Verdict(**verdict))


def _fork_is_unsafe(event: Event) -> bool:
    """Whether the forked child that looked for a GPU could not use it."""
    if event.verdict is None or event.verdict.kind != "described":
        return False
    return not json.loads(event.verdict.text)["fork_is_safe"]


def _start_cold(plan: Plan, task: Task, verdict_path: Path, log_path: Path) -> Process:
    with log_path.open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and our own code
            _command("child", json.dumps(asdict(task)), str(verdict_path)),
            env=_environment(plan),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _command(module: str, *arguments: str) -> list[str]:
    """Start ``main()`` of a module beside this one, finding packages where we find them."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
        f"from torchguard.defects.{module} import main; main()"
    )
    return [sys.executable, "-c", code, *arguments, json.dumps(sys.path)]


def _environment(plan: Plan) -> dict[str, str]:
    """Return the environment of the probes: one thread each, one compile cache, no switches."""
    # A switch like TORCH_COMPILE_DISABLE would make every compiled defect look absent.
    switches = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_LOGS", "TORCH_TRACE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(switches)}
    cache = str(Path(plan.folder, "cache"))
    return kept | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": str(Path(cache, "triton")),
        # What is shared is what a hash of its source identifies: compiled C++ and its headers.
        # A cached graph must not be shared: a guard that changes how graphs are lowered would be
        # shown the result of the bare run.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        # Files of a probe that dies go when the folder goes.
        "TMPDIR": str(Path(plan.folder, "tmp")),
    }


class _Running:
    """One process from its start to its verdict."""

    def __init__(self, task: Task, plan: Plan, start: Start) -> None:
        self.task = task
        name = f"{plan.bare.index(task.id)}-{'guarded' if task.guarded else 'bare'}"
        self._verdict_path = Path(plan.folder, f"{name}.json")
        self._log_path = Path(plan.folder, f"{name}.log")
        self._timeout = plan.timeout
        self._started = time.monotonic()
        self._process = start(task, self._verdict_path, self._log_path)

    def verdict(self) -> Verdict | None:
        """Return how it ended, or None while it runs; past its time it is killed."""
        status = self._process.poll()
        seconds = time.monotonic() - self._started
        if status is None:
            if seconds < self._timeout:
                return None
            self.kill()
            text = f"no answer after {self._timeout:g} seconds"
            return Verdict("timeout", text, seconds, self._log())
        _kill_group(self._process.pid)  # what a probe leaves running ends with it
        if status != 0:
            return Verdict("crash", _name_of(status), seconds, self._log())
        try:
            values = json.loads(self._verdict_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            text = "the process ended without an answer"
            return Verdict("broken", text, seconds, self._log())
        verdict = Verdict(**{**values, "seconds": seconds})
        if verdict.kind == "broken":
            verdict = Verdict(verdict.kind, verdict.text, seconds, self._log())
        return verdict

    def kill(self) -> None:
        """End the process and everything it has started, and wait for it."""
        _kill_group(self._process.pid)
        while self._process.poll() is None:
            time.sleep(_TICK)

    def _log(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL))
                return log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(pid, signal.SIGKILL)
        else:
            # Windows has no process groups to kill; os.kill ends the process itself.
            os.kill(pid, signal.SIGTERM)


def _name_of(status: int) -> str:
    """Say in words how a process died."""
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    if status == 0xC0000005:  # noqa: PLR2004 - Windows' STATUS_ACCESS_VIOLATION
        return "ACCESS_VIOLATION"
    return f"exit status {status}" if status < 256 else f"exit status {status:#x}"  # noqa: PLR2004
