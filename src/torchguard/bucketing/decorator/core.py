"""A function with all it takes to run it in buckets, put together from what the user asked for."""

from __future__ import annotations

from typing import Any

from torchguard.bucketing.decorator.auto import ladders_of, read_plan
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.compile import Source, separated
from torchguard.bucketing.decorator.masks_and_lengths import lengths_of, masks_of
from torchguard.bucketing.decorator.options import Options
from torchguard.bucketing.decorator.planner import Planner
from torchguard.bucketing.decorator.spec import Declaration, axis_names

__all__ = ["Core"]


class Core:
    """One set of ladders, and the callers that share it.

    Args:
        function: what the user wraps, or a module's own forward; not compiled.
        static: compiles it for static sizes, None if nothing does.
        dynamic: likewise for sizes above the largest bucket.
        options: what the user asked for.
        bound: whether it is given something of ours first, ``self``.
        name: for messages.
    """

    def __init__(
        self, function: Any, static: Any, dynamic: Any, options: Options, *, bound: bool, name: str
    ) -> None:
        axes = tuple(dict.fromkeys(axis_names(options.dims)))
        growing = options.overflow == "grow"
        plan = None if options.plan is None else read_plan(options.plan)
        self.ladders = ladders_of(axes, options.buckets, plan, growing=growing)
        declaration = Declaration.of(function, options.dims, options.fill, bound=bound)
        masks = masks_of(options.mask, axes)
        lengths = lengths_of(options.lengths, axes)
        declaration.check_arguments([mask.argument for mask in masks], list(lengths.values()))
        self._planner = Planner(declaration, self.ladders, options, masks, lengths)
        self._function = function
        self._static, self._dynamic = static, dynamic
        self._name = name

    def caller(self) -> Caller:
        """Return a caller with statistics and compiled variants of its own."""
        function = self._function
        dynamic = function
        if self._dynamic is not None and self._planner.options.overflow == "dynamic":
            dynamic = self._dynamic(separated(function, "beyond_buckets"))
        return Caller(Source(function, self._static, dynamic), self._planner, self._name)
