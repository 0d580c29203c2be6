"""Runs each probe in a process of its own, side by side, and survives whatever they do.

Three kinds of process:

- the doctor's, which starts one supervisor and reads events from a pipe, as lines of JSON;
- the supervisor, which starts a process for each probe with ``multiprocessing`` and waits for it:
  on Linux as a fork of ``multiprocessing``'s server, which has imported torch and its compiler
  once, elsewhere in a fresh interpreter;
- a probe's. Its verdict goes to a file: nothing that it prints is taken for that.

The doctor's process starts no probe itself: ``multiprocessing`` would run a caller's main module
again in each of them, and its server would keep the caller's environment.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from torchguard._files import write_text
from torchguard.defects.catalog import CALLED_GUARDS, Defect, NotRunHere, error_text, find

_LOOK = 1.0  # seconds after which processes are looked at even if nothing was reported
_LOG_TAIL = 4000  # bytes kept of what a process wrote

# What the server of the probes' processes imports. An import that fails is reported by the probe
# that needs it: multiprocessing ignores it.
_PRELOADED = [
    "torch",
    "torchguard.patching.install",
    *(
        f"torchguard.defects.probes.{file.stem}"
        for file in sorted(Path(__file__).with_name("probes").glob("[!_]*.py"))
    ),
]
_COMPILER = ["torchguard._torch.compiler"]


Status = Literal[
    # Of a run on bare torch:
    "absent",  # this torch does not have the defect
    "corrupt",  # live: a tensor, a buffer or a file was spoiled
    "wrong result",  # live: the program computed something else than it says
    "crash",  # live: the process died
    "timeout",  # the probe was killed after its time: neither live nor absent
    # Of a run with the guards on, which follows a live one:
    "closed",  # the defect is gone
    "detected",  # the damage is done, and the guards find it where they are called
    "open",  # still live, or no guard exists yet
    "-",  # nothing to close
    # Of either:
    "not run",  # this machine lacks what the probe needs; never to be read as closed
    "broken",  # the probe or the plug-in itself failed: it proves nothing
]


@dataclass(frozen=True)
class Verdict:
    """How the run of one probe ended."""

    status: Status
    detail: str = ""
    """The probe's sentence, the signal's name, or why there is no answer."""

    seconds: float = 0.0
    log: str = ""
    """The end of what the process wrote, where the status alone does not explain it."""

    @property
    def live(self) -> bool:
        """Whether bare torch showed the defect; a probe may do that by dying."""
        return self.status in {"corrupt", "wrong result", "crash"}


class Event(NamedTuple):
    """A process has ended."""

    task: Task
    verdict: Verdict


@dataclass(frozen=True)
class Schedule:
    """Everything the supervisor needs to know; it travels there as JSON."""

    tasks: tuple[Task, ...]
    """The processes to run, in the order in which they start."""

    guarded: tuple[str, ...]
    """Defects that are probed a second time, guarded, when the bare run has shown them."""

    folder: str
    """Temporary folder for verdicts, logs, the shared compile cache and the probes' own files."""

    workers: int
    timeout: float
    compiles: bool
    """Whether any of them uses torch.compile: then the compiler is imported before forking."""

    def follow_up(self, task: Task, verdict: Verdict) -> list[Task]:
        """Return the run that has to follow ``task``: a live defect is probed again, guarded."""
        again = not task.guarded and verdict.live and task.id in self.guarded
        return [Task(task.id, guarded=True)] if again else []


# --- the doctor's process


def run(schedule: Schedule) -> Generator[Event]:
    """Run the schedule; yields as things happen, and ends every process when it is closed."""
    left = dict.fromkeys(schedule.tasks)
    with contextlib.closing(_from_supervisor(schedule)) as events:
        for event in events:
            del left[event.task]
            left |= dict.fromkeys(schedule.follow_up(event.task, event.verdict))
            yield event
    for task in left:
        text = "the process that starts the probes has ended"
        log = _tail(Path(schedule.folder, "supervisor.log"))
        yield Event(task, Verdict("broken", text, log=log))


def _from_supervisor(schedule: Schedule) -> Generator[Event]:
    """Let a supervisor run the schedule; ends early when the supervisor does."""
    with Path(schedule.folder, "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(  # noqa: S603 - our own interpreter and our own code
            [sys.executable, "-c", f"from {__name__} import supervise; supervise()"],
            env=_environment(schedule.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C at a terminal is for this process, which ends the supervisor in good order.
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.write(json.dumps(asdict(schedule)) + "\n")
            supervisor.stdin.flush()
        for line in supervisor.stdout:
            task, verdict = json.loads(line)
            yield Event(Task(*task), Verdict(**verdict))
    finally:
        # An end of file on its input is what tells the supervisor to end its children.
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.close()
        try:
            supervisor.wait(timeout=10)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        supervisor.stdout.close()


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of the probes: one thread each, one compile cache, no switches."""
    # A switch like TORCH_COMPILE_DISABLE would make every compiled defect look absent.
    switches = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_LOGS", "TORCH_TRACE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(switches)}
    cache = Path(folder, "cache")
    threads = ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "TORCHINDUCTOR_COMPILE")
    return kept | {
        # The modules of the caller, for each process, however it is started.
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        **{f"{name}_THREADS": "1" for name in threads},
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # Compiled C++ is shared, which a hash of its source identifies, and no graph: a guard that
        # changes how graphs are lowered would be shown the result of the bare run.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        # Files of a probe that dies go when the folder goes.
        "TMPDIR": str(Path(folder, "tmp")),
    }


# --- the supervisor


def supervise() -> None:
    """Run the schedule on standard input and write its events to standard output."""
    _no_core_dumps()
    # Whatever an import prints goes to the log, not between the events.
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    values = json.loads(sys.stdin.readline())
    schedule = Schedule(**{**values, "tasks": tuple(Task(*task) for task in values["tasks"])})
    # Not macOS: its system libraries refuse to work in a fork.
    processes: Any = multiprocessing.get_context(
        "forkserver" if sys.platform == "linux" else "spawn"
    )
    if sys.platform == "linux":
        # The server's socket lies there: its path has at most 108 bytes, however long TMPDIR is.
        tempfile.tempdir = "/tmp"  # noqa: S108 - multiprocessing makes a folder of its own in it
        processes.set_forkserver_preload(_PRELOADED + _COMPILER * schedule.compiles)
    _run_all(schedule, processes, channel, _readable_at_end_of_input())


def _readable_at_end_of_input() -> Connection:
    """Return what can be waited for on Windows as well, where standard input can't."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def close_at_end() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock the exit of the interpreter needs
            pass
        writer.close()

    threading.Thread(target=close_at_end, daemon=True).start()
    return reader


def _run_all(schedule: Schedule, processes: Any, channel: int, doctor_is_gone: Connection) -> None:
    """Keep ``schedule.workers`` processes running until every task has a verdict."""

    def send(event: Event) -> None:
        os.write(channel, f"{json.dumps([event.task, asdict(event.verdict)])}\n".encode())

    waiting, started = deque(schedule.tasks), 0
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < schedule.workers:
                running.append(_Running(started, waiting.popleft(), schedule, processes))
                started += 1
            # A spawned process that leaves a child behind may end without its sentinel being
            # ready: the child has the other end of that pipe. So each is looked at once a second.
            ready = wait([doctor_is_gone, *(each.sentinel for each in running)], _LOOK)
            if doctor_is_gone in ready:
                return
            for each in [each for each in running if each.has_ended()]:
                verdict = each.verdict()
                running.remove(each)
                waiting.extendleft(schedule.follow_up(each.task, verdict))
                send(Event(each.task, verdict))
    finally:
        for each in running:
            each.kill()


class _Running:
    """One process from its start to its verdict."""

    def __init__(self, number: int, task: Task, schedule: Schedule, processes: Any) -> None:
        self.task = task
        self._timeout = schedule.timeout
        self._started = time.monotonic()
        self._verdict_path = Path(schedule.folder, f"{number}.json")
        self._log_path = self._verdict_path.with_suffix(".log")
        arguments = task, self._verdict_path, self._log_path
        self._process = processes.Process(target=run_task, args=arguments)
        self._process.start()
        self.sentinel: int = self._process.sentinel

    def has_ended(self) -> bool:
        """Whether the process has ended by itself, or has to."""
        return self._process.exitcode is not None or self._seconds() > self._timeout

    def verdict(self) -> Verdict:
        """Return how it ended; past its time it is killed."""
        seconds, status, guarded = self._seconds(), self._process.exitcode, self.task.guarded
        self.kill()  # what a probe leaves running ends with it
        if status is None:
            text = f"no answer after {self._timeout:g} seconds"
            verdict = Verdict("open" if guarded else "timeout", text)
        elif status != 0:
            text = _name_of(status)
            verdict = Verdict("open", f"crash: {text}") if guarded else Verdict("crash", text)
        else:
            try:
                verdict = Verdict(**json.loads(self._verdict_path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                verdict = Verdict("broken", "the process ended without an answer")
        answered = status == 0 and verdict.status != "broken"
        return replace(verdict, seconds=seconds, log="" if answered else self._log())

    def kill(self) -> None:
        """End the process and everything it has started, and wait for it."""
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not lead its group yet; Windows has no groups to kill
        self._process.join()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _log(self) -> str:
        # Until a process has its own log, it writes to the supervisor's.
        own = self._log_path
        return _tail(own if own.exists() else own.with_name("supervisor.log"))


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


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


def _no_core_dumps() -> None:
    """Keep this process and its children from writing their memory to disk when they crash."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - POSIX only

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# ---- the process of a probe ----


class Task(NamedTuple):
    """One process to run: a defect's probe, bare or guarded."""

    id: str
    guarded: bool = False


ENVIRONMENT = Task("")
"""Describes torch and the GPU instead of running a probe: "absent", and JSON, if all is well."""


def run_task(task: Task, verdict_path: Path, log_path: Path) -> NoReturn:
    """Carry out ``task`` and write the verdict, whatever the probe raises."""
    if os.name == "posix":
        os.setpgid(0, 0)  # a group that is killed together
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(log_path, flags)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # A probe may look for one, so none is ignored; as an error (-W error) it would end the probe.
    warnings.simplefilter("default")
    try:
        verdict = _describe() if task == ENVIRONMENT else _probe(find(task.id), task.guarded)
    except BaseException as error:  # noqa: BLE001 - a probe that raises is a row as well
        traceback.print_exc()  # into the log of this process
        verdict = Verdict("broken", error_text(error))
    # A probe may die while it writes elsewhere; half a verdict must not look like one.
    write_text(verdict_path, json.dumps(asdict(verdict)), fsync=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # What the probe has spoiled must not crash the interpreter's shutdown: the verdict is in.
    os._exit(0)


def _probe(defect: Defect, guarded: bool) -> Verdict:
    probe = (guarded and defect.guarded_probe) or defect.probe
    try:
        with _guards_on(defect) if guarded else contextlib.nullcontext():
            seen = probe()
    except NotRunHere as reason:
        return Verdict("not run", str(reason))
    if seen is not None and not isinstance(seen, str):
        raise TypeError(f"the probe returned {seen!r}; expected None or one sentence")
    status: Status
    if seen is None:
        status = "absent" if not guarded else "detected" if defect.only_detects else "closed"
    else:
        status = "open" if guarded else "corrupt" if defect.family == "memory" else "wrong result"
    return Verdict(status, seen or "")


@contextlib.contextmanager
def _guards_on(defect: Defect) -> Iterator[None]:
    """Switch the defect's guards on as a user would; a guarded probe makes its calls itself."""
    import torchguard  # noqa: PLC0415 - imports torch

    with contextlib.ExitStack() as stack:
        names: list[Any] = [name for name in defect.guards if name not in CALLED_GUARDS]
        if names:
            stack.enter_context(torchguard.install(*names))
        yield


def _describe() -> Verdict:
    """Say which torch and which GPU the probes see, as JSON."""
    import torch  # noqa: PLC0415 - this is what the process is for

    gpu = "none"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
        if torch.cuda.device_count() > 1:
            gpu += f" and {torch.cuda.device_count() - 1} more"
    elif torch.backends.mps.is_available():
        gpu = "Apple MPS"
    elif torch.xpu.is_available():
        gpu = torch.xpu.get_device_name(0)
    return Verdict("absent", json.dumps({"torch": torch.__version__, "gpu": gpu}))
