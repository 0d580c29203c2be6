"""Statistics of the calls in each bucket, what other buckets would change, and warm-up."""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchguard import _torch
from torchguard._public import public
from torchguard._pytree import all_reachable_modules
from torchguard._torch import warn_user
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.compile import alone
from torchguard.bucketing.decorator.output_shapes import FlatOutput
from torchguard.bucketing.decorator.plan import BucketCount, Call, Input, Plan
from torchguard.bucketing.decorator.spec import Sizes, Spec, find_inputs
from torchguard.bucketing.padding import Side, pad_to_bucket
from torchguard.bucketing.pairs import PairBuckets, fit_pairs
from torchguard.bucketing.plot import draw_pairs
from torchguard.equivalence.isolate import (
    buffers_restored,
    module_state_restored,
    rng_state_restored,
)
from torchguard.equivalence.outcome import Output, send_backward

_STEP = 4
_LOSES_ABOVE = 0.5


@public
@dataclass(frozen=True)
class BucketedStats:
    """What a bucketed function has counted so far."""

    name: str
    calls: int
    """That returned; those of ``warmup`` and of checks don't count."""
    hits: dict[tuple[int, ...], int]
    """Calls by bucket; one size per axis."""
    overflowed: int
    """Calls above the largest bucket, which ran without padding."""
    waste: float
    """What padding added, as a share of the real sizes: 0.08 is 8 %."""
    compile_seconds: float
    """Of the first call of each variant, and of ``warmup``."""
    graphs: int
    """Graphs compiled, recompilations included."""
    axes: tuple[str, ...]
    relies_on_fill_0: tuple[str, ...] = ()
    """Inputs whose padding is read, and 0 in it was shown to be neutral, though not declared."""
    compiled: bool = True
    """Whether anything compiles: ``compile=`` was given, or what ``torch.compile`` made."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            **vars(self),
            "hits": {"x".join(map(str, sizes)): count for sizes, count in self.hits.items()},
            "axes": list(self.axes),
            "relies_on_fill_0": list(self.relies_on_fill_0),
        }

    def __str__(self) -> str:
        title = " x ".join(self.axes)
        width = max(len(title), 8)
        compiling = f"{self.graphs} graphs, {self.compile_seconds:.1f} s compiling"
        if not self.compiled:
            compiling = "not compiled (compile=True compiles each bucket)"
        lines = [
            f"{self.name}: {self.calls:,} calls, waste {100 * self.waste:.1f} %, {compiling}",
            f"{title:>{width}} {'calls':>10}",
        ]
        for sizes, count in sorted(self.hits.items()):
            lines.append(f"{' x '.join(map(str, sizes)):>{width}} {count:>10,}")
        if self.overflowed:
            lines.append(f"{'above':>{width}} {self.overflowed:>10,}")
        if self.relies_on_fill_0:
            lines.append(f"relies on fill 0 in the padding of {', '.join(self.relies_on_fill_0)}")
        return "\n".join(lines)


def stats_of(caller: Caller) -> BucketedStats:
    """Gather what a caller has counted."""
    with caller.lock:
        counts = {sizes: replace(count) for sizes, count in caller.counts.items()}
        # A copy: a call of another thread may add one while graphs are counted.
        variants = list(caller.cache.variants.values())
    # Under the empty key are the calls that no bucket held.
    above = counts.pop((), BucketCount())
    real = sum(each.real for each in counts.values())
    padded = sum(each.padded for each in counts.values())
    return BucketedStats(
        name=caller.name,
        calls=above.calls + sum(each.calls for each in counts.values()),
        hits={sizes: each.calls for sizes, each in sorted(counts.items()) if each.calls},
        overflowed=above.calls,
        waste=padded / real - 1 if real else 0.0,
        compile_seconds=sum(variant.seconds for variant in variants),
        graphs=sum(variant.graphs for variant in variants),
        axes=tuple(caller.spec.ladders),
        relies_on_fill_0=caller.proofs.relies_on_zero,
        compiled=caller.cache.static is not None,
    )


@dataclass(frozen=True)
class AxisReport:
    """One axis: the buckets there are, and the best ones of other counts."""

    axis: str
    """Its name; ``"b x t"`` for two that share their buckets."""
    buckets: tuple[Any, ...]
    """Sizes, or pairs of them."""
    waste: float
    """Over the sizes seen that have a bucket."""
    best: dict[int, tuple[tuple[Any, ...], float]]
    """By count: the best buckets for what was seen, and their waste."""

    @property
    def padding_loses(self) -> bool:
        """Whether even 4 more buckets would waste more than half of what is computed.

        A rule of thumb: dynamic shapes then have to be a third slower to be worse.
        """
        return self.best[max(self.best)][1] > _LOSES_ABOVE


@public
@dataclass(frozen=True)
class BucketedReport:
    """What other buckets would change."""

    statistics: BucketedStats
    axes: tuple[AxisReport, ...]

    def __str__(self) -> str:
        lines = [str(self.statistics)]
        for each in self.axes:
            lines += [
                "",
                (
                    f"{each.axis}: {len(each.buckets)} buckets {_listed(each.buckets)}, "
                    f"waste {100 * each.waste:.1f} %"
                ),
            ]
            lines += [
                f"  the best {count}: {_listed(sizes)}, waste {100 * waste:.1f} %"
                for count, (sizes, waste) in each.best.items()
            ]
            lines.append(
                f"  padding costs {100 * each.waste:.1f} % here: it loses to dynamic shapes "
                "(compile with dynamic=True) where those are slower by less than that"
                + ("; even 4 more buckets would not help" if each.padding_loses else "")
            )
        return "\n".join(lines)


def observed_sizes(caller: Caller) -> dict[str, dict[int, int]]:
    """Return how often each size was called, by axis."""
    return {
        axis: {size: count for (size,), count in caller.seen([axis]).items()}
        for axis in caller.spec.ladders
    }


def report_of(caller: Caller, path: str | os.PathLike[str] | None) -> BucketedReport:
    """Compare the buckets of each axis with the best ones for what was seen.

    Raises:
        ValueError: nothing was called yet.
        ImportError: a path is given, but matplotlib is not installed.
    """
    ladders = list(dict.fromkeys(caller.spec.ladders.values()))
    axes = []
    for ladder in ladders:
        buckets = ladder.buckets
        shapes = ladder.shapes()
        # A size that no bucket holds has run without padding: none is wasted on it.
        held = {
            sizes: count
            for sizes, count in caller.seen(ladder.axes).items()
            if min(sizes) > 0 and any(all(map(operator.le, sizes, shape)) for shape in shapes)
        }
        if buckets is None or not held:
            raise ValueError("bucketed: nothing to report yet: call the function first")
        target = None if path is None else Path(path)
        if target is not None and len(ladders) > 1:
            # A picture for each ladder: one file would show the last alone.
            target = target.with_name(f"{target.stem}-{'-'.join(ladder.axes)}{target.suffix}")
        axes.append(_report_of_axis(" x ".join(ladder.axes), buckets, held, target))
    return BucketedReport(stats_of(caller), tuple(axes))


def _report_of_axis(
    axis: str, buckets: Buckets | PairBuckets, held: dict[tuple[int, ...], int], path: Path | None
) -> AxisReport:
    """Compare buckets with the best of 4 fewer, as many and 4 more."""
    pairs = isinstance(buckets, PairBuckets)
    seen: Any = held if pairs else {size: count for (size,), count in held.items()}
    # Fewer compile sooner, more waste less: what either would change.
    best = {}
    for count in sorted({max(len(buckets) - _STEP, 1), len(buckets), len(buckets) + _STEP}):
        fitted: Any = fit_pairs(seen, count) if pairs else Buckets.fit(seen, count)
        best[count] = (tuple(fitted), fitted.waste(seen))
    if path is not None:
        if isinstance(buckets, PairBuckets):
            draw_pairs(buckets.shapes, seen, path)
        else:
            buckets.plot(seen, path)
    return AxisReport(axis, tuple(buckets), buckets.waste(seen), best)


def _listed(buckets: Iterable[Any]) -> str:
    return " ".join(
        "x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in buckets
    )


# ---- warm-up ----

_WIDTH = 30
# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3
_TIMED = 2


@public
@dataclass(frozen=True)
class WarmupReport:
    """What ``warmup`` returns: what a call in each bucket takes, and what did not fit.

    It is a function of a size (of two with :class:`PairBuckets`), and so goes where a cost does:
    ``Buckets.fit(lengths, cost=report)``, or with the seconds of compiling as the cost of a bucket
    ``Buckets.fit(lengths, None, cost=report, compile_cost=report.compile_seconds)``.
    """

    axes: tuple[str, ...]
    seconds: Mapping[Any, float]
    """Of one call, by bucket (a size per axis): the better of two, the backward included."""
    compile_seconds: float
    """Mean seconds that compiling one bucket took."""
    left_out: Mapping[Any, str]
    """The buckets that ran out of memory, and what the error said."""

    def __call__(self, *sizes: int) -> float:
        """Return the seconds of a call at a size, from those of the buckets around it.

        One size: on the line between two buckets. Two: what the buckets that are not smaller took,
        by the share of them that it is; it never falls.

        Raises:
            ValueError: no bucket was timed, or there are not as many sizes as axes.
        """
        if not self.seconds or len(sizes) != len(self.axes):
            raise ValueError(
                f"WarmupReport: a call by {', '.join(self.axes)} was timed in {len(self.seconds)} "
                f"buckets, which says nothing of {sizes}"
            )
        if len(sizes) == 1:
            return self._on_a_line(sizes[0])
        largest = [max(each) for each in zip(*self.seconds, strict=True)]
        above = math.prod(max(1.0, a / b) for a, b in zip(sizes, largest, strict=True))
        return above * max(
            seconds * math.prod(min(1.0, a / b) for a, b in zip(sizes, shape, strict=True))
            for shape, seconds in self.seconds.items()
        )

    def _on_a_line(self, size: int) -> float:
        known = sorted((bucket, seconds) for (bucket,), seconds in self.seconds.items())
        buckets, seconds = zip(*known, strict=True)
        if buckets[0] <= size <= buckets[-1]:
            return float(np.interp(size, buckets, seconds))
        # Outside on the last line, but no less than in proportion to the size.
        near, far = (0, 1) if size < buckets[0] else (-1, -2)
        proportional = seconds[near] * size / buckets[near]
        if len(known) == 1:
            return float(proportional)
        slope = (seconds[far] - seconds[near]) / (buckets[far] - buckets[near])
        return float(max(seconds[near] + slope * (size - buckets[near]), proportional))


def warm_up(
    caller: Caller,
    owner: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    progress: bool | None,
) -> WarmupReport:
    """Compile every combination of buckets for an example like this one, and time a call in each.

    Raises:
        ValueError: an automatic ladder has no bucket yet.
        torch.OutOfMemoryError, RuntimeError: no bucket fits into memory.
    """
    spec = caller.spec
    if caller.cache.static is None and spec.options["compile"] is None:
        warn_user(
            f"bucketed: warmup() has nothing to compile: {caller.name} runs uncompiled. Pass "
            "compile=True to bucketed"
        )
    call = Call.of(spec, owner, args, kwargs)
    inputs, _ = find_inputs(spec, call)
    combinations = _sizes_to_compile(spec)
    modules = all_reachable_modules(caller.cache.function, (*owner, *args))
    shown = sys.stderr.isatty() if progress is None else progress
    begun = time.monotonic()
    seconds: dict[tuple[int, ...], float] = {}
    errors: dict[tuple[int, ...], Exception] = {}
    try:
        for done, sizes in enumerate(combinations):
            if shown:
                _draw_bar(done, len(combinations), begun, sizes)
            key = tuple(sizes[axis] for axis in spec.ladders)
            # Not isolated(): Dynamo guards on whether autocast's cache is on.
            with rng_state_restored(), module_state_restored(modules), buffers_restored(modules):
                took = _warm_up_one(caller, call, inputs, sizes)
            if isinstance(took, Exception):
                errors[key] = took
            elif took is not None:
                seconds[key] = took
        if shown:
            _draw_bar(len(combinations), len(combinations), begun, {})
    finally:
        if shown:
            sys.stderr.write("\n")
    # Nothing fits, so there is nothing that a warning could leave: the last is the smallest.
    if errors and len(errors) == len(combinations):
        raise list(errors.values())[-1]
    left_out = {
        key: (str(error).strip() or type(error).__name__).splitlines()[0]
        for key, error in errors.items()
    }
    if left_out:
        _warn_of_left_out(list(spec.ladders), left_out, len(combinations))
    compiled = [each for each in caller.cache.variants.values() if each.warmed_for]
    each_took = sum(each.seconds for each in compiled) / max(len(compiled), 1)
    return WarmupReport(tuple(spec.ladders), seconds, each_took, left_out)


def _warm_up_one(
    caller: Caller, call: Call, inputs: Sequence[Input], sizes: Sizes
) -> float | Exception | None:
    """Compile what runs inputs of these sizes, backward included, and time a call.

    Returns:
        The seconds, the better of two; None where nothing is compiled; the error where it does not
        fit into memory.
    """
    side = caller.spec.options["side"]
    try:
        sized = call.with_leaves(
            {each.index: _sized(call.leaves[each.index], each, sizes, side) for each in inputs}
        )
        args, kwargs = sized.bind()
        plan, sized = caller.plan_for(call.owner, tuple(args[len(call.owner) :]), kwargs)
        if not plan.variant.compiles:
            return None
        if plan.specialization not in plan.variant.warmed_for:
            _run(caller, plan, sized)
        # The better of two: what else the machine does makes a call slower, never faster.
        return min(_timed(caller, plan, sized) for _ in range(_TIMED))
    except Exception as error:
        if not _torch.is_out_of_memory(error):
            raise
        # Its frames hold what it had in memory already: the next bucket needs that.
        for each in (error, error.__cause__, error.__context__):
            traceback.clear_frames(None if each is None else each.__traceback__)
        return error.with_traceback(None)


def _warn_of_left_out(
    axes: Sequence[str], left_out: Mapping[tuple[int, ...], str], count: int
) -> None:
    shown = "; ".join(
        ", ".join(f"{axis} = {size}" for axis, size in zip(axes, sizes, strict=True))
        for sizes in left_out
    )
    warn_user(
        f"bucketed: warmup() left out {len(left_out)} of {count} buckets, which do not fit into "
        f"memory: {shown} ({next(iter(left_out.values()))}). Calls of these sizes will run out of "
        "memory, too: leave them out of buckets=, or make the batch smaller"
    )


def _timed(caller: Caller, plan: Plan, call: Call) -> float:
    """Run a plan and its backward once; return the seconds, those of the device included."""
    kinds = {leaf.device.type for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    # torch.cuda, torch.xpu and torch.mps have it; the CPU and meta have nothing to wait for.
    waits = [getattr(getattr(torch, kind, None), "synchronize", lambda: None) for kind in kinds]
    for wait in waits:
        wait()
    begun = time.perf_counter()
    _run(caller, plan, call)
    for wait in waits:
        wait()
    return time.perf_counter() - begun


def _run(caller: Caller, plan: Plan, call: Call) -> None:
    """Run a plan and its backward once, uncounted; compile it first where that is left to do."""
    variant = plan.variant
    warm = not variant.compiles or plan.specialization in variant.warmed_for
    args, kwargs = call.bind(plan.extras, plan.pad(call.leaves))
    run = variant.run if warm else caller.compiled(plan)
    for turn in range(_CUDA_GRAPH_TURNS if variant.cuda_graphs and not warm else 1):
        output = (run if turn == 0 else variant.run)(*args, **kwargs)
        begun = time.perf_counter()
        # The backward is compiled when it runs for the first time, under the same recompile limit.
        with alone():
            send_backward([Output(leaf) for leaf in FlatOutput.of(output).leaves], {}, {})
        if turn == 0 and not warm:
            variant.seconds += time.perf_counter() - begun
    variant.warmed_for.add(plan.specialization)


def _sizes_to_compile(spec: Spec) -> list[Sizes]:
    """Return the sizes of each combination of buckets.

    Raises:
        ValueError: an automatic ladder has no bucket yet.
    """
    empty = [name for name, ladder in spec.ladders.items() if ladder.buckets is None]
    if empty:
        raise ValueError(
            f"bucketed: the buckets of {empty[0]!r} are 'auto' and none is known yet: warm up "
            "after some calls, or pass plan="
        )
    # A ladder that two axes share counts once: its buckets are pairs already.
    ladders = list(dict.fromkeys(spec.ladders.values()))
    axes = [axis for ladder in ladders for axis in ladder.axes]
    combinations = [
        dict(zip(axes, itertools.chain(*shapes), strict=True))
        for shapes in itertools.product(*(ladder.shapes() for ladder in ladders))
    ]
    # The largest first: what runs out of memory does so at once.
    combinations.sort(key=lambda buckets: math.prod(buckets.values()), reverse=True)
    return combinations


def _sized(tensor: torch.Tensor, each: Input, buckets: Sizes, side: Side) -> torch.Tensor:
    sized = tensor.detach()
    for dim, axis in each.axes:
        size = buckets[axis]
        sized = sized.narrow(dim, 0, min(size, sized.shape[dim]))
        sized = pad_to_bucket(sized, dim, size, value=each.fill, side=side).tensor
    if tensor.requires_grad:
        sized = sized.requires_grad_()
    return sized


def _draw_bar(done: int, total: int, begun: float, sizes: Sizes) -> None:
    """Show how far warming up is."""
    now = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    bar, seconds = "#" * (_WIDTH * done // total), time.monotonic() - begun
    line = f"compiling [{bar:<{_WIDTH}}] {done} of {total}, {seconds:.0f} s {now}"
    sys.stderr.write(f"\r{line:<78}")
    sys.stderr.flush()
