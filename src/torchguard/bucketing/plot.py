"""Draws a ladder against the sizes it is for. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchguard.bucketing.fit import Cost, best_ladders, costs_of
from torchguard.bucketing.histogram import Observed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COUNTS = 32
_BLUE, _RED, _GREY, _LIGHT = "#2b6ca3", "#c2452d", "#555555", "#a9c6de"


def draw(
    buckets: Sequence[int],
    observed: Observed,
    path: str | os.PathLike[str],
    cost: Cost,
    waste: float,
) -> None:
    """Draw three panels: where the sizes fall, each bucket's waste, waste against count."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        raise ImportError(
            "Buckets.plot needs matplotlib: pip install 'torchguard-runtime[plot]'"
        ) from None
    # A Figure of its own, not pyplot's: nothing of the caller's plots or backend is touched.
    figure = Figure(figsize=(9.0, 8.4), layout="constrained")
    histogram, shares, curve = figure.subplots(3, 1, height_ratios=(3, 2, 3))
    shares.sharex(histogram)
    _draw_sizes(histogram, buckets, observed)
    _draw_shares(shares, buckets, observed, cost)
    _draw_curve(curve, buckets, observed, cost, waste)
    for axes in (histogram, shares, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_sizes(axes: Axes, buckets: Sequence[int], observed: Observed) -> None:
    low, high = int(observed.sizes[0]), buckets[-1]
    wide = high > 30 * low  # then most sizes would share the first bars
    spaced = np.geomspace if wide else np.linspace
    edges = np.unique(spaced(low, high + 1, 61).round())
    axes.hist(observed.sizes, bins=list(edges), weights=observed.weights, color=_LIGHT)
    for edge in buckets:
        axes.axvline(edge, color=_RED, linewidth=1)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{observed.total:,.0f} observed sizes and the {len(buckets)} buckets (red)")
    axes.set_ylabel("observations")


def _draw_shares(axes: Axes, buckets: Sequence[int], observed: Observed, cost: Cost) -> None:
    """One bar per bucket, as wide as the sizes it serves: its part of the whole waste."""
    served = np.searchsorted(buckets, observed.sizes)
    own = costs_of(observed.sizes, cost, "Buckets.plot") * observed.weights
    padded = costs_of(buckets, cost, "Buckets.plot")[served] * observed.weights
    parts = 100 * np.bincount(served, padded - own, minlength=len(buckets)) / own.sum()
    # 0 has no place on a logarithmic axis.
    left = np.array([int(observed.sizes[0]) - 1 or 0.9, *buckets[:-1]], dtype=float)
    left = np.minimum(left, buckets)
    widths = np.array(buckets) - left
    axes.bar(left, parts, widths, align="edge", color=_RED, alpha=0.75, edgecolor="white")
    axes.set_title("what each bucket adds to the waste")
    axes.set_ylabel("% of useful cost")
    axes.set_xlabel("size")


def _draw_curve(
    axes: Axes, buckets: Sequence[int], observed: Observed, cost: Cost, waste: float
) -> None:
    useful = float(costs_of(observed.sizes, cost, "Buckets.plot") @ observed.weights)
    best = best_ladders(observed, _COUNTS, cost=cost, top=int(observed.sizes[-1]))
    values = [100 * (each.cost / useful - 1) for each in best]
    axes.plot(range(1, len(values) + 1), values, color=_BLUE, marker=".", label="optimal")
    label = f"these buckets: {100 * waste:.1f} %"
    axes.plot([len(buckets)], [100 * waste], "D", color=_RED, label=label)
    axes.set_title("waste against the number of buckets")
    axes.set_xlabel("buckets")
    axes.set_ylabel("% of useful cost")
    # Logarithmic, or the first few counts flatten all the others; zero waste can't be shown.
    if all(value > 0 for value in (*values, waste)):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.grid(visible=True, color=_GREY, alpha=0.2, which="both")
    axes.legend(frameon=False)
