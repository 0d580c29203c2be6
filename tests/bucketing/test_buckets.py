"""Ladders: the planner finds the optimum, and an error names what is wrong with an input."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchguard import Buckets

COSTS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda size: size,
    "quadratic": lambda size: size * size,
}


def padded(ladder: Iterable[int], seen: Mapping[int, float], cost: Callable[[int], float]) -> float:
    return sum(times * cost(min(b for b in ladder if b >= size)) for size, times in seen.items())


def reference(seen: Mapping[int, float], count: int, cost: Callable[[Any], Any]) -> float:
    """The plain O(n^2 K) dynamic program over the sizes observed, at most n buckets."""
    sizes, weights = (np.array(column) for column in zip(*sorted(seen.items()), strict=True))
    below = np.append(0.0, weights.cumsum())
    best = np.append(0.0, np.full(len(sizes), math.inf))
    for _ in range(count):
        runs = best[:-1, None] + cost(sizes) * (below[1:] - below[:-1, None])
        runs[np.tril_indices(len(sizes), -1)] = math.inf
        best = np.append(0.0, runs.min(axis=0))
    # Fewer buckets never cost less, so exactly count (or one per size) is the best.
    return float(best[-1])


@given(
    seen=st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1, max_size=5),
    count=st.integers(1, 4),
    costs=st.lists(st.integers(1, 30), min_size=30, max_size=30),
    step=st.sampled_from([1, 2, 3, 8]),
    above=st.sampled_from([None, 0, 3]),
)
def test_the_ladder_is_the_best_of_all(
    seen: dict[int, int], count: int, costs: list[int], step: int, above: int | None
) -> None:
    """Of all there are: aligned sizes, and the largest there can be."""
    maximum = None if above is None else max(seen) + above
    cost = sorted(costs).__getitem__
    fitted = Buckets.fit(seen, count, multiple_of=step, maximum=maximum, cost=cost)
    top = maximum or -(-max(seen) // step) * step
    below = range(step, top, step)
    ladders = ((*each, top) for n in range(count) for each in itertools.combinations(below, n))
    assert fitted.sizes[-1] == top
    assert len(fitted) <= count
    assert set(fitted) <= {*below, top}
    assert padded(fitted, seen, cost) == min(padded(each, seen, cost) for each in ladders)


@pytest.mark.parametrize("shape", ["convex", "concave", "staircase", "random"])
def test_the_hull_is_right_where_it_is_large(shape: str) -> None:
    random = np.random.default_rng(3)
    sizes = np.arange(1, 1501)
    weights = {
        "convex": 1.0 / sizes**2,
        "concave": sizes.astype(float) ** 3,
        "staircase": np.where(sizes % 100 == 0, 1000.0, 1.0),
        "random": random.integers(1, 1000, 1500).astype(float),
    }[shape]
    seen = dict(zip(sizes.tolist(), weights.tolist(), strict=True))
    found = padded(Buckets.fit(seen, 8), seen, COSTS["linear"])
    assert found == pytest.approx(reference(seen, 8, COSTS["linear"]), rel=1e-12)


def test_weights_that_vanish_beside_others_are_no_trouble() -> None:
    seen = {1: 1e-30, 2: 1e-300, 50: 1e6, 60: 1e-12, 70: 1e-12, 100: 1e6, 120: 1e-200}
    with np.errstate(all="raise"):
        buckets = Buckets.fit(seen, 3)
    assert buckets.sizes[-1] == 120
    assert buckets.waste(seen) < 1e-9


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_batch_maxima_equal_the_average_over_all_batches(batch: int) -> None:
    sizes = [3, 5, 5, 8, 13]
    batches = list(itertools.combinations(sizes, batch))
    counted = Counter(max(each) for each in batches)
    scale = len(sizes) / batch / len(batches)
    expected = {size: times * scale for size, times in counted.items()}
    for count in (1, 2, 3):
        buckets = Buckets.fit(sizes, count, batch_size=batch)
        assert buckets == Buckets.fit(expected, count)
        assert buckets.waste([*sizes], batch_size=batch) == pytest.approx(buckets.waste(expected))


def test_waste_is_the_share_that_padding_adds() -> None:
    buckets = Buckets([4, 8])
    assert buckets.waste([3, 8]) == pytest.approx(12 / 11 - 1)
    assert buckets.waste([3, 8], "quadratic") == pytest.approx(80 / 73 - 1)
    assert buckets.waste({3: 1, 8: 1}, lambda size: size + 1) == pytest.approx(14 / 13 - 1)
    with pytest.raises(ValueError, match="a size is 9, but the largest bucket is 8"):
        buckets.waste([9])
    with pytest.raises(ValueError, match=r"Buckets.waste: batch_size is 3, expected at most 2"):
        buckets.waste([1, 2], batch_size=3)


def test_ladders_by_rule() -> None:
    assert Buckets.powers_of_two(16, 128).sizes == (16, 32, 64, 128)
    assert Buckets.powers_of_two(17, 100).sizes == (32, 64, 100)
    assert Buckets.powers_of_two(1, 1).sizes == (1,)
    assert Buckets(range(64, 257, 64)).sizes == (64, 128, 192, 256)


def test_looking_up() -> None:
    buckets = Buckets([512, 64, 128, 64])
    assert buckets.sizes == (64, 128, 512)
    assert [buckets.bucket_for(size) for size in (0, 1, 64, 65, 512)] == [64, 64, 64, 128, 512]
    numpy_size: Any = np.int32(65)
    assert buckets.bucket_for(numpy_size) == 128
    with pytest.raises(ValueError, match="size is 513, but the largest bucket is 512"):
        buckets.bucket_for(513)
    with pytest.raises(ValueError, match="size is -1"):
        buckets.bucket_for(-1)
    for wrong in (1.5, True, "64", math.nan, 0.0):
        with pytest.raises(TypeError, match="expected an integer"):
            buckets.bucket_for(wrong)  # type: ignore[arg-type]


def test_is_a_value() -> None:
    buckets = Buckets([64, 128])
    assert (list(buckets), len(buckets), 64 in buckets) == ([64, 128], 2, True)
    assert buckets == Buckets([128, 64]) != Buckets([64])
    assert {buckets, Buckets((64, 128))} == {buckets}
    assert repr(buckets) == "Buckets([64, 128])"
    assert eval(repr(buckets)) == buckets  # noqa: S307
    assert pickle.loads(pickle.dumps(buckets)) == copy.deepcopy(buckets) == buckets  # noqa: S301
    with pytest.raises(AttributeError):
        buckets.sizes = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    "sizes",
    [
        [10, 20, 20],
        np.array([10, 20, 20], dtype=np.uint8),
        torch.tensor([10, 20, 20]),
        [np.int64(10), 20, 20],
        [torch.tensor(10), torch.tensor(20), torch.tensor(20)],
        {10: 1, 20: 2.0, 30: 0},
        iter([10, 20, 20]),
    ],
    ids=lambda sizes: type(sizes).__name__,
)
def test_every_kind_of_sizes_means_the_same(sizes: object) -> None:
    assert Buckets.fit(sizes, 8).sizes == (10, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([], ValueError, "sizes is empty"),
        ([4, 0], ValueError, r"sizes\[1\] is 0, expected 1"),
        ([4, 2.0], TypeError, "dtype float64, expected integers"),
        ([[4, 5]], TypeError, r"sizes\[0\] is of type list"),
        ("64", TypeError, r"sizes\[0\] is of type str"),
        (64, TypeError, "sizes is of type int"),
        (np.array([True]), TypeError, "dtype bool"),
        ({5: -1}, ValueError, "size 5 was seen -1 times"),
    ],
)
def test_bad_sizes_are_named(sizes: Any, error: type[Exception], message: str) -> None:
    for call in (Buckets.fit, Buckets([64]).waste):
        with pytest.raises(error, match=message):
            call(sizes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"count": 0}, ValueError, "count is 0"),
        ({"maximum": 19}, ValueError, "maximum is 19, but a size of 20 was observed"),
        ({"multiple_of": 0}, ValueError, "multiple_of is 0"),
        ({"cost": "cubic"}, ValueError, "cost is 'cubic', expected 'linear'"),
        ({"cost": lambda size: "x"}, ValueError, r"cost\(10\) is 'x', expected a positive"),
        ({"cost": lambda size: -size + 30}, ValueError, r"cost\(20\) is less than cost\(10\)"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Buckets.fit([10, 20], **arguments)  # type: ignore[arg-type]


def test_a_size_is_looked_for_in_a_ladder_while_compiled_too() -> None:
    buckets = Buckets([4, 8])
    assert 8 in buckets
    assert 5 not in buckets

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] in buckets else x

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    assert [float(compiled(torch.zeros(size))[0]) for size in (8, 5)] == [1, 0]
