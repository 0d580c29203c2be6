"""Compile every bucket ahead of time."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any, TextIO

import torch
from typing_extensions import Self

from torchguard.bucketing.decorator.auto import Ladder
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.trees import Path, parts, replaced
from torchguard.bucketing.decorator.warning import warn_user
from torchguard.bucketing.padding import pad_to_bucket
from torchguard.equivalence.isolate import (
    buffers_restored,
    module_state_restored,
    rng_state_restored,
)
from torchguard.equivalence.reachable import all_reachable_modules

__all__ = ["warm_up"]

_WIDTH = 30


def warm_up(
    caller: Caller,
    ladders: dict[str, Ladder],
    owner: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    progress: bool | None,
) -> None:
    """Compile every combination of buckets for an example like this one.

    Raises:
        ValueError: an automatic ladder has no bucket yet.
    """
    if caller.source.static is None and caller.options.compile is None:
        warn_user(
            f"bucketed: warmup() has nothing to compile: {caller.name} runs uncompiled. Pass "
            "compile=True to bucketed"
        )
    entries = caller.planner.entries(len(args), tuple(kwargs))
    inputs, _ = caller.planner.inputs(entries, args, kwargs)
    empty = [name for name, ladder in ladders.items() if ladder.buckets is None]
    if empty:
        raise ValueError(
            f"bucketed: the buckets of {empty[0]!r} are 'auto' and none is known yet: warm up "
            "after some calls, or pass plan="
        )
    sizes = [ladder.buckets.sizes for ladder in ladders.values() if ladder.buckets is not None]
    combinations = [dict(zip(ladders, each, strict=True)) for each in itertools.product(*sizes)]
    modules = all_reachable_modules(caller.source.function, (*owner, *args))
    shown = sys.stderr.isatty() if progress is None else progress
    with _Bar(sys.stderr, len(combinations), shown=shown) as bar:
        # The longest first: what runs out of memory does so at once.
        for done, buckets in enumerate(reversed(combinations)):
            bar.show(done, buckets)
            new: dict[Path, Any] = {}
            for each in inputs:
                path = (each.place, *each.path)
                first: Any = (args, kwargs)[isinstance(each.place, str)]
                tensor = first[each.place]
                for key in each.path:
                    tensor = dict(parts(tensor) or ())[key]
                new[path] = _sized(tensor, each, buckets, caller.options.side)
            by_place = {p: v for p, v in new.items() if isinstance(p[0], int)}
            by_name = {p: v for p, v in new.items() if isinstance(p[0], str)}
            with rng_state_restored(), module_state_restored(modules), buffers_restored(modules):
                caller.warm(owner, replaced(args, by_place), replaced(kwargs, by_name))
        bar.show(len(combinations), {})


def _sized(tensor: torch.Tensor, each: Any, buckets: dict[str, int], side: Any) -> torch.Tensor:
    sized = tensor.detach()
    for dim, axis in each.axes:
        size = buckets[axis]
        sized = sized.narrow(dim, 0, min(size, sized.shape[dim]))
        sized = pad_to_bucket(sized, dim, size, value=each.fill, side=side).tensor
    if tensor.requires_grad:
        sized = sized.requires_grad_()
    return sized


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self, stream: TextIO, total: int, *, shown: bool) -> None:
        self._stream, self._total, self._shown = stream, total, shown
        self._begun = time.monotonic()

    def show(self, done: int, buckets: dict[str, int]) -> None:
        if not self._shown:
            return
        filled = _WIDTH * done // self._total
        now = ", ".join(f"{name} = {size}" for name, size in buckets.items())
        seconds = time.monotonic() - self._begun
        line = (
            f"compiling [{'#' * filled:<{_WIDTH}}] {done} of {self._total}, {seconds:.0f} s {now}"
        )
        self._stream.write(f"\r{line:<78}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
