"""What the padding check has proven: with how much padding, and what relies on 0 in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torchguard.bucketing.decorator.plan import Plan, TensorKey

__all__ = ["Proofs"]

_GROWS = 2.0
"""A bucket is checked again where it gets more than so many times the padding it had then."""


class Proofs:
    """What was proven of a function so far.

    Args:
        shared: whether ranks check together, so that nothing may count in which they differ.
        masks: arguments that one rank may give and another may not.
    """

    def __init__(self, *, shared: bool, masks: Collection[str]) -> None:
        self._shared = shared
        self._masks = masks
        self._shares: dict[Any, tuple[float, ...]] = {}
        self._neutral: dict[Any, frozenset[str]] = {}
        self._tried: set[Any] = set()

    def covers(self, plan: Plan) -> bool:
        """Whether its bucket was proven with about as much padding, or with more."""
        shares = self._shares.get(self._bucket(plan))
        return shares is not None and self.would_cover(plan, shares)

    def would_cover(self, plan: Plan, shares: Iterable[float]) -> bool:
        """Whether a proof with so much padding covers a plan."""
        return all(
            now <= _GROWS * before for now, before in zip(self._of(plan), shares, strict=True)
        )

    def key(self, plan: Plan) -> tuple[Any, ...]:
        """Return what a proof is of: the bucket, and what leads the function another way."""
        return self._bucket(plan)

    def shares(self, plan: Plan) -> tuple[float, ...]:
        """Return with how much padding a plan's bucket was proven, for what was real."""
        return self._shares[self._bucket(plan)]

    def adopt(
        self, plan: Plan, shares: Iterable[float], neutral: Iterable[str], *, tried: bool
    ) -> None:
        """Take over what another process has proven of a plan's bucket."""
        self._shares[self._bucket(plan)] = tuple(shares)
        if neutral:
            self.add_neutral(plan, neutral)
        if tried:
            self.add_tried(plan)

    def add(self, plan: Plan) -> None:
        """Note that its bucket is proven with its padding."""
        key, now = self._bucket(plan), self._of(plan)
        self._shares[key] = tuple(map(max, self._shares.get(key, now), now))

    def neutral(self, plan: Plan) -> frozenset[str]:
        """Return the inputs that 0 in the padding is neutral for, though another value is not."""
        return self._neutral.get(self._situation(plan), frozenset())

    def add_neutral(self, plan: Plan, labels: Iterable[str]) -> None:
        """Note that for these it is."""
        self._neutral[self._situation(plan)] = self.neutral(plan).union(labels)

    def tried(self, plan: Plan) -> bool:
        """Whether it was tried on other data than the caller's."""
        return self._situation(plan) in self._tried

    def add_tried(self, plan: Plan) -> None:
        """Note that it was."""
        self._tried.add(self._situation(plan))

    @property
    def relies_on_zero(self) -> tuple[str, ...]:
        """All inputs whose answer relies on 0 in the padding."""
        return tuple(dict.fromkeys(n for labels in list(self._neutral.values()) for n in labels))

    def _of(self, plan: Plan) -> tuple[float, ...]:
        """Return how much padding there is for what is real, by axis."""
        # Of the shortest rank: the others have decided the same.
        sizes = plan.shortest if self._shared else plan.sizes
        return tuple(
            (bucket - sizes[axis]) / max(sizes[axis], 1) for axis, bucket in plan.buckets.items()
        )

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

    def _bucket(self, plan: Plan) -> tuple[Any, ...]:
        return (*plan.buckets.values(), *self._situation(plan))
