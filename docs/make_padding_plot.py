"""Draws docs/img/bucketed-padding.png: the waste of batches that are drawn in four ways.

    python docs/make_padding_plot.py

Counts, not times: the same on every machine.
"""  # noqa: INP001

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from torchguard import BucketBatchSampler, Buckets

IMAGE = Path(__file__).parent / "img" / "bucketed-padding.png"
ITEMS, ROWS, TOKENS = 8192, 16, 4096


def lengths() -> list[int]:
    """Draw log-normal lengths, as of sentences."""
    drawn = np.random.default_rng(0).lognormal(4.3, 0.7, ITEMS).clip(4, 512)
    return [int(each) for each in drawn]


def padding(batches: Iterable[tuple[int, int]]) -> tuple[float, int]:
    """Return padding per real token in %, and how many shapes (rows, length) there are."""
    shapes = list(batches)
    computed = sum(rows * length for rows, length in shapes)
    return 100 * (computed / sum(lengths()) - 1), len(set(shapes))


def ways() -> dict[str, tuple[float, int]]:
    """Return what the picture compares: the items of one epoch, each once."""
    items = np.array(lengths())
    random = np.random.default_rng(1).permutation(items).reshape(-1, ROWS).max(1)
    powers = Buckets.powers_of_two(16, 512)
    fitted = Buckets.fit(random, 8)
    similar = Buckets.fit(items, 8)
    sampler = BucketBatchSampler(items, similar, tokens=TOKENS)
    sampled = [int(items[batch].max()) for batch in sampler]
    full = [(sampler.batch_sizes[size], size) for size in map(similar.bucket_for, sampled)]
    return {
        "random batches,\nto their longest": padding((ROWS, int(each)) for each in random),
        "random batches,\nto powers of two": padding((ROWS, powers.bucket_for(n)) for n in random),
        "random batches,\nto Buckets.fit": padding((ROWS, fitted.bucket_for(n)) for n in random),
        "BucketBatchSampler,\nto Buckets.fit": padding(full),
    }


def main() -> int:
    """Draw it."""
    import matplotlib as mpl  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # On a page in light and in dark, the same file.
    mpl.rcParams.update(dict.fromkeys(colored, "#767676") | {"savefig.transparent": True})
    found = ways()
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    colors = ["#9a9a9a"] * (len(found) - 1) + ["#3b82c4"]
    bars = axes.barh(list(found), [waste for waste, _ in found.values()], color=colors)
    axes.bar_label(bars, [f"{w:.0f} %, {n} shapes" for w, n in found.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(f"waste: padding per real token, in % ({ITEMS:,} log-normal lengths)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Batches of similar length waste least", loc="left", fontsize=11)
    figure.savefig(IMAGE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
