"""perturb_: other last digits, and nothing but these."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchguard.equivalence.perturb import can_be_perturbed, perturb_

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def nudged(values: torch.Tensor, seed: int = 1) -> torch.Tensor:
    copy = values.clone()
    perturb_(copy, seed)
    return copy


@given(
    dtype=st.sampled_from(FLOATS),
    numbers=st.lists(st.floats(allow_nan=True), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_no_value_moves_further_than_rounding_does(
    dtype: torch.dtype, numbers: list[float], seed: int
) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    other = nudged(values, seed)
    assert other.dtype == dtype
    assert torch.equal(other.isfinite(), values.isfinite())
    odd = ~values.isfinite() | (values == 0)
    assert torch.equal(other[odd].nan_to_num(nan=7.0), values[odd].nan_to_num(nan=7.0))
    details = torch.finfo(dtype)
    relative = details.eps * (1 if details.bits == 16 else 32)
    # One rounding more; below the normal numbers it is as large as their smallest step.
    allowed = values.double().abs() * (relative + details.eps) + details.smallest_normal
    assert bool(((other.double() - values.double()).abs() <= allowed)[~odd].all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_values_move_and_each_seed_moves_them_otherwise(dtype: torch.dtype) -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    assert (nudged(values) != values).float().mean() > 0.4
    assert torch.equal(nudged(values, 1), nudged(values, 1))
    assert not torch.equal(nudged(values, 1), nudged(values, 2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_what_has_no_digits_to_change_stays(dtype: torch.dtype) -> None:
    values = torch.ones(8).to(dtype)
    assert not can_be_perturbed(values)
    assert torch.equal(nudged(values).float(), values.float())


def test_both_parts_of_a_complex_number_move() -> None:
    values = torch.complex(torch.ones(100), torch.ones(100))
    moved = torch.view_as_real(nudged(values)) != 1
    assert moved.any(0).tolist() == [True, True]


def test_the_largest_numbers_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, math.inf, -math.inf]).repeat(50)
    assert torch.equal(nudged(values).isfinite(), values.isfinite())


def test_under_autocast_the_digits_are_those_that_autocast_keeps() -> None:
    values = torch.ones(1000)
    assert (nudged(values).bfloat16() == 1).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert (nudged(values).bfloat16() != 1).any()
