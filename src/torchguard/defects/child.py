"""What runs inside the process of one probe.

The verdict goes to a file of its own, so nothing that the probe, torch or a
compiler prints can be taken for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchguard.defects.catalog import Defect

__all__ = ["CALLED_GUARDS", "ENVIRONMENT", "Task", "Verdict", "main", "no_core_dumps", "perform"]

CALLED_GUARDS = {
    "guarded": "guarded(data=True)",
    "check_consistent": "check_consistent()",
    "bucketed": "bucketed()",
}
"""Guards that are called, and how; every other name is one for ``install()``."""

ENVIRONMENT = ""
"""The identifier of the task that describes torch and the GPU instead of running a probe."""

Kind = Literal["absent", "live", "crash", "not run", "timeout", "broken", "described"]


@dataclass(frozen=True)
class Task:
    """One process to run: a defect's probe, bare or guarded."""

    id: str
    guarded: bool = False


@dataclass(frozen=True)
class Verdict:
    """How one process ended."""

    kind: Kind
    text: str = ""
    seconds: float = 0.0
    log: str = ""

    @property
    def live(self) -> bool:
        """Whether it showed the defect; a probe may do that by dying."""
        return self.kind in {"live", "crash"}


def no_core_dumps() -> None:
    """Keep this process and its children from writing their memory to disk when they crash."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - POSIX only

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def perform(task: Task, verdict_path: Path) -> None:
    """Carry out ``task`` and write the verdict, whatever the probe raises."""
    try:
        verdict = _describe() if task.id == ENVIRONMENT else _probe(task)
    except BaseException as error:  # noqa: BLE001 - a probe that raises is a row as well
        traceback.print_exc()  # into the log of this process
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        verdict = Verdict("broken", text)
    # A probe may die while it writes elsewhere; half a verdict must not look like one.
    unfinished = verdict_path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    unfinished.replace(verdict_path)


def _probe(task: Task) -> Verdict:
    from torchguard.defects.catalog import NotRunHere  # noqa: PLC0415 - imports torch
    from torchguard.defects.registry import find  # noqa: PLC0415 - likewise

    defect = find(task.id)
    probe = defect.probe
    if task.guarded and defect.guarded_probe is not None:
        probe = defect.guarded_probe
    try:
        with _guards_on(defect) if task.guarded else contextlib.nullcontext():
            seen = probe()
    except NotRunHere as reason:
        return Verdict("not run", str(reason))
    if seen is None:
        return Verdict("absent")
    if isinstance(seen, str):
        return Verdict("live", seen)
    raise TypeError(f"the probe returned {seen!r}; expected None or one sentence")


@contextlib.contextmanager
def _guards_on(defect: Defect) -> Iterator[None]:
    """Switch the defect's guards on as a user would; a guarded probe makes its calls itself."""
    import torchguard  # noqa: PLC0415 - imports torch

    with contextlib.ExitStack() as stack:
        names = [name for name in defect.guards if name not in CALLED_GUARDS]
        if names:
            stack.enter_context(torchguard.install(*names))
        if "guarded" in defect.guards and defect.guarded_probe is None:
            stack.enter_context(torchguard.guarded(data=True))
        yield


def _describe() -> Verdict:
    """Say which torch and which GPU the probes see, as JSON in the verdict's text."""
    import torch  # noqa: PLC0415 - this is what the process is for

    gpu = "none"
    fork_is_safe = True
    if torch.cuda.is_available():
        try:
            gpu = torch.cuda.get_device_name(0)
        except RuntimeError:  # the process this one was forked from has touched CUDA
            fork_is_safe = False
        if torch.cuda.device_count() > 1:
            gpu += f" and {torch.cuda.device_count() - 1} more"
    elif torch.backends.mps.is_available():
        gpu = "Apple MPS"
    elif torch.xpu.is_available():
        gpu = torch.xpu.get_device_name(0)
    facts = {"torch": torch.__version__, "gpu": gpu, "fork_is_safe": fork_is_safe}
    return Verdict("described", json.dumps(facts))


def main() -> None:
    """Run the task that a cold start names on its command line."""
    no_core_dumps()
    task = Task(**json.loads(sys.argv[1]))
    perform(task, Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # What the probe has spoiled must not crash the interpreter's shutdown: the verdict is in.
    os._exit(0)
