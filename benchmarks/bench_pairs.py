"""Waste of whole epochs of pairs, a source and a target, sorted by one length or by both.

Waste is what a model computes on beyond the real tokens of both: padding inside of batches, and
rows of padding. A step holds as many pairs as fit into the tokens. Every rule gets the ladders with
which it wastes least at that many shapes. Counted, not timed.

- one length: ``BucketBatchSampler`` with the longer of the two lengths, their sum, or that of the
  source; ``BucketCollator`` pads each axis to a bucket of one ladder, or of a ladder for each.
- both: a batch holds pairs of one bucket of sources and one bucket of targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.sampler import BucketBatchSampler

TOKENS = 16384
SHAPES = (8, 16, 32)
Lengths = NDArray[np.int64]
Found = tuple[int, float]
"""Shapes and waste of an epoch."""

ONE: dict[str, Callable[[Lengths, Lengths], Lengths]] = {
    "longer": np.maximum,
    "sum": np.add,
    "source": lambda source, _: source,
}


def pairs_of_kinds(*, quick: bool) -> dict[str, tuple[Lengths, Lengths]]:
    """Draw pairs of lengths of three kinds; the target depends on the source."""
    random, number = np.random.default_rng(5), 4000 if quick else 40_000
    sentences = random.gamma(2.2, 11, number).clip(1, 250)
    articles = random.lognormal(6.2, 0.6, number).clip(16, 2048)
    frames = (1600 * random.beta(4, 1.6, number)).clip(40, 1600)
    kinds = {
        "translation": (sentences, (sentences * random.lognormal(0.05, 0.25, number))),
        "summaries": (articles, (articles**0.5 * random.lognormal(0.9, 0.4, number))),
        "speech": (frames, (frames * random.normal(0.06, 0.012, number))),
    }
    return {
        name: (source.astype(np.int64), target.clip(1, 300).astype(np.int64))
        for name, (source, target) in kinds.items()
    }


def by_one_length(source: Lengths, target: Lengths, length: Lengths) -> Iterator[Found]:
    """Yield an epoch for each choice of ladders."""
    for count in (4, 6, 8, 12, 16, 24):
        ladder = Buckets.fit(length, count)
        sampler = BucketBatchSampler(length, ladder, tokens=max(TOKENS // 2, int(length.max())))
        sizes, batches = np.array(ladder.sizes), list(sampler)
        buckets = [sizes[np.searchsorted(sizes, length[batch].max())] for batch in batches]
        rows = np.array([sampler.batch_sizes[int(size)] for size in buckets])
        longest = [(source[batch].max(), target[batch].max()) for batch in batches]
        ladders = [(sizes, sizes)] if target.max() <= sizes[-1] else []
        for more in (1, 2, 3, 4, 8):
            targets = np.array(Buckets.fit(target, more).sizes)
            ladders.append((np.array(Buckets.fit(source, count).sizes), targets))
        for axes in ladders:
            places = [np.searchsorted(a, m) for a, m in zip(axes, np.array(longest).T, strict=True)]
            padded = [axis[place] for axis, place in zip(axes, places, strict=True)]
            shapes = set(zip(rows.tolist(), *(each.tolist() for each in padded), strict=True))
            yield len(shapes), float((rows * sum(padded)).sum() / (source + target).sum() - 1)


def by_both(source: Lengths, target: Lengths) -> Iterator[Found]:
    """Yield an epoch for each choice of two ladders."""
    for counts in itertools.product((1, 2, 3, 4, 6, 8, 12, 16), repeat=2):
        sizes = [
            np.array(Buckets.fit(lengths, count).sizes)
            for lengths, count in zip((source, target), counts, strict=True)
        ]
        places = (np.searchsorted(sizes[0], source), np.searchsorted(sizes[1], target))
        number = np.zeros((len(sizes[0]), len(sizes[1])), np.int64)
        np.add.at(number, places, 1)
        price = sizes[0][:, None] + sizes[1]
        rows = np.maximum(1, TOKENS // price)
        padded = -(-number // rows) * rows * price
        yield int((number > 0).sum()), float(padded.sum() / (source + target).sum() - 1)


def compare(kind: str, source: Lengths, target: Lengths) -> Iterator[dict[str, Any]]:
    """Yield one row for each number of shapes."""
    found = {
        name: list(by_one_length(source, target, of(source, target))) for name, of in ONE.items()
    }
    found["both"] = list(by_both(source, target))
    for most in SHAPES:
        best = {
            name: [waste for shapes, waste in epochs if shapes <= most]
            for name, epochs in found.items()
        }
        wastes = {
            name: round(100 * min(epochs), 1) if epochs else None for name, epochs in best.items()
        }
        yield {"kind": kind, "shapes": most, **wastes}


def run(setting: Setting) -> Results:
    """Draw the epochs of every rule."""
    kinds = pairs_of_kinds(quick=setting.quick)
    return {
        "tokens": TOKENS,
        "rows": [row for k, pair in kinds.items() for row in compare(k, *pair)],
    }


BENCHMARK = Benchmark(
    "pairs",
    "If samples have a source and a target, which length does `BucketBatchSampler` need?",
    run,
    rounds=1,
    devices=("cpu",),
    tables=(
        Table(
            {
                "pairs": "{kind}",
                "at most": "{shapes} shapes",
                "the longer": "{longer:.1f} %",
                "the sum": "{sum:.1f} %",
                "the source": "{source:.1f} %",
                "a bucket for each": "{both:.1f} %",
            },
            lead="Waste of an epoch of 40,000 generated pairs, at most {tokens:,} tokens a step, "
            "by the length that the sampler is given. Each cell is the best choice of ladders with "
            "so many shapes. The last column is a sampler that sorts by both lengths, which this "
            "library does not have.",
        ),
    ),
)
