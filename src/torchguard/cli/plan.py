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
    pairs = "two columns, source and target: plan for the longer one, and show what each wastes"
    add("--pairs", action="store_true", help=pairs)
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
    if options.pairs and options.tokens is None:
        raise ValueError("--pairs is for the batches of BucketBatchSampler: give --tokens too")
    name = "standard input" if options.file == "-" else options.file
    lengths = _read(options.file, name, 2 if options.pairs else 1)
    observed = observe(lengths.max(1) if options.pairs and lengths.size else lengths, name)
    begin = f"{observed.total:,.0f} {'pairs' if options.pairs else 'lengths'} from {name}"
    lines = [f"{begin}{'; the longer of each' * options.pairs}: {_range(observed)}"]
    if options.pairs:
        axes = zip(("source", "target"), lengths.T, strict=True)
        lines += [f"  {axis}: {_range(observe(column, name))}" for axis, column in axes]
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
    if options.pairs:
        lines += _of_pairs(options, lengths, buckets)
    return lines + _usage(options, buckets)


def _read(file: str, name: str, columns: int) -> NDArray[Any]:
    """Read the lengths in a file of numpy, or in a text: (N), or (N, 2) with two columns."""
    if file == "-" and sys.stdin.isatty():
        sys.stderr.write("reading lengths from standard input; end with Ctrl-D\n")
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if content.startswith(b"\x93NUMPY"):
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        found = f"shape {array.shape}" if array.shape[1:] != (columns,) else ""
    else:
        try:
            text = content.decode("utf-8-sig").replace(",", " ")
            lines = [[int(word) for word in line.split()] for line in text.splitlines()]
        except ValueError as error:
            raise ValueError(
                f"{name}: neither a .npy file nor a text of integers: {error}"
            ) from None
        wrong = (f"{len(line)} in line {n}" for n, line in enumerate(lines, 1) if line)
        found = next((each for each in wrong if not each.startswith(f"{columns} ")), "")
        array = np.array([each for line in lines for each in line], dtype=np.int64)
    if columns == 1:
        return array.reshape(-1)
    if found:
        raise ValueError(f"--pairs: {name} has {found}, expected {columns} columns of lengths")
    return array.reshape(-1, columns)


def _of_pairs(options: argparse.Namespace, pairs: NDArray[Any], buckets: Buckets) -> list[str]:
    """Return what an epoch of pairs wastes on each axis, and on rows of padding."""
    from torchguard import BucketBatchSampler  # noqa: PLC0415 - imports torch

    given = {"tokens": options.tokens, "cost": options.cost, "rank": 0, "world_size": 1}
    sampler = BucketBatchSampler(pairs.max(1), buckets, **given)
    sizes, real = np.array(buckets.sizes), pairs.sum()
    padded, filled, shapes = np.zeros(2), 0.0, set()
    for batch in sampler:
        axes = sizes[np.searchsorted(sizes, pairs[batch].max(0))]
        rows = sampler.batch_sizes[int(axes.max())]
        shapes.add((rows, *axes.tolist()))
        padded += len(batch) * axes
        filled += (rows - len(batch)) * axes.sum()
    wastes = [*((padded - pairs.sum(0)) / real), filled / real]
    parts = zip(("source", "target", "rows of padding"), map(_percent, wastes), strict=True)
    return [
        "",
        f"an epoch of pairs, both padded to these buckets: {len(shapes)} shapes",
        f"waste: {_percent(sum(wastes))} of all tokens; {', '.join(map(' '.join, parts))}",
    ]


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
    varies, second, mask = "'t' is the dimension that varies", "t", "'attention_mask'"
    if options.pairs:
        varies, second = "'t' and 'u' are the dimensions that vary", "u"
        mask = "{'t': 'attention_mask'}"
    lines = ["", f"to use them, where {varies}:"]
    sizes = f"  sizes = [{', '.join(map(str, buckets))}]"
    lines += textwrap.wrap(sizes, _CODE, subsequent_indent=" " * 11)
    lines.append(f"  dims = {{'input_ids': {{1: 't'}}, 'labels': {{1: '{second}'}}}}")
    batches, rows = "batch_size=32", list[str]()
    if options.tokens is not None:
        cost = "" if options.cost == "linear" else f", cost={options.cost!r}"
        lengths = "list(map(max, pairs))" if options.pairs else "lengths"
        sampler = f"BucketBatchSampler({lengths}, sizes, tokens={options.tokens}{cost})"
        lines.append(f"  sampler = {sampler}")
        batches, rows = "batch_sampler=sampler", ["batch_sizes=sampler.batch_sizes,"]
    lines += [
        f"  collate = BucketCollator(sizes, dims, mask_key={mask},",
        *(f"                           {line}" for line in (*rows, "fill={'labels': -100})")),
        f"  loader = DataLoader(dataset, {batches}, collate_fn=collate)",
    ]
    if not options.pairs:
        lines += [
            "  model = bucketed(model, dims=dims, buckets=sizes, mask='attention_mask',",
            "                   fill={'labels': -100}, compile=True)",
        ]
    return lines


def _range(observed: Observed) -> str:
    below = observed.weights.cumsum()
    middle = observed.sizes[(below >= below[-1] / 2).argmax()]
    mean = observed.sizes @ observed.weights / observed.total
    return f"{observed.sizes[0]:,} to {observed.sizes[-1]:,}, median {middle:,}, mean {mean:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
