"""BucketBatchSampler: batches of one bucket, each item once, ranks in step, resumable."""

from __future__ import annotations

import gc
import json
import multiprocessing
import warnings
from bisect import bisect_left
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from support.child_process import output_of
from torchguard import BucketBatchSampler, BucketCollator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LADDER = [4, 8, 12, 20]

lengths_drawn = st.lists(st.integers(0, 20), min_size=1, max_size=120)
worlds = st.integers(1, 5)
budgets = st.one_of(
    st.fixed_dictionaries({"tokens": st.integers(20, 90)}),
    st.fixed_dictionaries({"batch_size": st.integers(1, 9)}),
    st.fixed_dictionaries({"tokens": st.integers(400, 3000), "cost": st.just("quadratic")}),
)


def bucket_of(length: int) -> int:
    return LADDER[bisect_left(LADDER, length)]


def of_all_ranks(world: int, *arguments: Any, **options: Any) -> list[BucketBatchSampler]:
    return [
        BucketBatchSampler(*arguments, **options, rank=rank, world_size=world)
        for rank in range(world)
    ]


def some_steps(world: int, *arguments: Any, **options: Any) -> list[BucketBatchSampler]:
    """Return the ranks' samplers, if drop_last leaves anything."""
    try:
        return of_all_ranks(world, *arguments, **options)
    except ValueError as error:
        assume("leaves out all" not in str(error))
        raise


def epochs(sampler: BucketBatchSampler, number: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(number)]


# Against what the sampler promises, said in the plainest way.


@settings(max_examples=150, deadline=None)
@given(lengths_drawn, budgets, worlds, st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_item_comes_once_and_ranks_have_one_shape_in_every_step(
    lengths: list[int],
    budget: dict[str, Any],
    world: int,
    shuffle: bool,
    drop_last: bool,
    epoch: int,
) -> None:
    """Some come twice only where the items of a step do not come out even: fewer than W a step.

    The bucket is that of a batch's longest item; BucketCollator makes its shape of it.
    """
    samplers = some_steps(world, lengths, LADDER, **budget, shuffle=shuffle, drop_last=drop_last)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    planned = samplers[0].batch_sizes
    collate = BucketCollator(LADDER, {1: "t"}, batch_sizes=planned)
    missing = set(range(len(lengths)))
    steps = list(zip(*samplers, strict=True))
    assert {len(sampler) for sampler in samplers} == {len(steps)}
    for step in steps:
        given = [index for batch in step for index in batch]
        assert missing >= set(given)
        missing -= set(given)
        assert len(given) - len(set(given)) < world
        items = [[torch.ones(lengths[index]) for index in batch] for batch in step]
        [(rows, size)] = {(len(each), bucket_of(max(map(len, each)))) for each in items}
        assert {collate(each).shape for each in items} == {(planned[size], size)}
        assert rows == planned[size] if drop_last else 0 < rows <= planned[size]
        price = size**2 if budget.get("cost") else size
        expected = budget.get("batch_size") or max(1, budget["tokens"] // price)
        assert planned[size] == expected
    assert drop_last or not missing


@settings(max_examples=80, deadline=None)
@given(lengths_drawn, budgets, worlds, st.integers(0, 9))
def test_the_same_seed_and_epoch_give_the_same_order(
    lengths: list[int], budget: dict[str, Any], world: int, seed: int
) -> None:
    """Whatever was drawn before, and an epoch that is finished is followed by the next."""
    first, second = (
        of_all_ranks(world, lengths, LADDER, **budget, seed=seed)[-1] for _ in range(2)
    )
    in_turn = epochs(first, 3)
    for epoch in (2, 0, 1):
        second.set_epoch(epoch)
        assert list(second) == in_turn[epoch]
    assert list(second) == in_turn[2]


@settings(max_examples=80, deadline=None)
@given(lengths_drawn, budgets, worlds, st.data())
def test_what_is_resumed_equals_what_is_not_interrupted(
    lengths: list[int], budget: dict[str, Any], world: int, data: st.DataObject
) -> None:
    """At any batch of any epoch, through JSON, with set_epoch called by a trainer or not."""
    whole = epochs(BucketBatchSampler(lengths, LADDER, **budget, rank=0, world_size=world), 3)
    sampler = BucketBatchSampler(lengths, LADDER, **budget, rank=0, world_size=world)
    epoch = data.draw(st.integers(0, 1))
    stop = data.draw(st.integers(0, len(sampler)))
    sampler.set_epoch(epoch)
    passing = iter(sampler)
    taken = [next(passing) for _ in range(stop)]
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = BucketBatchSampler(lengths, LADDER, **budget, rank=0, world_size=world)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["steps"] == stop % len(sampler)
    if data.draw(st.booleans()) and stop < len(sampler):
        resumed.set_epoch(epoch)
    if stop == len(sampler):
        assert list(resumed) == whole[epoch + 1]
    else:
        assert taken + list(resumed) == whole[epoch]
        assert list(resumed) == whole[epoch + 1]


@settings(max_examples=80, deadline=None)
@given(lengths_drawn, budgets, worlds)
def test_all_ranks_in_turn_are_the_ranks_interleaved(
    lengths: list[int], budget: dict[str, Any], world: int
) -> None:
    """rank="all" is what something that deals one batch to each process takes."""
    each = [list(sampler) for sampler in of_all_ranks(world, lengths, LADDER, **budget)]
    together = BucketBatchSampler(lengths, LADDER, **budget, rank="all", world_size=world)
    batches = list(together)
    assert len(batches) == len(together)
    assert [batches[rank::world] for rank in range(world)] == each


def test_shuffle_false_keeps_the_order_of_the_data() -> None:
    """By bucket, the items of each as they come."""
    sampler = BucketBatchSampler([3, 7, 2, 8, 4, 5, 1, 1], [4, 8], batch_size=2, shuffle=False)
    assert epochs(sampler, 2) == [[[0, 2], [4, 6], [1, 7], [3, 5]]] * 2


# The plan.


def brute_force(items: list[int], rows: list[int], prices: list[int], world: int) -> float:
    """Try all ways in which leftovers stay or move up."""

    def cost_of(stays: tuple[bool, ...]) -> float:
        total, moved = 0.0, 0
        for own, each, price, stay in zip(items, rows, prices, stays, strict=True):
            whole, left = divmod(own + moved, world * each)
            steps = whole + (1 if stay and left else 0)
            if moved and own < world * steps:
                return float("inf")
            total += steps * world * each * price
            moved = 0 if stay else left
        return total

    ways = product([False, True], repeat=len(items) - 1)
    return min(cost_of((*stays, True)) for stays in ways)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), st.integers(20, 60), worlds
)
def test_leftovers_stay_or_move_up_whichever_costs_least(
    items: list[int], tokens: int, world: int
) -> None:
    sizes = range(1, len(items) + 1)
    prices = [2 + 3 * place for place in range(len(items))]
    lengths = [size for size, own in zip(sizes, items, strict=True) for _ in range(own)]
    sampler = BucketBatchSampler(
        lengths, sizes, tokens=tokens, cost=lambda n: prices[n - 1], rank="all", world_size=world
    )
    ends = [max(lengths[index] for index in batch) for batch in sampler]
    found = sum(sampler.batch_sizes[end] * prices[end - 1] for end in ends)
    assert found == brute_force(items, [tokens // price for price in prices], prices, world)


def test_drop_last_leaves_out_others_in_every_epoch() -> None:
    sampler = BucketBatchSampler([5] * 11, [8], batch_size=4, drop_last=True)
    assert len(sampler) == 2
    seen = {index for epoch in epochs(sampler, 20) for batch in epoch for index in batch}
    assert seen == set(range(11))


# Passes over it.


def test_an_epoch_is_over_with_its_last_batch_and_not_before() -> None:
    """A look at the first batch on one rank alone does not put it an epoch ahead.

    transformers' Trainer takes len(loader) batches and does not ask whether there are more.
    """
    sampler = BucketBatchSampler(range(1, 21), LADDER, batch_size=2)
    assert next(iter(sampler)) == next(iter(sampler))
    assert sampler.epoch == 0
    first, second = (list(islice(iter(sampler), len(sampler))) for _ in range(2))
    assert first != second
    assert sampler.epoch == 1


def loader_of(lengths: list[int], sampler: BucketBatchSampler, workers: int) -> DataLoader[Any]:
    rows: Any = [{"ids": [index] * length} for index, length in enumerate(lengths)]
    collate = BucketCollator(
        LADDER, {"ids": {1: "t"}}, fill={"ids": -1}, batch_sizes=sampler.batch_sizes
    )
    return DataLoader(rows, batch_sampler=sampler, num_workers=workers, collate_fn=collate)


def items_of(batch: dict[str, torch.Tensor]) -> list[int]:
    return [int(row[0]) for row in batch["ids"] if row[0] >= 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_is_resumed_exactly_whatever_workers_have_fetched(workers: int) -> None:
    """In the middle of it, behind its break, at its end, and resumed once more."""
    lengths = np.random.default_rng(3).integers(1, 21, 60).tolist()
    sampler, resumed, other = (BucketBatchSampler(lengths, LADDER, tokens=40) for _ in range(3))
    whole = [items_of(batch) for batch in loader_of(lengths, other, 0)]
    for step, _ in enumerate(loader_of(lengths, sampler, workers), start=1):
        assert sampler.state_dict()["steps"] == step
        if step == 7:
            break
    state = sampler.state_dict()
    assert state["steps"] == 7
    resumed.load_state_dict(state)
    assert resumed.state_dict()["steps"] == 7
    rest = []
    for batch in loader_of(lengths, resumed, workers):
        rest.append(items_of(batch))
        assert resumed.state_dict()["steps"] == 7 + len(rest)
    assert rest == whole[7:]
    assert resumed.state_dict()["steps"] == len(resumed)
    again = BucketBatchSampler(lengths, LADDER, tokens=40)
    again.load_state_dict(resumed.state_dict())
    assert again.epoch == 1


def test_a_loop_that_breaks_ends_its_workers() -> None:
    """At once, as without this sampler: nothing waits for a collection of cycles."""
    sampler = BucketBatchSampler([5] * 40, LADDER, batch_size=2)
    before = multiprocessing.active_children()
    gc.disable()
    try:
        for _ in loader_of([5] * 40, sampler, 1):
            break
        assert multiprocessing.active_children() == before
    finally:
        gc.enable()


def test_a_trainer_that_fetches_ahead_says_how_many_it_has_taken() -> None:
    sampler = BucketBatchSampler([5] * 40, LADDER, batch_size=2)
    batches = iter(loader_of([5] * 40, sampler, 2))
    for _ in range(4):
        next(batches)
    assert sampler.state_dict(3)["steps"] == 3


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([5, 30, 31], LADDER), {"tokens": 64}, ValueError,
         r"lengths\[1\] is 30, but the largest bucket is 20: leave out or cut the 2 items"),
        (([5], LADDER), {}, ValueError, "tokens is None and batch_size is None: pass one of them"),
        (([5, 20], LADDER), {"tokens": 16}, ValueError,
         "one item of bucket 20 costs 20: pass tokens=20"),
        (([], LADDER), {"tokens": 64}, ValueError, r"lengths has shape \(0,\)"),
        ((np.ones((2, 2), int), LADDER), {"tokens": 64}, ValueError, r"shape \(2, 2\)"),
        (([5, -1], LADDER), {"tokens": 64}, ValueError, "a length is -1"),
        (([5], LADDER), {"tokens": 64, "rank": 0}, ValueError, "pass both, or neither"),
        (([5], LADDER), {"tokens": 64, "rank": 2, "world_size": 2}, ValueError,
         "rank is 2, expected 0 to 1"),
        (([5] * 9, LADDER), {"batch_size": 10, "drop_last": True}, ValueError,
         "leaves out all 9 items"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    arguments: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BucketBatchSampler(*arguments, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_are_never_drawn_are_named_once(workers: int) -> None:
    """And nothing is said where each item has a length."""
    rows: Any = [torch.ones(5)] * 9
    for count in (6, 9):
        sampler = BucketBatchSampler([5] * count, [8], batch_size=3)
        loader: DataLoader[Any] = DataLoader(rows, batch_sampler=sampler, num_workers=workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                list(loader)
        said = [str(each.message) for each in caught if "never drawn" in str(each.message)]
        assert len(said) == (count < 9)
        assert not said or "lengths has 6 items, and the dataset of the DataLoader has 9" in said[0]


def test_a_bucket_without_items_may_be_above_the_budget() -> None:
    """A ladder for the longest there can be is no reason to refuse short data."""
    assert list(BucketBatchSampler([5], [8, 4096], tokens=64)) == [[0]]


def test_a_state_of_another_sampler_is_refused_in_the_middle_of_an_epoch() -> None:
    one = BucketBatchSampler([5] * 40, [8], batch_size=4)
    other = BucketBatchSampler([5] * 40, [8], batch_size=4, rank=0, world_size=2)
    with pytest.raises(ValueError, match="world_size was 1 and is 2"):
        other.load_state_dict(one.state_dict(3))
    with pytest.raises(ValueError, match="steps is 11, but an epoch has 10"):
        one.state_dict(11)
    one.set_epoch(4)
    other.load_state_dict(one.state_dict(0))
    assert other.epoch == 4
    other.load_state_dict(one.state_dict(10))  # the epoch was over
    assert (other.epoch, len(list(other))) == (5, 5)


@pytest.mark.parametrize("buckets", [[249, 500], [230, 500], [200, 300, 500]])
def test_a_state_of_other_buckets_is_refused_in_the_middle_of_an_epoch(buckets: list[int]) -> None:
    """Also where an epoch has as many steps: some items would come twice, others never."""
    one = BucketBatchSampler(range(1, 500), [250, 500], batch_size=10)
    other = BucketBatchSampler(range(1, 500), buckets, batch_size=10)
    assert len(one) == len(other)
    with pytest.raises(ValueError, match="buckets_checksum was"):
        other.load_state_dict(one.state_dict(20))
    swapped = BucketBatchSampler(
        [300, *range(2, 300), 1, *range(301, 500)], [250, 500], batch_size=10
    )
    with pytest.raises(ValueError, match="buckets_checksum was"):
        swapped.load_state_dict(one.state_dict(20))


class BatchSamplerShard:
    """Deals batches out, as accelerate's class of this name does."""

    def __init__(self, batch_sampler: Any, num_processes: int) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __iter__(self) -> Iterator[list[int]]:
        yield from islice(self.batch_sampler, 0, None, self.num_processes)


def test_batches_of_one_rank_are_not_dealt_out_again() -> None:
    """Each rank would see only a part of its items."""
    rank_0, every = (
        BucketBatchSampler([5] * 40, [8], batch_size=4, rank=rank, world_size=2)
        for rank in (0, "all")
    )
    with pytest.raises(ValueError, match="pass rank='all', world_size=2"):
        list(BatchSamplerShard(rank_0, 2))
    assert list(BatchSamplerShard(rank_0, 1)) == list(BatchSamplerShard(every, 2))


# In the loops of trainers, as docs/compile/batches.md shows them.


ROWS = """
import json, sys, torch
from torch.utils.data import DataLoader
from torchguard import BucketBatchSampler, BucketCollator

lengths = [1 + 7 * n % 32 for n in range(70)]
rows = [{"input_ids": [1 + n] * size, "labels": [1] * size, "attention_mask": [1] * size}
        for n, size in enumerate(lengths)]

def loader_of(workers=0, **ranks):
    sampler = BucketBatchSampler(lengths, [8, 16, 32], tokens=128, **ranks)
    dims = {name: {1: "t"} for name in rows[0]}
    collate = BucketCollator(
        [8, 16, 32], dims, fill={"labels": -100}, batch_sizes=sampler.batch_sizes
    )
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers)
"""

TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class BucketTrainer(Trainer):
    def get_train_dataloader(self):
        return loader_of(workers=1)

class Model(LlamaForCausalLM):
    def forward(self, input_ids=None, **more):
        self.seen.append([list(input_ids.shape), input_ids[:, 0].tolist()])
        return super().forward(input_ids=input_ids, **more)

def train(folder, resume=None):
    torch.manual_seed(0)
    model = Model(LlamaConfig(
        vocab_size=128, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    ))
    model.seen = []
    arguments = TrainingArguments(
        folder, num_train_epochs=2, report_to=[], use_cpu=True, save_steps=20, logging_steps=1,
        disable_tqdm=True,
    )
    trainer = BucketTrainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return model.seen, norms

seen, norms = train(sys.argv[1])
resumed, _ = train(sys.argv[1], sys.argv[1] + "/checkpoint-20")
steps = len(loader_of())
print(json.dumps([steps, seen, resumed, all(norm == norm for norm in norms)]))
"""

ACCELERATE = """
from accelerate.data_loader import prepare_data_loader

def dealt(process, **ranks):
    loader = prepare_data_loader(
        loader_of(**ranks), num_processes=2, process_index=process, put_on_device=False
    )
    return [[[list(batch["input_ids"].shape), batch["input_ids"][:, 0].tolist()]
             for batch in loader] for epoch in range(2)]

print(json.dumps([dealt(process, rank="all", world_size=2) for process in range(2)]))
"""


def items(batches: list[list[list[int]]]) -> list[int]:
    return sorted(first for _, rows in batches for first in rows if first)


@pytest.mark.slow
def test_transformers_trains_and_resumes(tmp_path: Path) -> None:
    """Every row once per epoch, other orders, no NaN from rows of padding; exact after a stop."""
    pytest.importorskip("transformers")
    printed = output_of(ROWS + TRANSFORMERS, str(tmp_path / "run"), folder=tmp_path)
    steps, seen, resumed, finite = json.loads(printed.splitlines()[-1])
    assert len(seen) == 2 * steps
    first, second = seen[:steps], seen[steps:]
    assert items(first) == items(second) == list(range(1, 71))
    assert first != second
    assert {tuple(shape) for shape, _ in seen} <= {(16, 8), (8, 16), (4, 32)}
    assert resumed == seen[20:]
    assert finite


@pytest.mark.slow
def test_accelerate_deals_the_batches_of_all_ranks_out(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks = json.loads(output_of(ROWS + ACCELERATE, folder=tmp_path).splitlines()[-1])
    for epoch in range(2):
        one, other = (rank[epoch] for rank in ranks)
        assert [shape for shape, _ in one] == [shape for shape, _ in other]
        assert set(items(one)) | set(items(other)) == set(range(1, 71))
    assert ranks[0][0] != ranks[0][1]
