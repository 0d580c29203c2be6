"""Waste of ``Buckets.fit`` against the rules in use elsewhere.

Every rule gets the maxima of batches of 16 from one half of the lengths and is judged on those of
the other half; the longest length is known to all. Batches are not drawn: their distribution is
computed, so the spread is that of the random halves alone.

The rules: powers of two below the maximum; multiples of the smallest multiple of 64 that makes
do with the number; equal width; quantiles (fairseq); equal duration, the sum of lengths (lhotse);
exponential, rounded up to 128, or to 16 below 1024 (vllm-gaudi); geometric from the shortest.
"""

from __future__ import annotations

import ast
import io
import statistics
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Row, Table
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.histogram import Observed, batch_maxima, observe

BATCH = 16
COUNTS = (4, 8, 16)
SHOWN = 8
Lengths = NDArray[np.int64]


def lengths_of_kinds(*, quick: bool) -> dict[str, Lengths]:
    """Draw lengths of six kinds, and count those of two."""
    random, number = np.random.default_rng(11), 4000 if quick else 40_000
    short = random.integers(0, 2, number) == 0
    kinds = {
        "lognormal text": random.lognormal(5.5, 0.8, number).clip(1, 4096),
        "RL bimodal": np.where(
            short, random.normal(400, 120, number), random.normal(3900, 250, number)
        ).clip(16, 4096),
        "speech": (1600 * random.beta(4, 1.6, number)).clip(40, 1600),
        "docstrings": random.lognormal(3.1, 1.2, number).clip(1, 1500),
        "sentences": random.gamma(2.2, 11, number).clip(1, 250),
        "Pareto": (64 * (1 + random.pareto(1.2, number))).clip(1, 16384),
    }
    drawn = {name: lengths.astype(np.int64) for name, lengths in kinds.items()}
    return drawn if quick else drawn | real()


def real() -> dict[str, Lengths]:
    """Count the tokens of the standard library's docstrings and of its functions."""
    docstrings, functions = [], []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]):
        if "packages" in path.parts[-2]:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue
        starts = np.array([token.start[0] for token in tokens])
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and text.split():
                    docstrings.append(len(text.split()))
            if isinstance(node, ast.FunctionDef):
                first, last = np.searchsorted(starts, [node.lineno, (node.end_lineno or 0) + 1])
                functions.append(int(last - first))
    return {
        "real: docstrings": np.array(docstrings),
        "real: functions": np.array([length for length in functions if length > 0]),
    }


RULES = (
    *("powers of two", "multiples of 64", "equal width", "quantiles", "equal duration"),
    *("exponential", "geometric", "optimal"),
)


def ladders(seen: Observed, top: int, count: int) -> dict[str, Buckets]:
    """Return so many buckets, up to the largest size, by each rule."""
    below = 1 << (top - 1).bit_length() - 1
    wanted = np.arange(1, count) / count

    def parts(mass: NDArray[np.float64]) -> Buckets:
        places = np.searchsorted(mass.cumsum() / mass.sum(), wanted)
        return Buckets([*seen.sizes[places].tolist(), top])

    histogram = dict(zip(seen.sizes.tolist(), seen.weights.tolist(), strict=True))
    step = 128 if top >= 1024 else 16  # noqa: PLR2004 - stated above
    found = (
        Buckets([top, *(below >> n for n in range(count - 1) if below >> n)]),
        Buckets.multiples_of(64 * -(-top // (64 * count)), top),
        Buckets([-(-top * part // count) for part in range(1, count + 1)]),
        parts(seen.weights),
        parts(seen.weights * seen.sizes),
        Buckets.geometric(step, top, count, multiple_of=step),
        Buckets.geometric(int(seen.sizes[0]), top, count, multiple_of=8),
        Buckets.fit(histogram, count, maximum=top),
    )
    return dict(zip(RULES, found, strict=True))


def compare(kind: str, lengths: Lengths, splits: int) -> Iterator[dict[str, Any]]:
    """Yield one row per count: every rule's held-out waste."""
    top = int(lengths.max())
    halves = []
    for split in range(splits):
        shuffled = np.random.default_rng(split).permutation(lengths)
        parts = np.split(shuffled, [len(shuffled) // 2])
        halves.append([batch_maxima(part, BATCH, "bench_fit") for part in parts])
    for count in COUNTS:
        waste: dict[str, list[float]] = {rule: [] for rule in RULES}
        for first, second in halves:
            for rule, ladder in ladders(observe(first, kind), top, count).items():
                waste[rule].append(100 * ladder.waste(second))
        means = {rule: statistics.fmean(values) for rule, values in waste.items()}
        yield {
            "kind": kind,
            "n": len(lengths),
            "count": count,
            "waste_percent": {rule: round(mean, 2) for rule, mean in means.items()},
        }


def run(setting: Setting) -> Results:
    """Compare the rules."""
    splits = 1 if setting.quick else 4
    kinds = lengths_of_kinds(quick=setting.quick)
    rows = [row for kind, lengths in kinds.items() for row in compare(kind, lengths, splits)]
    return {"splits": splits, "rows": setting.kept(rows)}


def _shown(record: Row, _: str) -> list[Row]:
    """Return the rows of the page: all are too many."""
    return [
        row for row in record["rows"] if row["count"] == SHOWN and row.get("cost") != "quadratic"
    ]


BENCHMARK = Benchmark(
    "fit",
    "How much do the buckets of `Buckets.fit` waste against other rules?",
    run,
    rounds=1,
    devices=("cpu",),
    threads=None,
    tables=(
        Table(
            {"lengths": "{kind}"} | {rule: f"{{waste_percent.{rule}:.1f}}" for rule in RULES},
            lead="Held-out waste in percent of the useful cost, 8 buckets, linear cost, "
            "the maxima of batches of 16; the mean of {splits} random halves.",
            rows=_shown,
        ),
    ),
)
