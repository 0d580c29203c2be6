"""BucketBatchSampler: batches of one bucket each, as large as the budget allows there.

Shapes: N items, K buckets, W ranks.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler

from torchguard import _torch
from torchguard._events import warn_user
from torchguard._public import public
from torchguard.bucketing.buckets import Buckets, as_buckets
from torchguard.bucketing.fit import Cost, costs_of
from torchguard.bucketing.histogram import integers, positive_integer
from torchguard.bucketing.steps import count_steps, draw_steps, full_batches

_NAME = "BucketBatchSampler"
_Integers = NDArray[np.int64]


@public
class BucketBatchSampler(Sampler[list[int]]):
    """Batches of items of one bucket, in random order: ``DataLoader(batch_sampler=...)``.

    Equals ``torch.utils.data.BatchSampler`` over a random or distributed sampler, but a batch
    has one of a few shapes: (rows, size) of a bucket. Every item comes once in an epoch. All ranks
    get equally many batches, of the same bucket in the same step, without communication; if items
    do not divide evenly among them, a few come twice, as in ``DistributedSampler``.

    Items left over in a bucket move up to the next larger one or make a batch with fewer rows,
    which ``BucketCollator(batch_sizes=sampler.batch_sizes)`` fills up, whichever costs less.

    Args:
        lengths: of each item of the dataset: a list, an integer array or tensor.
        buckets: the ladder, or a list of sizes.
        tokens: the budget of a batch: it holds ``tokens // size`` items at its bucket's size.
        batch_size: as many items in every batch, in place of ``tokens``.
        cost: what an item costs, as in :meth:`Buckets.fit`: with ``"quadratic"`` a batch holds
            ``tokens // size**2`` items, with a function ``tokens // cost(size)``.
        shuffle: draw another order in every epoch; else as the data is, by bucket.
        seed: an integer from 0 on, the same on all ranks. Order depends on it and the epoch.
        drop_last: leave out the batches that are not full, other items in every epoch.
        rank: this process, or ``"all"`` for the batches of all ranks in turn, which is what
            ``accelerate``'s ``prepare`` deals out. If left out, that of ``torch.distributed``.
        world_size: how many processes there are.

    Attributes:
        batch_sizes: ``{size: rows}`` of each bucket, for :class:`torchguard.BucketCollator`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an item longer than the largest bucket, one above the budget alone, no items,
            both or neither of ``tokens`` and ``batch_size``, ``rank`` without ``world_size``, or no
            batch left with ``drop_last``.

    Cost:
        One shuffle of the items for each epoch, on the host.

    Example:
        >>> from torchguard import BucketBatchSampler
        >>> sampler = BucketBatchSampler([3, 7, 2, 8, 4, 1], [4, 8], tokens=16, shuffle=False)
        >>> list(sampler), sampler.batch_sizes
        ([[0, 2, 4, 5], [1, 3]], {4: 4, 8: 2})
    """

    def __init__(
        self,
        lengths: Any,
        buckets: Buckets | Sequence[int],
        *,
        tokens: int | None = None,
        batch_size: int | None = None,
        cost: Cost = "linear",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | Literal["all"] | None = None,
        world_size: int | None = None,
    ) -> None:
        sizes = as_buckets(buckets, "BucketBatchSampler: buckets").sizes
        places = _places(lengths, sizes)
        items = np.bincount(places, minlength=len(sizes)).tolist()
        rows = full_batches(
            sizes, items, tokens=tokens, batch_size=batch_size, cost=cost, operation=_NAME
        )
        self._rank, self._ranks = _ranks(rank, world_size)
        self.shuffle = bool(shuffle)
        self.seed = positive_integer(seed, "seed", _NAME, least=0)
        self.drop_last = bool(drop_last)
        self.batch_sizes = dict(zip(sizes, rows, strict=True))
        prices = costs_of(sizes, cost, _NAME).tolist()
        self._counted = count_steps(
            items, rows, prices, ranks=self._ranks, drop_last=self.drop_last
        )
        self._steps = sum(self._counted.counts)
        if not self._steps:
            raise ValueError(
                f"{_NAME}: drop_last leaves out all {len(places)} items, too few for a step of "
                f"{self._ranks} x {min(rows)}: pass drop_last=False, or make the batches smaller"
            )
        # (K) arrays of the items of each bucket, in the order of the data.
        order = np.argsort(places, kind="stable")
        self._items: list[_Integers] = np.split(order, np.cumsum(items)[:-1])
        in_buckets = repr((items, self._counted)).encode() + order.tobytes()
        self._checksum = zlib.crc32(in_buckets)
        self._warned = False
        self.epoch = 0  # of the pass that runs or ran last
        self._begin = 0  # the step at which the next pass begins
        self._given = 0  # steps handed out in this pass
        self._begun = 0  # the step at which it began
        self._yielded: Callable[[], int] | None = None
        """How many batches its DataLoader has given to the loop, if a DataLoader draws from it."""

    def __len__(self) -> int:
        """Return how many batches an epoch has: the same on all ranks, in every epoch."""
        return self._steps * (self._ranks if self._rank == "all" else 1)

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out the batches of the epoch, from where :meth:`load_state_dict` left off.

        The pass after one that has handed out its last batch is the next epoch.
        """
        caller = sys._getframe(1).f_locals.get("self")
        taken: Any = caller.sampler if type(caller) is BatchSampler else None  # accelerate derives
        if taken is self:
            raise TypeError(
                f"{_NAME}: it was given as sampler, whose items are indices, and it yields lists "
                "of them: pass DataLoader(dataset, batch_sampler=...) without batch_size"
            )
        self._refuse_another_sharding(caller)
        self._warn_of_missing(caller)
        # Nobody need have asked for one more: transformers' Trainer takes len(loader) batches.
        if self._given == self._steps:
            self.set_epoch(self.epoch + 1)
        # Once: the pass after this one begins at its first step.
        begin, self._begin = self._begin, 0
        self._given = self._begun = begin
        self._yielded = _torch.batches_yielded(caller)
        del caller  # it holds this generator: a loop that breaks would not end the workers
        for step in self._drawn(self.epoch)[begin:]:
            self._given += 1
            yield from step.tolist() if self._rank == "all" else [step[self._rank].tolist()]

    @property
    def sampler(self) -> BucketBatchSampler:
        """Itself: Lightning and accelerate call ``set_epoch`` of ``batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``, as ``DistributedSampler.set_epoch`` does.

        The epoch that :meth:`load_state_dict` has set continues where it stopped.
        """
        epoch = positive_integer(epoch, "epoch", _NAME + ".set_epoch", least=0)
        # Trainers set the epoch they resume in again, which must not begin it anew.
        if epoch != self.epoch:
            self.epoch, self._begin = epoch, 0
        self._given, self._yielded = self._begin, None

    def state_dict(self, steps: int | None = None) -> dict[str, int]:
        """Return the position in the epoch, to continue from it exactly.

        Args:
            steps: how many batches of this epoch the training has taken. Left out, as many as
                the DataLoader has given to its loop. Say it in a trainer that fetches ahead
                itself, as those of Lightning and accelerate do.

        Raises:
            ValueError: ``steps`` is more than an epoch has.
        """
        taken = steps
        if taken is None:
            taken = self._given
            if self._yielded is not None:
                of_all = self._ranks if self._rank == "all" else 1
                taken = min(taken, self._begun + -(-self._yielded() // of_all))
        taken = positive_integer(taken, "steps", _NAME + ".state_dict", least=0)
        if taken > self._steps:
            raise ValueError(
                f"{_NAME}.state_dict: steps is {taken}, but an epoch has {self._steps}; "
                "expected those of this epoch alone"
            )
        return {"epoch": self.epoch, "steps": taken, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called; at the next epoch if that one was over.

        Raises:
            ValueError: in the middle of an epoch, of other items, buckets, batches, ranks or seed.
        """
        epoch, steps = state["epoch"], state["steps"]
        differing = [
            f"{name} was {state.get(name)} and is {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        # At the beginning of an epoch nothing was drawn yet that could be another now.
        is_over = steps >= state.get("steps_per_epoch", self._steps)
        if steps and differing and not is_over:
            raise ValueError(
                f"{_NAME}.load_state_dict: the state is from the middle of an epoch of "
                f"another sampler: {', '.join(differing)}. Build it as it was, or begin with the "
                f"next epoch: set_epoch({epoch + 1})"
            )
        self.epoch, self._begin = (epoch + 1, 0) if is_over else (epoch, steps)
        self._given, self._yielded = self._begin, None

    def _identity(self) -> dict[str, int]:
        """Return what decides on the order besides the epoch."""
        items, shuffle = sum(map(len, self._items)), int(self.shuffle)
        drawn = {"seed": self.seed, "shuffle": shuffle, "world_size": self._ranks}
        drawn["buckets_checksum"] = self._checksum
        return {"items": items, "steps_per_epoch": self._steps, **drawn}

    def _drawn(self, epoch: int) -> list[_Integers]:
        """Return the steps of an epoch, in order: (W, rows) each."""
        # Of seed and epoch alone: all ranks draw the same order, and so does a run that resumes.
        random = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
        steps = list(draw_steps(self._items, self._counted, self._ranks, random))
        return steps if random is None else [steps[n] for n in random.permutation(len(steps))]

    def _warn_of_missing(self, caller: Any) -> None:
        """Warn once if the dataset of the DataLoader that draws has more items than lengths."""
        items, there = sum(map(len, self._items)), _torch.items_of_loader(caller)
        if self._warned or there is None or there <= items:
            return
        self._warned = True
        warn_user(
            "items-without-a-length",
            f"{_NAME}: lengths has {items} items, and the dataset of the DataLoader has {there}: "
            f"the last {there - items} are never drawn. Pass the length of each item; to leave "
            f"them out, give the DataLoader torch.utils.data.Subset(dataset, range({items}))",
        )

    def _refuse_another_sharding(self, caller: Any) -> None:
        """Raise where accelerate's BatchSamplerShard deals this rank's batches out once more.

        Each rank would silently train on a W-th of its items.
        https://github.com/huggingface/accelerate/blob/main/src/accelerate/data_loader.py
        """
        wraps = getattr(caller, "batch_sampler", None) is self
        shards = getattr(caller, "num_processes", 1) if wraps else 1
        if self._rank != "all" and self._ranks > 1 and shards > 1:
            raise ValueError(
                f"{_NAME}: these are the batches of rank {self._rank}, and {type(caller).__name__} "
                f"takes one in {shards} of them: pass rank='all', world_size={shards}"
            )


def _places(lengths: Any, sizes: tuple[int, ...]) -> NDArray[np.intp]:
    """Return each item's bucket: (N,) places on the ladder."""
    array = integers(lengths, _NAME, "lengths")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{_NAME}: lengths has shape {array.shape}, expected (N,), one per item")
    if (array < 0).any():
        raise ValueError(f"{_NAME}: a length is {array.min()}, expected 0 or more")
    wrong = np.flatnonzero(array > sizes[-1])
    if wrong.size:
        raise ValueError(
            f"{_NAME}: lengths[{wrong[0]}] is {array[wrong[0]]}, but the largest bucket "
            f"is {sizes[-1]}: leave out or cut the {wrong.size} items that are longer, or add a "
            f"bucket of {array.max()}"
        )
    return np.searchsorted(sizes, array)


def _ranks(rank: Any, world_size: Any) -> tuple[int | Literal["all"], int]:
    """Return this process and how many there are."""
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    if rank is None or world_size is None:
        raise ValueError(
            f"{_NAME}: rank is {rank!r} and world_size is {world_size!r}: pass both, or "
            "neither to take those of torch.distributed"
        )
    world_size = positive_integer(world_size, "world_size", _NAME)
    if rank == "all":
        return "all", world_size
    rank = positive_integer(rank, "rank", _NAME, least=0)
    if rank >= world_size:
        raise ValueError(f"{_NAME}: rank is {rank}, expected 0 to {world_size - 1}, or 'all'")
    return rank, world_size
