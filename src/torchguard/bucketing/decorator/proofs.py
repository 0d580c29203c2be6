"""What the padding check has proven: with how much padding, and what relies on 0 in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torchguard.bucketing.decorator.plan import Plan, TensorKey

__all__ = ["Proofs", "Proven"]

_GROWS = 2.0
"""A bucket is checked again where it gets more than so many times the padding it had then."""


@dataclass
class Proven:
    """What was proven of a function for calls that differ in their sizes alone."""

    shared: bool
    """Whether ranks check together."""
    neutral: frozenset[str] = frozenset()
    """The inputs that 0 in the padding is neutral for, though another value is not."""
    tried: bool = False
    """Whether the check has run on other data than the caller's."""
    _shares: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)
    """By bucket, how much padding it was proven with."""

    def covers(self, plan: Plan) -> bool:
        """Whether its bucket was proven with about as much padding, or with more."""
        shares = self._shares.get(tuple(plan.buckets.values()))
        return shares is not None and self.would_cover(plan, shares)

    def would_cover(self, plan: Plan, shares: Iterable[float]) -> bool:
        """Whether a proof with so much padding covers a plan."""
        return all(
            now <= _GROWS * before for now, before in zip(self._of(plan), shares, strict=True)
        )

    def shares(self, plan: Plan) -> tuple[float, ...]:
        """Return with how much padding a plan's bucket was proven, for what was real."""
        return self._shares[tuple(plan.buckets.values())]

    def adopt(
        self, plan: Plan, shares: Iterable[float], neutral: Iterable[str], *, tried: bool
    ) -> None:
        """Take over what another process has proven of a plan's bucket."""
        self._shares[tuple(plan.buckets.values())] = tuple(shares)
        self.neutral = self.neutral.union(neutral)
        self.tried = self.tried or tried

    def add(self, plan: Plan) -> None:
        """Note that its bucket is proven with its padding."""
        bucket, now = tuple(plan.buckets.values()), self._of(plan)
        self._shares[bucket] = tuple(map(max, self._shares.get(bucket, now), now))

    def _of(self, plan: Plan) -> tuple[float, ...]:
        """Return how much padding there is for what is real, by axis."""
        # Of the shortest rank: the others have decided the same.
        sizes = plan.shortest if self.shared else plan.sizes
        return tuple(
            (bucket - sizes[axis]) / max(sizes[axis], 1) for axis, bucket in plan.buckets.items()
        )


class Proofs:
    """What was proven of a function so far.

    Args:
        shared: whether ranks check together, so that nothing may count in which they differ.
        masks: arguments that one rank may give and another may not.
    """

    def __init__(self, *, shared: bool, masks: Collection[str]) -> None:
        self._shared = shared
        self._masks = masks
        self._proven: dict[Any, Proven] = {}

    def of(self, plan: Plan) -> Proven:
        """Return what was proven for calls like that of a plan; to be added to."""
        return self._proven.setdefault(self._situation(plan), Proven(self._shared))

    def key(self, plan: Plan) -> tuple[Any, ...]:
        """Return what a proof is of: the bucket, and what leads the function another way."""
        return (*plan.buckets.values(), *self._situation(plan))

    @property
    def relies_on_zero(self) -> tuple[str, ...]:
        """All inputs whose answer relies on 0 in the padding."""
        proven = list(self._proven.values())
        return tuple(dict.fromkeys(label for each in proven for label in each.neutral))

    def _situation(self, plan: Plan) -> tuple[Any, ...]:
        # With labels a model computes a loss, so which inputs there are counts as well. Switches
        # may differ between ranks, and all of them have to check at the same time.
        around, labels = plan.specialization.around, [each.label for each in plan.inputs]
        if self._shared:
            return around, *(label for label in labels if label not in self._masks)
        structure, others = plan.specialization.structure, plan.specialization.others
        # Switches may lead the function another way; sizes and fractions do not.
        switches = [
            (label, None if isinstance(key, (TensorKey, float)) else key) for label, key in others
        ]
        return around, structure, *switches, *labels
