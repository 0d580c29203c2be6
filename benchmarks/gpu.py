"""Every record that needs a GPU, in minutes: ``python -m benchmarks gpu --minutes 9 --out DIR``.

Works through a list in the order of worth. Each piece is a benchmark in a process of its own, with
a limit, and appends what it finds to ``DIR/results.jsonl`` at once, so that whatever ends it, what
was done counts. ``DIR/log.txt`` has what they printed. Nothing else is written there.

Needs the checkout and torch's own packages: torchguard is imported from ``src``, installed or not,
and no piece needs what an installation registers. This file imports no torch: it starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stream import NO_GPU, NO_TRITON, append, lines_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS, LOG = "results.jsonl", "log.txt"
CLOSING = 6.0  # seconds kept at the end: for the last process to die, and for the summary
TICK = 0.2  # seconds between two looks at whether to stop
GRACE = 4.0  # seconds between telling a benchmark that time is up and ending it
CRASHES = 3  # times a piece is begun again after it died

# What a piece starts is ended with it: they are one process group. (Python 3.10 can't make a
# group without making a session, too, which outlives this command if it is killed itself.)
_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

PARTS = {
    "a": "what undoing a training step costs",
    "b": "what a call costs",
    "c": "whole steps of three models, with each guard on and off by turns",
    "d": "buckets: CUDA graphs recorded per bucket, per shape, with dynamic=True",
}


@dataclass(frozen=True)
class Piece:
    """One benchmark, as it is run on a GPU."""

    part: str
    name: str
    share: float
    """Of the time, beside the others'; what one leaves over goes to all that follow."""

    options: tuple[str, ...] = ()

    def command(self, device: str, *, quick: bool) -> list[str]:
        """Return the command line, without where the results go."""
        options = ("--quick",) if quick else self.options
        return ["-m", "benchmarks", "run", self.name, "--device", device, *options]


# fmt: off
PIECES = (
    Piece("a", "transaction", 45, ("--rounds", "9")),
    Piece("b", "resize", 35, ("--rounds", "15")),
    Piece("b", "assign", 25, ("--rounds", "9")),
    Piece("b", "verified", 35, ("--rounds", "1")),
    Piece("c", "end_to_end", 150, ("--rounds", "9")),
    Piece("d", "buckets", 70, (
        "--rounds", "50", "--mode", "reduce-overhead", "--phase", "forward",
        "--rows", "bucketed fit 8,compile dynamic=True,compile",
    )),
)
# fmt: on


def pieces_of(only: str | None) -> list[Piece]:
    """Choose by letters of parts and names of benchmarks, separated by commas."""
    known = {*PARTS, *(piece.name for piece in PIECES)}
    wanted = {name.strip() for name in (only or "").split(",")} - {""}
    for unknown in sorted(wanted - known):
        names = ", ".join(piece.name for piece in PIECES)
        raise ValueError(f"{unknown!r} is neither a part ({', '.join(PARTS)}) nor one of {names}")
    return [piece for piece in PIECES if {piece.part, piece.name} & (wanted or known)]


def limit_of(piece: Piece, left: Iterable[Piece], seconds: float) -> float:
    """Return a piece's share of the time that is left for it and all that follow."""
    return seconds * piece.share / sum(each.share for each in left)


@dataclass
class Session:
    """One call of the command."""

    out: Path
    seconds: float
    device: str = "cuda"
    quick: bool = False
    revision: str | None = None
    begun: float = field(default_factory=time.monotonic)
    stopped_by: str | None = None
    """The signal that stopped the command; read often. An exception in its place could come while a
    process is being started, and nothing would end that one."""

    def __post_init__(self) -> None:
        self.results = self.out / RESULTS
        self.out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the seconds until no piece may run."""
        return self.begun + self.seconds - CLOSING - time.monotonic()

    def say(self, text: str) -> None:
        """Show a line and put it in the log."""
        shown = f"[{time.monotonic() - self.begun:5.0f} s] {text}"
        print(shown, flush=True)
        with (self.out / LOG).open("a", encoding="utf-8") as log:
            log.write(shown + "\n")

    def environment(self, scratch: str) -> dict[str, str]:
        """Return a child's environment: the checkout's torchguard, and compiled code kept aside."""
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            # The driver is asked without touching CUDA: what forks afterwards can still use it.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(scratch) / "triton"),
            **({} if self.revision is None else {"BENCHMARKS_REVISION": self.revision}),
        }

    def run(self, piece: Piece, seconds: float) -> str:
        """Run a piece for so long at most; return how it ended, and write that down."""
        own = max(1.0, seconds - GRACE)
        command = [sys.executable, *piece.command(self.device, quick=self.quick)]
        command += ["--lines", str(self.results.resolve()), "--seconds", f"{own:.1f}"]
        begun = time.monotonic()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with (
            tempfile.TemporaryDirectory(prefix="tg-", ignore_cleanup_errors=True) as scratch,
            (self.out / LOG).open("ab") as log,
            subprocess.Popen(  # noqa: S603 - a benchmark of ours
                command, cwd=ROOT, env=self.environment(scratch), stdout=log, **streams, **_GROUP
            ) as running,
        ):
            try:
                ended = self._wait(running, piece, begun + seconds)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(running.pid, signal.SIGKILL)  # with all that it has started
        took = time.monotonic() - begun
        line = {"part": piece.part, "name": piece.name, "ended": ended, "limit": round(seconds, 1)}
        append(self.results, {"piece": {**line, "seconds": round(took, 1)}})
        self.say(f"{piece.part} {piece.name}: {ended} after {took:.0f} s")
        return ended

    def _wait(self, running: subprocess.Popen[bytes], piece: Piece, until: float) -> str:
        """Wait until it ends or has to."""
        while time.monotonic() < until:
            if self.stopped_by is not None:
                return f"stopped by {self.stopped_by}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = running.wait(TICK)
                if status != 0:
                    return "needs Triton" if status == NO_TRITON else f"failed with {status}"
                done = finished(self.results, piece)
                return "finished" if done else "stopped by itself: its time was up"
        return "killed: time was up"


def finished(path: Path, piece: Piece) -> bool:
    """Whether the last run of a piece that is written down there has come to its end."""
    runs: dict[str, str | None] = {}
    for line in lines_of(path):
        if "head" in line and line["head"]["benchmark"] == f"bench_{piece.name}":
            runs[line["run"]] = None
        elif "ended" in line and line["run"] in runs:
            runs[line["run"]] = line["ended"]
    return bool(runs) and [*runs.values()][-1] == "finished"


def work_through(session: Session, pieces: Sequence[Piece], *, go_on: bool) -> list[str]:
    """Run the pieces one after the other; return the lines of a summary."""
    summary = []
    for number, piece in enumerate(pieces):
        if go_on and finished(session.results, piece):
            ended = "finished before"
        elif session.stopped_by is not None:
            ended = f"stopped by {session.stopped_by}"
        elif session.left() < GRACE + 1:
            ended = "no time was left"
        else:
            ended = _begun(session, piece, pieces[number:])
        summary.append(f"{piece.part} {piece.name}: {ended}")
        if ended == f"failed with {NO_GPU}":
            summary.append("no part can run without a CUDA GPU; --rehearse is for a CPU")
            break
    return summary


def _begun(session: Session, piece: Piece, left: Sequence[Piece]) -> str:
    """Run a piece with its share of the time; what died of a signal goes on behind its cause."""
    limit = session.left() if session.quick else limit_of(piece, left, session.left())
    command = shlex.join(["python", *piece.command("cuda", quick=False)])
    would = "would run on a GPU" if session.quick else "runs"
    session.say(f"== {piece.part}: {PARTS[piece.part]}")
    session.say(f"   {would}: {command}; {limit:.0f} s of {session.left():.0f} s left")
    until = time.monotonic() + limit
    for _ in range(CRASHES):
        ended = session.run(piece, until - time.monotonic())
        if not ended.startswith("failed with -") or until - time.monotonic() < 2 * GRACE:
            break
    return ended


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description=__doc__,
        epilog="\n".join(f"{letter}  {what}" for letter, what in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="in all (default: 9)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="a folder without results")
    help_ = "go on where a call stopped"
    where.add_argument("--continue", type=Path, dest="go_on", metavar="DIR", help=help_)
    parser.add_argument("--only", metavar="NAMES", help="parts or benchmarks: a,c or end_to_end")
    help_ = "of a copy of the checkout that is no git repository"
    parser.add_argument("--revision", metavar="COMMIT", help=help_)
    help_ = "the same list with tiny sizes and without inductor, on a CPU or on cuda"
    devices: dict[str, Any] = {"choices": ("cpu", "cuda"), "nargs": "?", "const": "cpu"}
    parser.add_argument("--rehearse", help=help_, **devices)
    return parser


def main(arguments: Sequence[str] | None = None, *, began: float | None = None) -> int:
    """Run the command; ``began`` is when its process did, on the monotonic clock."""
    parser = _parser()
    options = parser.parse_args(arguments)
    out: Path = options.out or options.go_on
    there, go_on = (out / RESULTS).exists(), options.go_on is not None
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    if there and not go_on:
        parser.error(f"--out {out}: {RESULTS} is there already; --continue {out} goes on with it")
    if go_on and not there:
        parser.error(f"--continue {out}: there is no {RESULTS} to go on with")
    try:
        pieces = pieces_of(options.only)
    except ValueError as error:
        parser.error(str(error))
    device, quick = options.rehearse or "cuda", options.rehearse is not None
    session = Session(out, 60 * options.minutes, device, quick, options.revision)
    session.begun = session.begun if began is None else began
    with _told_to_stop(session):
        summary = work_through(session, pieces, go_on=go_on)
    for line in summary:
        session.say(line)
    session.say(f"python -m benchmarks report {out} makes records and pages of what is there")
    if session.stopped_by is not None:
        return 128 + signal.Signals[session.stopped_by]
    return int(any(": failed" in line for line in summary))


@contextlib.contextmanager
def _told_to_stop(session: Session) -> Iterator[None]:
    """Let the signals that end a command end its children first, and the summary be written."""

    def stop(number: int, _: object) -> None:
        session.stopped_by = signal.Signals(number).name

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
