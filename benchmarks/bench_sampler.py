"""Waste of whole epochs with ``BucketBatchSampler`` against other ways to draw batches.

Waste is what a model computes on beyond the real tokens: padding inside of batches, and rows of
padding. Every rule gets the same lengths, and a number of items per batch or a sum of lengths that
makes the same padded tokens per step in the mean. Counted, not timed.

The rules, as their documentation states them:

- random: batches of so many items in random order (torch's ``RandomSampler``).
- transformers: its ``group_by_length``: in random order, cut into mega-batches of 50 batches
  (or a quarter of the data), each of them sorted by length.
  https://huggingface.co/docs/transformers/main_classes/trainer
- torchdata: its ``BucketBatcher``: in random order, pools of 100 batches sorted by length.
  https://docs.pytorch.org/data/0.6/generated/torchdata.datapipes.iter.BucketBatcher.html
"""

from __future__ import annotations

import ast
import io
import math
import statistics
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Row, Table
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.sampler import BucketBatchSampler

TOKENS = 16384
COUNTS = (8, 16, 32, 64)
MULTIPLE = 64
Lengths = NDArray[np.int64]
Batches = list[Lengths]
"""The lengths of the items of each batch."""

Rule = Callable[[Lengths, float, np.random.Generator], Batches]
"""Takes the lengths, and how many items or tokens make a batch."""


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


def _cut(lengths: Lengths, items: int) -> Batches:
    return np.split(lengths, range(items, len(lengths), items))


def _in_pools(pool: Callable[[int, int], int]) -> Rule:
    """Sort within pools of so many batches, given the lengths and the items of a batch."""

    def rule(lengths: Lengths, size: float, random: np.random.Generator) -> Batches:
        items = round(size)
        pools = _cut(random.permutation(lengths), items * pool(len(lengths), items))
        return [batch for each in pools for batch in _cut(np.sort(each)[::-1], items)]

    return rule


RULES: dict[str, Rule] = {
    "random": lambda lengths, size, random: _cut(random.permutation(lengths), round(size)),
    "transformers": _in_pools(lambda count, items: max(1, min(count // (items * 4), 50))),
    "torchdata": _in_pools(lambda *_: 100),
}


def padded(batches: Batches, to: Callable[[int], int]) -> NDArray[np.int64]:
    """Return the tokens that the model computes on in each step."""
    return np.array([len(batch) * to(int(batch.max())) for batch in batches])


def tuned(rule: Rule, lengths: Lengths, tokens: float) -> float:
    """Find the size with which a step has so many padded tokens in the mean."""
    low, high = 1.0, 2.0 * tokens / float(lengths.mean())
    for _ in range(10):
        size = math.sqrt(low * high)
        batches = rule(lengths, size, np.random.default_rng(99))
        enough = padded(batches, lambda length: length).mean() >= tokens
        low, high = (low, size) if enough else (size, high)
    return low


def steps_of(sampler: BucketBatchSampler, lengths: Lengths) -> Iterator[tuple[int, int]]:
    """Yield the shape of each batch of an epoch, as ``BucketCollator`` makes it."""
    sizes = np.array(list(sampler.batch_sizes))
    for batch in sampler:
        size = int(sizes[np.searchsorted(sizes, lengths[batch].max())])
        yield sampler.batch_sizes[size], size


def _row(kind: str, rule: str, lengths: Lengths, epochs: list[tuple[Any, set[Any]]]) -> Any:
    steps = [tokens for tokens, _ in epochs]
    waste = statistics.fmean(each.sum() / int(lengths.sum()) - 1 for each in steps)
    return {
        "kind": kind,
        "rule": rule,
        "waste_percent": round(100 * waste, 2),
        "shapes": max(len(shapes) for _, shapes in epochs),
        "tokens_per_step": round(statistics.fmean(each.mean() for each in steps)),
        "largest_step": int(max(each.max() for each in steps)),
    }


def compare(kind: str, lengths: Lengths, epochs: int) -> Iterator[dict[str, Any]]:
    """Yield one row per rule and padding."""
    ours_per_step, top = [], int(lengths.max())
    for count in COUNTS:
        ladder = Buckets.fit(lengths, count)
        sampler = BucketBatchSampler(lengths, ladder, tokens=max(TOKENS, top))
        drawn = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            shapes = list(steps_of(sampler, lengths))
            drawn.append((np.array([rows * size for rows, size in shapes]), set(shapes)))
        row = _row(kind, f"BucketBatchSampler, {count} sizes", lengths, drawn)
        ours_per_step.append(row["tokens_per_step"])
        yield row
    tokens = statistics.fmean(ours_per_step)
    for name, rule in RULES.items():
        size = tuned(rule, lengths, tokens)
        made = [rule(lengths, size, np.random.default_rng(epoch)) for epoch in range(epochs)]
        maxima = np.array([batch.max() for batch in made[0] for _ in batch])
        roundings: dict[str, Callable[[int], int]] = {
            "longest": lambda length: length,
            f"multiples of {MULTIPLE}": lambda length: -(-length // MULTIPLE) * MULTIPLE,
        }
        for count in COUNTS:
            ladder = Buckets([*Buckets.fit(maxima, count), top])
            roundings[f"{count} sizes"] = ladder.bucket_for
        for what, to in roundings.items():
            drawn = [
                (padded(batches, to), {(len(each), to(int(each.max()))) for each in batches})
                for batches in made
            ]
            yield _row(kind, f"{name}, {what}", lengths, drawn)


def run(setting: Setting) -> Results:
    """Draw the epochs of every rule."""
    epochs = 1 if setting.quick else setting.rounds
    kinds = lengths_of_kinds(quick=setting.quick)
    rows = [row for kind, lengths in kinds.items() for row in compare(kind, lengths, epochs)]
    return {"tokens": TOKENS, "epochs": epochs, "rows": rows}


def _totals(record: Row, _: str) -> list[Row]:
    """Return the mean of each rule over the kinds of lengths."""
    found: dict[str, list[Row]] = {}
    for row in record["rows"]:
        found.setdefault(row["rule"], []).append(row)
    return [
        {
            "rule": rule,
            "waste": statistics.fmean(row["waste_percent"] for row in rows),
            "shapes": round(statistics.fmean(row["shapes"] for row in rows)),
            "largest": round(max(row["largest_step"] / row["tokens_per_step"] for row in rows), 2),
        }
        for rule, rows in found.items()
    ]


BENCHMARK = Benchmark(
    "sampler",
    "How much padding does an epoch of `BucketBatchSampler` compute on, against other ways to "
    "draw batches?",
    run,
    rounds=3,
    devices=("cpu",),
    tables=(
        Table(
            {
                "batches": "{rule}",
                "waste, mean": "{waste:.1f} %",
                "shapes, mean": "{shapes}",
                "largest step": "{largest:.1f}",
            },
            lead="What an epoch computes beyond its real tokens, at about {tokens:,} padded tokens "
            "per step in the mean; {epochs} epochs of each kind of lengths. A rule is followed by "
            "what lengths are rounded up to: the longest of the batch, multiples of 64, or the "
            "best ladder of so many sizes for what the rule made. The largest step is over the "
            "mean one, at worst: what memory has to hold.",
            rows=_totals,
        ),
    ),
)
