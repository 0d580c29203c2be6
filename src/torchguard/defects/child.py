"""What runs in the process of one probe.

The verdict goes to a file of its own, so that nothing that the probe, torch or a compiler
prints can be taken for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchguard.defects.catalog import CALLED_GUARDS, Defect, NotRunHere, error_text, find
from torchguard.defects.report import Status, Verdict


class Task(NamedTuple):
    """One process to run: a defect's probe, bare or guarded."""

    id: str
    guarded: bool = False


ENVIRONMENT = Task("")
"""Describes torch and the GPU instead of running a probe: "absent", and JSON, if all is well."""


def run_task(task: Task, verdict_path: Path, log_path: Path, channel: int | None) -> NoReturn:
    """Carry out ``task`` and write the verdict, whatever the probe raises."""
    if os.name == "posix":
        os.setpgid(0, 0)  # a group that is killed together
    if channel is not None:
        os.close(channel)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(log_path, flags)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        verdict = _describe() if task == ENVIRONMENT else _probe(find(task.id), task.guarded)
    except BaseException as error:  # noqa: BLE001 - a probe that raises is a row as well
        traceback.print_exc()  # into the log of this process
        verdict = Verdict("broken", error_text(error))
    # A probe may die while it writes elsewhere; half a verdict must not look like one.
    unfinished = verdict_path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    unfinished.replace(verdict_path)
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
        if "guarded" in defect.guards and defect.guarded_probe is None:
            stack.enter_context(torchguard.guarded(data=True))
        yield


def _describe() -> Verdict:
    """Say which torch and which GPU the probes see, as JSON."""
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
    return Verdict("absent", json.dumps(facts))
