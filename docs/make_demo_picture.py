"""Draws ``docs/img/demo.png``: the losses of the demo's training, without a failure and with some.

``python docs/make_demo_picture.py``
"""  # noqa: INP001

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from torchguard.cli.acts import EVERY, FIRST, STEPS, training

PICTURE = Path(__file__).parent / "img" / "demo.png"


def main() -> None:
    """Train, and draw the losses."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    bare, guarded = (training(guarded=each)[2] for each in (False, True))
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    lines = {
        "no step fails": (bare[:STEPS], "#95a5a6", 5.0),
        "PyTorch: the step is run again": (bare[STEPS:], "#c0392b", 1.5),
        "transaction: rolled back, run again": (guarded[STEPS:], "#1f618d", 1.5),
    }
    for label, (losses, color, width) in lines.items():
        axes.plot(losses, color=color, linewidth=width, label=label)
    for number in range(FIRST, STEPS, EVERY):
        axes.axvline(number, color="black", linewidth=0.6, linestyle=":")
    # Behind the last step; two of the curves end at the same loss.
    for (label, (losses, color, _)), above in zip(lines.items(), (0.72, 1.0, 1.15), strict=True):
        axes.annotate(label, (STEPS + 0.5, losses[-1] * above), color=color, fontsize=9)
    axes.set_xlim(-1, STEPS * 1.6)
    axes.set(xlabel="step (dotted: out of memory)", ylabel="loss", yscale="log")
    axes.set_xticks(range(0, STEPS + 1, 20))
    title = "A step that is retried after running out of memory changes the training"
    axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
