"""``python -m torchguard demo``: six failures, in PyTorch and with torchguard."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torchguard.cli import DOCUMENTATION, interrupted, write
from torchguard.cli.terminal import BOLD, DIM, GREEN, RED, Paint, folded


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
         "except RuntimeError: optimizer.zero_grad()  # and again: steps 5, 17, 29, 41 and 53",
         "torchguard.transaction(model, optimizer)", "training/transaction.html"),
    _Act("save", "a kill in the middle of a save",
         "torch.save(step_2, path)  # over step 1; writing elsewhere and os.replace() keep it too",
         "torchguard.save(step_2, path)", "training/checkpoints.html"),
    _Act("survive", "a training run that fails five times and is killed three times",
         "retries as above; saves model, optimizers and random state, replaces the file, resumes",
         "transaction, step.state_dict(), checkpoint_folder", "tutorials/survive.html"),
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="show six failures, in PyTorch and with torchguard",
        description="Run six programs that fail, in PyTorch and with torchguard, each in a "
        "process of its own, and show what was lost: within a minute, or two if the compiler's "
        "cache is empty. With matplotlib the losses of the fourth are drawn.",
        epilog="Exit status: 0 when nothing was lost under a guard, 1 when something was.",
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="where the losses are drawn (default: a temporary file)"
    )
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    lost, paint = {"bare": 0, "guarded": 0}, Paint(sys.stdout)
    try:
        for number, act in enumerate(_ACTS, start=1):
            code = folded(f"   {act.code}", sys.stdout, hang=5)
            write(f"{paint(f'{number}. {act.title}', BOLD)}\n{code}\n")
            with contextlib.ExitStack() as stack:
                processes = {way: stack.enter_context(_started(act.name, way)) for way in lost}
                curves = {}
                for way, process in processes.items():
                    failed, text, curves[way] = _ended(process)
                    lost[way] += failed
                    label = act.guard if way == "guarded" else "PyTorch"
                    word, color = ("LOST", RED) if failed else ("kept", GREEN)
                    line = folded(f"   {word}  {label}: {text}", sys.stdout, hang=9)
                    write(line.replace(word, paint(word, color), 1) + "\n")
            if all(curves.values()):
                write(folded(f"   {_drawn(curves, options.picture)}", sys.stdout, hang=5) + "\n")
            write(paint(f"   page: {DOCUMENTATION}{act.page}", DIM) + "\n\n")
    except KeyboardInterrupt:
        return interrupted("demo")
    write(
        f"Lost: {lost['bare']} of {len(_ACTS)} in PyTorch, {lost['guarded']} with torchguard\n"
        "Other defects of your PyTorch: python -m torchguard doctor\n"
    )
    return 1 if lost["guarded"] else 0


def _started(name: str, way: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torchguard.cli.acts", name, way]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)  # noqa: S603 - ours


def _ended(process: subprocess.Popen[str]) -> tuple[bool, str, list[float]]:
    out, err = process.communicate()
    if process.returncode == 0:
        failed, text, losses = json.loads(out.splitlines()[-1])
        return failed, text, losses
    last = err.strip().splitlines()[-1:] or [f"the process ended with {process.returncode}"]
    return True, last[0], []


def _drawn(curves: dict[str, list[float]], path: str | None) -> str:
    """Draw the losses without a failure, in PyTorch, and with torchguard; say where they are."""
    if importlib.util.find_spec("matplotlib") is None:
        return "for a picture of the losses: pip install matplotlib"
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")  # a file, whatever there is to draw on
    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # On a page in light and in dark, the same file.
    mpl.rcParams.update(dict.fromkeys(colored, "#767676") | {"savefig.transparent": True})
    from matplotlib import pyplot as plt  # noqa: PLC0415 - optional

    path = path or str(Path(tempfile.mkdtemp(prefix="torchguard-demo-"), "losses.png"))
    steps = len(curves["bare"]) // 2
    without = curves["bare"][:steps]
    lines = {
        "no step fails": (without, "#95a5a6", 5.0),
        "PyTorch: zero_grad(), run again": (curves["bare"][steps:], "#c0392b", 1.5),
        "transaction: rolled back, run again": (curves["guarded"][steps:], "#3b82c4", 1.5),
    }
    figure, (losses, apart) = plt.subplots(
        2, sharex=True, figsize=(7, 4.6), layout="constrained", height_ratios=(3, 2)
    )
    for label, (line, color, width) in lines.items():
        losses.plot(line, color=color, linewidth=width, label=label)
        difference = [a - b for a, b in zip(line, without, strict=True)]
        apart.plot(difference, color=color, linewidth=width)
    for axes, number in itertools.product((losses, apart), (5, 17, 29, 41, 53)):
        axes.axvline(number, color="#767676", linewidth=0.6, linestyle=":")
    losses.legend(frameon=False)
    losses.set(ylabel="loss", yscale="log")
    apart.set(xlabel="step (dotted: out of memory)", ylabel="difference to\nno failure")
    losses.set_title("Retrying a failed step continues a different run", loc="left", fontsize=10)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        return f"the losses are not drawn: {error}"
    return f"the losses: {path}"
