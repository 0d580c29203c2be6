"""Two dims at once: batch x length, height x width have a few shapes, and not K1 x K2."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from support.bucketed import Counting, Noting, double, same_gradients, wrap
from torchguard import (
    BucketCollator,
    Buckets,
    PaddedPair,
    PaddingLeakError,
    PairBuckets,
    no_recompile,
    pad_to_bucket,
    unpad,
)
from torchguard.bucketing.decorator.ladders import Ladder
from torchguard.errors import RecompileError

PAIRS = PairBuckets([(8, 16), (4, 32), (2, 64)])
SHAPES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5)
UNCHECKED: Any = {"check_padding": "never", "outputs": {0: "b", 1: "t"}}


def paired(function: Any, **options: Any) -> Any:
    """Return it bucketed in batch and length."""
    return wrap(function, **{"dims": {"x": {0: "b", 1: "t"}}, "buckets": PAIRS, **options})


def cheapest(shapes: list[tuple[int, int]], a: int, b: int) -> tuple[int, int] | None:
    """Return what look-up has to find, by trying all shapes."""
    fitting = [(x * y, x, y) for x, y in shapes if a <= x and b <= y]
    return min(fitting)[1:] if fitting else None


@settings(deadline=None, max_examples=60)
@given(shapes=SHAPES, arriving=SHAPES)
def test_each_call_takes_the_cheapest_shape_that_holds_both(
    shapes: list[tuple[int, int]], arriving: list[tuple[int, int]]
) -> None:
    """Against brute force, outputs against the plain function, sizes above as an error."""
    noting = Noting()
    wrapped = paired(noting, buckets=PairBuckets(shapes), **UNCHECKED)
    for a, b in arriving:
        x = torch.randn(a, b)
        wanted = cheapest(shapes, a, b)
        if wanted is None:
            with pytest.raises(ValueError, match=f"axes 'b' and 't' are {a} and {b} \\(in x\\)"):
                wrapped(x)
            continue
        assert torch.equal(wrapped(x), 2 * x)
        assert noting.shapes[-1] == wanted
    assert set(wrapped.stats().hits) <= set(shapes)


@settings(deadline=None, max_examples=200)
@given(shapes=SHAPES, a=st.integers(1, 12), b=st.integers(1, 12))
def test_the_least_size_of_a_bucket_is_the_smallest_that_gets_it(
    shapes: list[tuple[int, int]], a: int, b: int
) -> None:
    """The check cuts inputs no shorter than what their bucket can be entered with."""
    ladder = Ladder(("b", "t"), PairBuckets(shapes), growing=False)
    bucket = cheapest(shapes, a, b)
    if bucket is None:
        return
    sizes = {"b": a, "t": b}
    assert ladder.least("b", sizes) == min(
        n for n in range(1, a + 1) if cheapest(shapes, n, b) == bucket
    )
    assert ladder.least("t", sizes) == min(
        n for n in range(1, b + 1) if cheapest(shapes, a, n) == bucket
    )


def test_three_pairs_are_three_static_graphs(backend: Counting) -> None:
    """And warming up proves and compiles those three, not the product of the sizes."""
    wrapped = paired(double, compile={"backend": backend})
    wrapped.warmup(torch.ones(1, 5))
    assert sorted(backend.graphs) == [[(2, 64)], [(4, 32)], [(8, 16)]]
    assert sorted(wrapped.stats().proven) == [(2, 64), (4, 32), (8, 16)]
    with no_recompile():
        for a, b in ((1, 3), (7, 9), (3, 20), (2, 33), (1, 64), (8, 16)):
            x = torch.randn(a, b)
            assert torch.equal(wrapped(x), 2 * x)
    stats = wrapped.stats()
    assert stats.graphs == 3
    assert stats.hits == {(2, 64): 3, (4, 32): 1, (8, 16): 2}
    assert stats.axes == ("b", "t")
    wide = Buckets.fit_pairs({sizes: n for sizes, n in stats.seen.items() if sizes[0] > 2}, 3)
    assert wide.shapes == ((3, 20), (7, 9), (8, 16))


def test_no_recompile_names_a_pair_that_is_not_compiled() -> None:
    wrapped = paired(double, compile={"backend": "eager"})
    with no_recompile(), pytest.raises(RecompileError, match="b: 3 -> 4 in x, t: 17 -> 32 in x"):
        wrapped(torch.ones(3, 17))


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Over all that is real: rows that pad the batch must not count."""
    real = mask[..., None]
    return (x * real).sum((0, 1)) / real.sum()


@pytest.mark.parametrize("buckets", [PAIRS, {"b": [8], "t": [16, 64]}], ids=["pair", "apart"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_masks_have_the_rows_of_the_padded_batch(buckets: Any, side: Any) -> None:
    """Made where the caller gives none, extended where he does; padded rows are not real."""
    wrapped = paired(masked_mean, buckets=buckets, mask={"mask": ("t", "real")}, side=side)
    x = torch.randn(3, 11, 2, requires_grad=True)
    torch.testing.assert_close(wrapped(x), x.mean((0, 1)))
    mask = torch.rand(3, 11) < 0.7
    found, expected = wrapped(x, mask), masked_mean(x, mask)
    torch.testing.assert_close(found, expected)
    same_gradients(found.sum(), expected.sum(), [x])


def test_a_mask_for_every_row_is_not_extended() -> None:
    """One of (1, 1, T) broadcasts over the batch."""
    wrapped = paired(lambda x, mask: torch.where(mask[0], x, 0), mask={"mask": ("t", "real")})
    x, mask = torch.randn(3, 5), torch.ones(1, 1, 5, dtype=torch.bool)
    assert torch.equal(wrapped(x, mask), x)


@pytest.mark.parametrize(
    "dims", [("b", "t"), {0: "b", 1: "t"}, {-2: "b", -1: "t"}, {0: ("b", "t")}]
)
def test_a_given_mask_has_the_batch_of_dims_in_each_form(dims: Any) -> None:
    x = torch.ones(3, 5)
    ids = [x] if dims == {0: ("b", "t")} else x
    wrapped = wrap(
        lambda ids, m: (ids if isinstance(ids, torch.Tensor) else ids[0]) * m,
        dims={"ids": dims},
        buckets={"b": [4], "t": [8]},
        mask={"m": ("t", "real")},
    )
    assert torch.equal(wrapped(ids, x), x)


def test_a_given_mask_has_the_batch_of_what_dims_names_first() -> None:
    """Not of what the call gives first: positions (T,) have no batch."""
    wrapped = wrap(
        lambda positions, x, m: (positions + x) * m,
        dims={"x": {0: "b", 1: "t"}, "positions": {0: "t"}},
        buckets={"b": [4], "t": [8]},
        mask={"m": ("t", "real")},
    )
    x, mask = torch.ones(3, 5), torch.rand(3, 5) < 0.7
    assert torch.equal(wrapped(torch.arange(5), x, mask), (torch.arange(5) + x) * mask)


def test_padding_of_the_batch_that_leaks_is_refused() -> None:
    wrapped = paired(lambda x: x - x.mean(0, keepdim=True))
    with pytest.raises(PaddingLeakError, match=r"b: 3 -> 4 in x, t: 32 -> 32 in x"):
        wrapped(torch.randn(3, 32))


@pytest.mark.parametrize(
    ("dims", "buckets", "message"),
    [
        ({0: "b"}, PAIRS, "buckets are pairs, but dims names 'b': pass Buckets, or name the other"),
        ({0: "a", 1: "b", 2: "c"}, PAIRS, "buckets are pairs, but dims names .*say which two"),
        ({0: "b", 1: "t"}, {"t": PAIRS, "b": [4]}, "buckets of 't' are for 2 axes: name both"),
        ({0: "b", 1: "t"}, {("b", "t"): Buckets([4])}, "buckets of 'b', 't' are for 1 axes"),
        ({0: "b", 1: "t"}, {("b", "u"): PAIRS}, "buckets names 'u', but dims has b, t"),
        ({0: "b", 1: "t"}, {("b", "t"): PAIRS, "t": [4]}, "buckets has 't' twice"),
        ({0: "b", 1: "t"}, {("b", "b"): PAIRS}, "buckets has 'b' twice"),
        ({0: "a", 1: "b", 2: "c"}, {("a", "b"): PAIRS}, "no buckets for 'c'"),
    ],
)
def test_pairs_that_do_not_fit_the_dims_are_refused(dims: Any, buckets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"bucketed: {message}"):
        paired(double, dims={"x": dims}, buckets=buckets)
    if "names 'u'" not in message:
        with pytest.raises(ValueError, match=f"BucketCollator: {message}"):
            BucketCollator(buckets, {"x": dims})


def test_a_call_without_one_of_the_two_dims_is_refused() -> None:
    wrapped = paired(lambda x, y=None: x, dims={"x": {0: "b"}, "y": {0: "t"}})
    with pytest.raises(ValueError, match="no argument of the call has axis 't'"):
        wrapped(torch.ones(3))


def test_pairs_and_a_ladder_go_side_by_side() -> None:
    noting = Noting()
    wrapped = paired(
        noting,
        dims=({0: "c", 1: "h", 2: "w"},),
        buckets={("h", "w"): [(8, 16), (16, 8)], "c": [3, 4]},
        check_padding="never",
        outputs={0: "c", 1: "h", 2: "w"},
    )
    assert wrapped(torch.ones(2, 5, 12)).shape == (2, 5, 12)
    assert wrapped(torch.ones(4, 9, 2)).shape == (4, 9, 2)
    assert noting.shapes == [(3, 8, 16), (4, 16, 8)]
    assert wrapped.stats().seen == {(2, 5, 12): 1, (4, 9, 2): 1}


@pytest.mark.parametrize(
    ("overflow", "shape"), [("grow", (8, 128)), ("eager", (5, 70)), ("dynamic", (5, 70))]
)
def test_sizes_that_no_pair_holds(overflow: Any, shape: tuple[int, int]) -> None:
    """A new pair has sizes of the others where they suffice, and twice the largest elsewhere."""
    noting = Noting()
    wrapped = paired(noting, overflow=overflow, **UNCHECKED)
    x = torch.randn(5, 70)
    assert torch.equal(wrapped(x), 2 * x)
    wrapped(torch.ones(6, 16))  # what was there is still the cheapest
    assert noting.shapes == [shape, (8, 16)]


def test_automatic_pairs_are_fitted_once() -> None:
    noting = Noting()
    wrapped = paired(noting, buckets={("b", "t"): "auto"}, **UNCHECKED)
    for a, b in [(3, 40), (20, 6)] * 20:
        assert wrapped(torch.ones(a, b)).shape == (a, b)
    assert noting.shapes[:2] == [(4, 64), (32, 8)]
    assert noting.shapes[-2:] == [(3, 40), (20, 6)]
    wrapped(torch.ones(4, 50))  # larger than any so far: the coarse bucket that has run
    wrapped(torch.ones(40, 70))
    assert noting.shapes[-2:] == [(4, 64), (64, 128)]


def test_a_plan_keeps_pairs(tmp_path: Path) -> None:
    wrapped = paired(double)
    wrapped.save_plan(tmp_path / "plan.json")
    again = paired(double, buckets=None, plan=tmp_path / "plan.json")
    again(torch.ones(3, 20))
    assert again.stats().hits == {(4, 32): 1}


# ---- pad_to_bucket, BucketCollator ----


@settings(deadline=None, max_examples=60)
@given(a=st.integers(0, 8), b=st.integers(0, 16), side=st.sampled_from(["left", "right"]))
def test_padding_two_dims_equals_torch_pad(a: int, b: int, side: Any) -> None:
    try:  # torch 2.6 pads nothing that is empty in another dim
        nn.functional.pad(torch.zeros(a, 3, b), (0, 0, 0, 0, 0, 1))
    except RuntimeError:
        assume(False)
    x = torch.randn(a, 3, b)
    padded, lengths = pad_to_bucket(x, (0, -1), PAIRS, value=7, side=side)
    rows, columns = PAIRS.bucket_for(a, b)
    own = [columns - b, rows - a]
    pads = [n for missing in own for n in ((missing, 0) if side == "left" else (0, missing))]
    pads = [*pads[:2], 0, 0, *pads[2:]]
    assert torch.equal(padded, nn.functional.pad(x, pads, value=7))
    assert lengths == (a, b)
    assert torch.equal(unpad(padded, (0, -1), lengths, side), x)


def test_a_padded_pair_has_gradients_buffers_and_is_compiled() -> None:
    x = torch.randn(3, 20, requires_grad=True)
    padded = pad_to_bucket(x, (0, 1), PAIRS)
    assert isinstance(padded, PaddedPair)
    padded.tensor.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 20))  # type: ignore[arg-type]
    buffer = torch.full((4, 32), 9.0)
    into = pad_to_bucket(x.detach(), (0, 1), PAIRS, out=buffer)
    assert into.tensor is buffer
    assert torch.equal(buffer, padded.tensor)
    full = torch.ones(4, 32)
    assert pad_to_bucket(full, (0, 1), PAIRS).tensor is full

    def inside(x: torch.Tensor) -> torch.Tensor:
        return pad_to_bucket(x, (0, 1), PAIRS).tensor * 2

    compiled = torch.compile(inside, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x.detach()), 2 * padded.tensor)


@pytest.mark.parametrize(
    ("dim", "buckets", "error", "message"),
    [
        (0, PAIRS, TypeError, "expected two dims, such as"),
        ((0, 1), Buckets([8]), TypeError, "expected two dims, such as"),
        ((0, 1, 0), PAIRS, TypeError, "expected two dims, such as"),
        ((0, -2), PAIRS, ValueError, "the same dimension twice"),
        ((0, 2), PAIRS, IndexError, "dim is 2"),
    ],
)
def test_bad_pairs_of_dims_are_named(
    dim: Any, buckets: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pad_to_bucket(torch.ones(3, 5), dim, buckets)
    with pytest.raises(TypeError, match="expected two of either or one"):
        unpad(torch.ones(3, 5), (0, 1), 2)


def test_the_collator_pads_batch_and_length_together() -> None:
    """The masks of rows that pad the batch say that nothing is real; and it can be pickled."""
    samples = [{"ids": torch.arange(1, n + 1), "labels": torch.ones(n)} for n in (9, 20, 3)]
    collate = BucketCollator(
        PAIRS,
        {"ids": {0: "b", 1: "t"}, "labels": {0: "b", 1: "t"}},
        fill={"labels": -100},
        mask_key={"t": "mask"},
        length_key="real",
    )
    batch = pickle.loads(pickle.dumps(collate))(samples)  # noqa: S301 - our own
    assert batch["ids"].shape == batch["mask"].shape == (4, 32)
    assert batch["mask"].sum(1).tolist() == [9, 20, 3, 0]
    assert batch["real"] == {"b": 3, "t": 20}
    assert (batch["labels"] == -100).sum() == 4 * 32 - 9 - 20 - 3
    with pytest.raises(ValueError, match="no bucket of"):
        collate(samples * 3)
