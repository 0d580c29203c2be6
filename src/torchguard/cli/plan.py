"""``python -m torchguard plan``: the buckets for the lengths in a file."""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.buckets import Buckets, total_cost
from torchguard.bucketing.fit import best_ladders, costs_of
from torchguard.bucketing.histogram import Observed, batch_maxima, observe
from torchguard.bucketing.steps import count_steps, full_batches
from torchguard.cli import interrupted, positive_int, write
from torchguard.cli.terminal import folded

_COUNTS, _ROWS = 32, 8  # of the table
_CODE = 76  # columns of what is pasted


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``plan``."""
    parser = commands.add_parser(
        "plan",
        help="find the bucket sizes that waste least on the lengths in a file",
        description="Find the bucket sizes that waste least padding on observed lengths, and show "
        "what other numbers of buckets and other rules would waste.",
        epilog="Files: .npy, or text with integers between blanks or commas. Exit status: 0, or 2 "
        "on bad usage or a bad file.",
    )
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add("file", nargs="?", default="-", help="the lengths; - for standard input")
    add("--buckets", default=8, help="default: 8", **number)
    add("--cost", choices=("linear", "quadratic"), default="linear")
    add("--multiple-of", default=1, help="align sizes", **number)
    add("--maximum", help="the longest there can be: the largest bucket", **number)
    batches = "plan for the longest of random batches of N: what the model sees"
    add("--batch", default=1, help=batches, **number)
    tokens = "plan for the batches of BucketBatchSampler: as many of one bucket as N tokens hold"
    add("--tokens", help=tokens, **number)
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    try:
        write("".join(f"{folded(line, sys.stdout, hang=2)}\n" for line in _plan(options)))
    except (OSError, ValueError, TypeError) as error:
        options.parser.error(str(error))  # exits with 2
    except KeyboardInterrupt:
        return interrupted("plan")
    return 0


def _plan(options: argparse.Namespace) -> list[str]:
    """Return the buckets, what they waste, and the lines of Python that take them."""
    if options.batch > 1 and options.tokens is not None:
        raise ValueError(
            "--batch is for batches drawn at random, --tokens for those of BucketBatchSampler: "
            "give one of them"
        )
    name = "standard input" if options.file == "-" else options.file
    observed = observe(_read(options.file, name), name)
    lines = [f"{observed.total:,.0f} lengths from {name}: {_range(observed)}"]
    if options.batch > 1:
        observed = observe(batch_maxima(_histogram(observed), options.batch, name), name)
        batches = f"random batches of {options.batch}"
        lines.append(f"planned for the longest of {batches}: {_range(observed)}")
    if options.maximum is not None and options.maximum < observed.sizes[-1]:
        raise ValueError(
            f"--maximum is {options.maximum}, but {name} has a length of {observed.sizes[-1]}: "
            "leave it out, or give the longest there can be"
        )
    aligned = {"cost": options.cost, "multiple_of": options.multiple_of}
    sizes = _histogram(observed)
    buckets = Buckets.fit(sizes, options.buckets, maximum=options.maximum, **aligned)
    # The table ends at the same largest size, so that its waste can be compared.
    curve = best_ladders(observed, _COUNTS, **aligned, top=buckets.sizes[-1])
    lines += _report(options, observed, buckets, [each.cost for each in curve])
    return lines + _usage(options, buckets)


def _read(file: str, name: str) -> NDArray[Any] | list[int]:
    """Read the lengths in a file of numpy, or in a text."""
    if file == "-" and sys.stdin.isatty():
        sys.stderr.write("reading lengths from standard input; end with Ctrl-D\n")
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if content.startswith(b"\x93NUMPY"):
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return array.reshape(-1)
    try:
        text = content.decode("utf-8-sig")
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"{name}: neither a .npy file nor a text of integers: {error}") from None


def _histogram(observed: Observed) -> dict[int, float]:
    return dict(zip(observed.sizes.tolist(), observed.weights.tolist(), strict=True))


def _report(
    options: argparse.Namespace, observed: Observed, buckets: Buckets, costs: list[float]
) -> list[str]:
    """Return what the buckets waste, and what the best of 1, 2, ... and other rules would."""
    seen, top = _histogram(observed), buckets.sizes[-1]
    useful = total_cost(observed, options.cost, "plan")
    waste = buckets.waste(seen, options.cost)
    lines = ["", f"{len(buckets)} buckets: {' '.join(map(str, buckets))}"]
    lines.append(f"waste: {_percent(waste)} ({options.cost} cost)")
    if options.tokens is not None:
        # The steps of an epoch over the items observed, on one rank.
        places = np.searchsorted(buckets.sizes, observed.sizes)
        items = np.bincount(places, observed.weights, len(buckets)).round().astype(int).tolist()
        given = {"tokens": options.tokens, "batch_size": None, "cost": options.cost}
        rows = full_batches(buckets.sizes, items, **given, operation="plan")
        prices = costs_of(buckets.sizes, options.cost, "plan").tolist()
        epoch = count_steps(items, rows, prices)
        used = zip(epoch.rows, buckets, epoch.counts, strict=True)
        shapes = ", ".join(f"{rows}x{size}" for rows, size, count in used if count)
        wasted = _percent(epoch.cost / useful - 1)
        lines += [
            f"batches of {options.tokens:,} tokens: {shapes}",
            f"{sum(epoch.counts):,} batches an epoch, waste with those that are not full: {wasted}",
        ]
    lines += ["", "waste of the best ladder, by number of buckets"]
    cells = [f"{n:>4} {_percent(each / useful - 1):>9}" for n, each in enumerate(costs, start=1)]
    lines += ["".join(cells[row::_ROWS]) for row in range(min(_ROWS, len(cells)))]
    lines += ["", "waste of other rules"]
    rules = {
        "powers of two": Buckets.powers_of_two(int(observed.sizes[0]), top),
        "multiples of 64": Buckets([*range(64, top, 64), top]),
    }
    for rule, ladder in rules.items():
        waste = ladder.waste(seen, options.cost)
        lines.append(f"  {rule:<15} {_percent(waste):>7}  ({len(ladder)} buckets)")
    return lines


def _usage(options: argparse.Namespace, buckets: Buckets) -> list[str]:
    """Return the lines of Python that take the buckets."""
    lines = ["", "to use them, where 't' is the dimension that varies:"]
    sizes = f"  sizes = [{', '.join(map(str, buckets))}]"
    lines += textwrap.wrap(sizes, _CODE, subsequent_indent=" " * 11)
    lines.append("  dims = {'input_ids': {1: 't'}, 'labels': {1: 't'}}")
    batches, rows = "batch_size=32", list[str]()
    if options.tokens is not None:
        cost = "" if options.cost == "linear" else f", cost={options.cost!r}"
        sampler = f"BucketBatchSampler(lengths, sizes, tokens={options.tokens}{cost})"
        lines.append(f"  sampler = {sampler}")
        batches, rows = "batch_sampler=sampler", ["batch_sizes=sampler.batch_sizes,"]
    return [
        *lines,
        "  collate = BucketCollator(sizes, dims, mask_key='attention_mask',",
        *(f"                           {line}" for line in (*rows, "fill={'labels': -100})")),
        f"  loader = DataLoader(dataset, {batches}, collate_fn=collate)",
        "  model = bucketed(model, dims=dims, buckets=sizes, mask='attention_mask',",
        "                   fill={'labels': -100}, compile=True)",
    ]


def _range(observed: Observed) -> str:
    below = observed.weights.cumsum()
    middle = observed.sizes[(below >= below[-1] / 2).argmax()]
    mean = observed.sizes @ observed.weights / observed.total
    return f"{observed.sizes[0]:,} to {observed.sizes[-1]:,}, median {middle:,}, mean {mean:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
