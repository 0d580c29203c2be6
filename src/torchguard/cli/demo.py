"""``python -m torchguard demo``: five failures, in PyTorch and with torchguard."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from typing import NamedTuple

from torchguard.cli import DOCUMENTATION, interrupted, write


class _Act(NamedTuple):
    name: str
    title: str
    code: str
    guard: str
    page: str


_ACTS = (
    _Act("resize", "a resize that fails",
         "t = torch.from_numpy(np.zeros(4, np.float32)); t.resize_(5, 5)  # raises",
         'torchguard.install("resize")', "process/resize.html"),
    _Act("overlap", "an operation that reads what it writes",
         "x = torch.tensor([[1., 2., 3.], [4., 5., 6.]]); x -= x[:, :1]",
         'torchguard.install("overlap")', "process/overlap.html"),
    _Act("compiled", "a function that is compiled wrong",
         "counts[0] = 1; before = counts.clone(); counts[1] = 2; return before",
         "torchguard.verified()", "compile/verified.html"),
    _Act("training", "training steps that run out of memory and are run again",
         "for step 5, 17, 29, 41 and 53, in the middle of its gradients",
         "torchguard.transaction(model, optimizer)", "training/transaction.html"),
    _Act("save", "a kill in the middle of a save",
         "torch.save(step_2, path)  # over step 1",
         "torchguard.save(step_2, path)", "training/checkpoints.html"),
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="show five failures, in PyTorch and with torchguard",
        description="Run five programs that fail, in PyTorch and with torchguard, each in a "
        "process of its own, and show the losses: within a minute, or two if the compiler's "
        "cache is empty.",
        epilog="Exit status: 0 when nothing was lost under a guard, 1 when something was.",
    )
    parser.set_defaults(command=_main, parser=parser)


def _main(_: argparse.Namespace) -> int:
    lost = {"bare": 0, "guarded": 0}
    try:
        for number, act in enumerate(_ACTS, start=1):
            write(f"{number}. {act.title}\n   {act.code}\n")
            with contextlib.ExitStack() as stack:
                processes = {way: stack.enter_context(_started(act.name, way)) for way in lost}
                for way, process in processes.items():
                    failed, text = _ended(process)
                    lost[way] += failed
                    label = act.guard if way == "guarded" else "PyTorch"
                    write(f"   {'LOST' if failed else 'kept'}  {label}: {text}\n")
            write(f"   page: {DOCUMENTATION}{act.page}\n\n")
    except KeyboardInterrupt:
        return interrupted("demo")
    write(
        f"Lost: {lost['bare']} of {len(_ACTS)} in PyTorch, {lost['guarded']} with torchguard. "
        "What else your torch has: python -m torchguard doctor\n"
    )
    return 1 if lost["guarded"] else 0


def _started(name: str, way: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torchguard.cli.acts", name, way]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)  # noqa: S603 - ours


def _ended(process: subprocess.Popen[str]) -> tuple[bool, str]:
    """Return whether something was lost, and the act's last line."""
    out, err = process.communicate()
    if process.returncode == 0:
        failed, text, _ = json.loads(out.splitlines()[-1])
        return failed, text
    last = err.strip().splitlines()[-1:] or [f"the process ended with {process.returncode}"]
    return True, last[0]
