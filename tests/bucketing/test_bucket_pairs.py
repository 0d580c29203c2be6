"""Buckets.fit of pairs of sizes, and its plot."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchguard import Buckets, PairBuckets


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=7),
    st.integers(1, 3),
)
def test_pairs_find_the_optimum_of_small_cases(pairs: list[tuple[int, int]], count: int) -> None:
    def total(shapes: Any) -> float:
        return sum(
            min((a * b for a, b in shapes if x <= a and y <= b), default=math.inf) for x, y in pairs
        )

    grid = list(itertools.product({a for a, _ in pairs}, {b for _, b in pairs}))
    best = min(
        total(shapes)
        for number in range(1, count + 1)
        for shapes in itertools.combinations(grid, number)
    )
    assert total(Buckets.fit_pairs(pairs, count)) <= 1.05 * best


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 6))
def test_pairs_that_vary_in_one_size_get_its_ladder(sizes: list[int], count: int) -> None:
    pairs = [(7, size) for size in sizes]
    one = Buckets.fit(sizes, count).waste(sizes)
    assert Buckets.fit_pairs(pairs, count).waste(pairs) == pytest.approx(one)


@pytest.mark.parametrize(
    ("pairs", "count", "shapes"),
    [([(1, 1)] * 4 + [(2, 2), (2, 3), (5, 2)], 2, [(2, 3), (5, 2)]),
     ([(5, 4), (3, 3), (3, 5), (3, 2), (5, 4)], 2, [(3, 5), (5, 4)])],
)  # fmt: skip
def test_pairs_where_the_first_shapes_may_not_be_shrunk_first(
    pairs: list[tuple[int, int]], count: int, shapes: list[tuple[int, int]]
) -> None:
    assert Buckets.fit_pairs(pairs, count) == PairBuckets(shapes)


def test_pairs_look_up_the_cheapest_that_fits_not_the_first() -> None:
    shapes = PairBuckets([(10, 100), (50, 10), (100, 100)])
    assert shapes.bucket_for(9, 9) == (50, 10)
    assert shapes.bucket_for(10, 11) == (10, 100)
    assert shapes.bucket_for(11, 11) == (100, 100)
    assert PairBuckets(shapes, cost=lambda a, b: a).bucket_for(9, 9) == (10, 100)
    with pytest.raises(ValueError, match=r"holds \(101, 1\)"):
        shapes.bucket_for(101, 1)


def test_pairs_are_aligned_and_reach_the_maximum() -> None:
    pairs = [(3, 50), (50, 3), (20, 20)] * 5
    shapes = Buckets.fit_pairs(pairs, 3, multiple_of=(8, 16), maximum=(60, 70))
    assert (60, 70) in shapes
    assert all(shapes.bucket_for(a, b) for a, b in pairs)
    assert all(a % 8 == 0 and b % 16 == 0 for a, b in shapes if (a, b) != (60, 70))


def test_pairs_are_counted_by_numbers_of_numpy_too() -> None:
    assert Buckets.fit_pairs({(3, 4): np.int64(2)}) == Buckets.fit_pairs({(3, 4): 2})


@pytest.mark.parametrize(
    ("pairs", "error"),
    [([], ValueError), ([(1,)], TypeError), ([1, 2], TypeError), ([(0, 1)], ValueError),
     ([(1.5, 1)], TypeError), ([(True, 1)], TypeError), ("ab", TypeError), (3, TypeError)],
)  # fmt: skip
def test_bad_pairs_are_refused(pairs: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"fit_pairs: "):
        Buckets.fit_pairs(pairs)  # type: ignore[arg-type]


def test_plot_writes_a_picture(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"  # type: ignore[operator]
    pyplot = sys.modules.get("matplotlib.pyplot")  # another test may have imported it
    Buckets([64, 512]).plot([1, 30, 60, 70, 512], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sys.modules.get("matplotlib.pyplot") is pyplot
    Buckets([5]).plot([5], path)  # one size, no waste


def test_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"torchguard-runtime\[plot\]"):
        Buckets([64]).plot([1], "never.png")
