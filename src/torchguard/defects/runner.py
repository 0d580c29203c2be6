"""Runs each probe in a process of its own, side by side, and survives whatever they do.

Three kinds of process:

- the doctor's, which starts one supervisor and reads verdicts from a pipe, as lines of JSON;
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
import time
import traceback
import warnings
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NoReturn

from torchguard._files import write_text
from torchguard.defects.catalog import CALLED_GUARDS, Defect, NotRunHere, find

_LOOK = 1.0  # seconds after which processes are looked at even if nothing was reported
_LOG_TAIL = 4000  # bytes kept of what a process wrote
_STDIN = 0

# What the server of the probes' processes imports; multiprocessing ignores an import that fails.
_PRELOADED = [
    "torch",
    "torchguard.patching.install",
    *(
        f"torchguard.defects.probes.{file.stem}"
        for file in sorted(Path(__file__).with_name("probes").glob("[!_]*.py"))
    ),
]
_COMPILER = ["torchguard._torch.compiler"]

ENVIRONMENT = ""
"""In the place of a defect: describes torch and the GPU, "absent" and JSON if all is well."""


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
    "broken",  # the probe itself failed: it proves nothing
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


@dataclass(frozen=True)
class Schedule:
    """Everything the supervisor needs to know; it travels there as JSON."""

    names: tuple[str, ...]
    """The defects to probe, in the order in which they start."""

    guarded: tuple[str, ...]
    """Those that are probed a second time, guarded, when the bare run has shown them."""

    folder: str
    """Temporary folder for verdicts, logs, the shared compile cache and the probes' own files."""

    workers: int
    timeout: float
    compiles: bool
    """Whether any of them uses torch.compile: then the compiler is imported before forking."""


# --- the doctor's process


def run(schedule: Schedule) -> Generator[tuple[str, list[Verdict]]]:
    """Yield each defect with the verdict of its bare run, and that of the guarded one if it ran.

    Closing the generator ends every process.
    """
    log = Path(schedule.folder, "supervisor.log")
    with log.open("ab") as errors:
        supervisor = subprocess.Popen(  # noqa: S603 - our own interpreter and our own code
            [sys.executable, "-c", f"from {__name__} import supervise; supervise()"],
            env=_environment(schedule.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C at a terminal is for this process, which ends the supervisor in good order.
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    left = dict.fromkeys(schedule.names)
    try:
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.write(json.dumps(asdict(schedule)) + "\n")
            supervisor.stdin.flush()
        for line in supervisor.stdout:
            name, verdicts = json.loads(line)
            del left[name]
            yield name, [Verdict(**each) for each in verdicts]
        text = "the process that starts the probes has ended"
        for name in left:
            yield name, [Verdict("broken", text, log=_tail(log))]
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
    """Run the schedule on standard input and write its verdicts to standard output."""
    import resource  # noqa: PLC0415 - POSIX only, as this function

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what crashes writes no memory to disk
    # Whatever an import prints goes to the log, not between the verdicts.
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    schedule = Schedule(**json.loads(sys.stdin.readline()))
    # Not macOS: its system libraries refuse to work in a fork.
    processes: Any = multiprocessing.get_context(
        "forkserver" if sys.platform == "linux" else "spawn"
    )
    if sys.platform == "linux":
        # The server's socket lies there: its path has at most 108 bytes, however long TMPDIR is.
        tempfile.tempdir = "/tmp"  # noqa: S108 - multiprocessing makes a folder of its own in it
        processes.set_forkserver_preload(_PRELOADED + _COMPILER * schedule.compiles)
    _run_all(schedule, processes, channel)


def _run_all(schedule: Schedule, processes: Any, channel: int) -> None:
    """Keep ``schedule.workers`` processes running until every defect has its verdicts."""
    bare: dict[str, Verdict] = {}
    waiting, started = deque(schedule.names), 0
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < schedule.workers:
                name = waiting.popleft()
                running.append(_Running(started, name, name in bare, schedule, processes))
                started += 1
            # A spawned process that leaves a child behind may end without its sentinel being
            # ready: the child has the other end of that pipe. So each is looked at once a second.
            ready = wait([_STDIN, *(each.sentinel for each in running)], _LOOK)
            if _STDIN in ready:  # its end: the doctor is gone
                return
            for each in [each for each in running if each.has_ended()]:
                verdict = each.verdict()
                running.remove(each)
                if not each.guarded and verdict.live and each.name in schedule.guarded:
                    bare[each.name] = verdict
                    waiting.appendleft(each.name)
                else:
                    verdicts = [bare[each.name], verdict] if each.guarded else [verdict]
                    line = json.dumps([each.name, [asdict(verdict) for verdict in verdicts]])
                    os.write(channel, f"{line}\n".encode())
    finally:
        for each in running:
            each.kill()


class _Running:
    """One process from its start to its verdict."""

    def __init__(
        self, number: int, name: str, guarded: bool, schedule: Schedule, processes: Any
    ) -> None:
        self.name, self.guarded = name, guarded
        self._timeout = schedule.timeout
        self._started = time.monotonic()
        self._verdict_path = Path(schedule.folder, f"{number}.json")
        self._log_path = self._verdict_path.with_suffix(".log")
        arguments = name, guarded, self._verdict_path, self._log_path
        self._process = processes.Process(target=run_probe, args=arguments)
        self._process.start()
        self.sentinel: int = self._process.sentinel

    def has_ended(self) -> bool:
        """Whether the process has ended by itself, or has to."""
        return self._process.exitcode is not None or self._seconds() > self._timeout

    def verdict(self) -> Verdict:
        """Return how it ended; past its time it is killed."""
        seconds, status = self._seconds(), self._process.exitcode
        self.kill()  # what a probe leaves running ends with it
        if status is None:
            text = f"no answer after {self._timeout:g} seconds"
            verdict = Verdict("open" if self.guarded else "timeout", text)
        elif status != 0:
            text = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            verdict = Verdict("open", f"crash: {text}") if self.guarded else Verdict("crash", text)
        else:
            try:
                verdict = Verdict(**json.loads(self._verdict_path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                verdict = Verdict("broken", "the process ended without an answer")
        answered = status == 0 and verdict.status != "broken"
        return replace(verdict, seconds=seconds, log="" if answered else self._log())

    def kill(self) -> None:
        """End the process and everything it has started, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not lead its group yet
        self._process.join()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _log(self) -> str:
        # Until a process has its own log, it writes to the supervisor's.
        own = self._log_path
        return _tail(own if own.exists() else own.with_name("supervisor.log"))


def _tail(path: Path) -> str:
    return path.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")


# ---- the process of a probe ----


def run_probe(name: str, guarded: bool, verdict_path: Path, log_path: Path) -> NoReturn:
    """Run a defect's probe and write the verdict, whatever the probe raises."""
    os.setpgid(0, 0)  # a group that is killed together
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(log_path, flags)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # A probe may look for one, so none is ignored; as an error (-W error) it would end the probe.
    warnings.simplefilter("default")
    try:
        verdict = _describe() if name == ENVIRONMENT else _probe(find(name), guarded)
    except BaseException as error:  # noqa: BLE001 - a probe that raises is a row as well
        traceback.print_exc()  # into the log of this process
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        verdict = Verdict("broken", text)
    # A probe may die while it writes elsewhere; half a verdict must not look like one.
    write_text(verdict_path, json.dumps(asdict(verdict)), fsync=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # What the probe has spoiled must not crash the interpreter's shutdown: the verdict is in.
    os._exit(0)


def _probe(defect: Defect, guarded: bool) -> Verdict:
    import torchguard  # noqa: PLC0415 - imports torch

    names: list[Any] = [name for name in defect.guards if name not in CALLED_GUARDS]
    # As a user would; a guard that is called is called by the probe.
    installed = torchguard.install(*names) if guarded and names else contextlib.nullcontext()
    try:
        with installed:
            seen = defect.run(guarded=guarded)
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


def _describe() -> Verdict:
    """Say which torch and which GPU the probes see, as JSON."""
    import torch  # noqa: PLC0415 - this is what the process is for

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return Verdict("absent", json.dumps({"torch": torch.__version__, "gpu": gpu}))
