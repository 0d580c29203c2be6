"""equivalence/: a run leaves no trace, and two runs are compared by one table of tolerances."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from torchguard.equivalence.compare import COMPILING, PADDING, PYTHON, judge
from torchguard.equivalence.copies import run_on_copies as run
from torchguard.equivalence.copies import why_not_copied
from torchguard.equivalence.outcome import (
    Cotangents,
    Given,
    Gradient,
    Outcome,
    Output,
    run_undoing_mutations,
)
from torchguard.equivalence.perturb import not_by_rounding, perturb_

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def undone(function: Callable[..., Any], *leaves: Any, **options: Any) -> Outcome:
    """Run a function that returns one tensor and takes its leaves as they are."""
    sources = {
        place: leaf.detach().requires_grad_()
        for place, leaf in enumerate(leaves)
        if leaf.requires_grad and torch.is_grad_enabled()
    }
    given = [sources.get(place, leaf) for place, leaf in enumerate(leaves)]
    return run_undoing_mutations(
        function,
        Given(given, given, {}, sources),
        Cotangents(names=dict(enumerate("abc")), **options),
        read=lambda output: (None, [Output(output)]),
    )


# --- isolation


def draw() -> list[float]:
    """Draw from each of the global generators."""
    return [
        torch.rand(()).item(),
        random.random(),  # noqa: S311
        float(np.random.rand()),  # noqa: NPY002
    ]


def test_random_states_of_torch_python_and_numpy_are_restored() -> None:
    """Two runs draw the same numbers, and the program draws them again."""
    first = []

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        first.append(draw())
        return [x + 1]

    run(function, [torch.ones(2)])
    run(function, [torch.ones(2)])
    undone(lambda x: function(x)[0], torch.ones(2))
    assert first[0] == first[1] == draw()
    assert first[2][1:] == first[0][1:]  # torch's own operators are deterministic there


def test_autocast_neither_keeps_casts_nor_takes_kept_ones() -> None:
    """A weight that autocast has cast before would hide that it was perturbed."""
    seen = []

    def project(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        assert not torch.is_autocast_cache_enabled()
        seen.append(weakref.ref(weight))
        return [nn.functional.linear(x, weight)]

    with torch.autocast("cpu", torch.bfloat16):
        run(project, [torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)])
        assert torch.is_autocast_cache_enabled()
    gc.collect()
    assert [copied() for copied in seen] == [None]


def test_modes_that_a_graph_leaves_switched_are_restored() -> None:
    """A graph that raises in an autocast region has no node left that ends it."""

    def function(_: torch.Tensor) -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        raise RuntimeError

    before = torch.get_autocast_dtype("cpu")
    assert run(function, [torch.ones(2)]).error is not None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == before


def test_modules_are_as_they_were() -> None:
    """Buffers, attributes, hooks in their order and gradients; what was written is reported."""
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    assert mean is not None
    handles = [norm.register_forward_hook(lambda *_: None) for _ in range(3)]

    def function(x: torch.Tensor) -> torch.Tensor:
        handles[0].remove()
        norm.register_forward_hook(lambda *_: None)
        setattr(norm, "seen", True)  # noqa: B010
        norm(x).sum().backward()
        result: torch.Tensor = norm(x)
        return result

    outcome = undone(function, torch.randn(4, 3), modules=[norm])
    assert not hasattr(norm, "seen")
    assert list(norm._forward_hooks) == [each.id for each in handles]
    assert norm.weight.grad is None
    assert norm.running_mean is mean
    assert mean.tolist() == [0, 0, 0]
    assert set(outcome.buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert outcome.buffers["num_batches_tracked"].after == 2


def test_what_a_run_writes_to_an_input_is_undone_and_reported() -> None:
    """The version counter goes back too; of a run on copies the outcome has them after the run."""
    x = torch.zeros(2)
    version = x._version
    outcome = run(lambda a, b, _: [a.add_(1) + b], [x, torch.zeros(2), 3])
    assert outcome.mutated == {0}
    assert outcome.inputs[0].tolist() == [1, 1]
    assert undone(lambda a, _: a.add_(1), x, torch.zeros(2)).mutated == {0}
    owned = run(lambda b: [x.add_(b)], [torch.ones(2)], [x])  # as a graph owns its parameters
    assert owned.inputs[0].tolist() == [1, 1]
    assert (x.tolist(), x._version) == ([0, 0], version)
    assert run(lambda x: [x + 1], [x]).mutated == frozenset()
    with torch.inference_mode():  # there it has no version counter that could tell
        assert run(lambda x: [x + 1], [torch.ones(2)]).mutated == {0}


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # It has no base that could be copied.
        (
            lambda: torch.view_as_real(torch.ones(2, requires_grad=True) * (1 + 1j)),
            "input 1 is a differentiable view of another dtype",
        ),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.ones(2, device="meta"), "on the meta device"),
    ],
    ids=["view", "sparse", "meta"],
)
def test_what_can_not_be_copied_is_named_before_it_is_tried(
    make: Callable[[], torch.Tensor], reason: str
) -> None:
    x = torch.ones(2)
    found = why_not_copied([x, make()])
    assert found is not None
    assert found.startswith("input 1 is ")
    assert reason in found
    values = [x, x.detach().view(torch.int32)]
    assert why_not_copied(values) is None
    assert why_not_copied(values, _widened) == "input 1 shares a storage with one of another dtype"


# --- comparing


def test_compiling_has_the_tolerances_of_assert_close() -> None:
    """https://pytorch.org/docs/stable/testing.html"""
    for dtype in (*FLOATS, torch.complex32, torch.complex64, torch.complex128):
        relative, absolute = torch.testing._comparison.default_tolerances(dtype)
        assert COMPILING.tolerance(dtype)[:2] == (relative, absolute)


def of(*outputs: Any, **gradients: Any) -> Outcome:
    """Make an outcome with these outputs, and with gradients of the parameters named."""
    outcome = Outcome(outputs=[torch.as_tensor(value) for value in outputs])
    for name, value in gradients.items():
        outcome.gradients[name] = Gradient(torch.tensor([value]), name)
    return outcome


def double(value: float) -> Outcome:
    return of(torch.tensor(value, dtype=torch.float64))


UNITS = (1e-12, 1e-6, 1e-4, 1.0, 1e4, 1e12)
NUMBERS = torch.tensor([1.0, -0.5, 0.25, 1e-7])
ROUNDED = NUMBERS + torch.tensor([4e-7, 2e-7, 1e-7, 3e-8])  # the last by a third of itself


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("policy", [COMPILING, PADDING])
def test_what_differs_follows_the_tensor_in_any_unit(policy: Any, unit: float) -> None:
    """Gradients have the unit of the loss: the verdict is the same in each."""

    def gradient(numbers: torch.Tensor) -> Outcome:
        return Outcome(gradients={"weight": Gradient(numbers * unit, "weight")})

    def equal(numbers: torch.Tensor) -> bool:
        return not judge(gradient(NUMBERS), gradient(numbers), policy, lambda: None)

    small = judge(gradient(NUMBERS), gradient(ROUNDED), policy)
    assert [each.small for each in small] == [True] * (policy is PADDING)
    assert not equal(NUMBERS * 1.1)
    assert not equal(NUMBERS.roll(1))
    assert not equal(torch.zeros(4))
    assert not equal(NUMBERS + torch.tensor([0.0, 0.0, 0.0, 1e-3]))
    zeros = gradient(torch.zeros(4))
    assert not judge(zeros, zeros, policy)
    assert judge(zeros, gradient(NUMBERS), policy)


@pytest.mark.parametrize("unit", UNITS[:4])
@pytest.mark.parametrize("policy", [COMPILING, PADDING])
def test_outputs_and_buffers_that_are_small_are_compared(policy: Any, unit: float) -> None:
    assert all(each.small for each in judge(of(NUMBERS * unit), of(ROUNDED * unit), policy))
    assert judge(of(NUMBERS * unit), of(NUMBERS * unit * 1.1), policy)
    assert judge(of(NUMBERS * unit), of(torch.zeros(4)), policy)


def test_a_gradient_that_is_zero_by_algebra_is_noise() -> None:
    """A bias in front of a BatchNorm. In double precision it is zero too, and eager is far off."""

    def judged(noise: float, other: float, exact: float = 1e-17, *perturbed: float) -> bool:
        true = Outcome(gradients={
            "weight": Gradient(torch.ones(1, dtype=torch.float64)),
            "bias": Gradient(torch.full((1,), exact, dtype=torch.float64)),
        })  # fmt: skip
        one, two = of(weight=1.0, bias=noise), of(weight=1.0, bias=other)
        found = judge(one, two, COMPILING, lambda: true)
        if not perturbed or not all(each.small for each in found):
            return not found
        runs = dict(enumerate(perturbed))
        return not not_by_rounding(found, one, two, lambda seed: of(bias=runs.get(seed, noise)))

    assert judged(5e-8, -3e-7)
    assert not judged(5e-8, 1e-3)
    assert not judged(0.5, 0.6)
    # Where it is not, four times as far as eager, or as far as another run of eager comes.
    assert judged(5e-8, -1.8e-7, 1e-9)
    assert not judged(5e-8, -3e-7, 1e-9)
    assert judged(5e-8, -3e-7, 1e-9, 4e-8, -2e-7)
    assert not judged(5e-8, -3e-7, 1e-9, 4e-8, 6e-8)
    assert not judged(1e-9, -1e-9, 1e-9, 1e-9 * (1 + 1e-6))


@pytest.mark.parametrize("policy", [COMPILING, PADDING])
@pytest.mark.parametrize("share", [1e-7, 1e-9, 1e-12, 1e-20])
def test_a_gradient_is_compared_however_small_beside_anothers(policy: Any, share: float) -> None:
    """Only where eager with perturbed inputs comes as far it is noise."""
    right = of(weight=1.0, bias=share)
    exact = Outcome(gradients={
        name: Gradient(torch.tensor([value], dtype=torch.float64), name)
        for name, value in (("weight", 1.0), ("bias", share))
    })  # fmt: skip
    for wrong in (-share, 0.0, 1.1 * share, 30 * share):
        other = of(weight=1.0, bias=wrong)
        found = judge(right, other, policy, lambda: exact)
        assert [each.key for each in found] == ["bias"]
        assert not_by_rounding(found, right, other, lambda _: of(bias=share * (1 + 1e-6))) != []
    assert not judge(right, of(weight=1.0, bias=share * (1 + 5e-7)), policy, lambda: exact)


def written(before: Any, expected: Any, actual: Any, writes: int = 1) -> list[Outcome]:
    tensors = [torch.as_tensor(value) for value in (before, expected, actual)]
    return [Outcome(inputs=[each], before=[tensors[0]], writes={0: writes}) for each in tensors[1:]]


WEIGHT = torch.linspace(-1, 1, 64).add(0.05)
STEP = 1e-6 * torch.linspace(1, 2, 64).cos()


@pytest.mark.parametrize(
    ("before", "expected", "actual", "equal"),
    [
        (WEIGHT, WEIGHT - STEP, WEIGHT, False),
        (WEIGHT, WEIGHT - STEP, WEIGHT + STEP, False),
        (WEIGHT, WEIGHT - STEP, (WEIGHT.double() - STEP.double()).float(), True),
        (1e6, 1e6 + 1, 1e6, False),
        (torch.zeros(3), torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 3 + 3e-6]), True),
        # What eager has not written stays to the bit.
        (WEIGHT, WEIGHT, WEIGHT * (1 + 2.0**-23), False),
        # A digit of the parameter, for which one rounding is not enough.
        (1.0, 1 + 2.0**-23, 1 + 2.0**-22, True),
        (1.0, 1 + 2.0**-23, 1 + 3 * 2.0**-23, False),
    ],
)
def test_what_was_written_is_compared_not_what_it_was_added_to(
    before: Any, expected: Any, actual: Any, *, equal: bool
) -> None:
    reference, candidate = written(before, expected, actual)
    assert bool(judge(reference, candidate, COMPILING)) is not equal


def test_a_sentinel_excuses_no_other_element() -> None:
    """Nor does eager's own error there: -1e9 and a score are off by 32."""
    exact = torch.tensor([-1e9 + 20, 0.3, 0.2, -1e9 + 10], dtype=torch.float64)
    eager = exact.float()
    wrong, right = (eager + torch.tensor([32.0, by, 0.0, 0.0]) for by in (0.15, 1e-7))
    assert judge(of(eager), of(wrong), COMPILING, lambda: of(exact))
    assert judge(of(eager), of(wrong), PADDING)
    assert judge(of(eager), of(wrong), PYTHON)
    assert not judge(of(eager), of(right), COMPILING, lambda: of(exact))


LARGE = torch.tensor([1000.0, 1e-3])
DIGITS = torch.tensor([1.0, 1.25, 1.5]).to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("policy", "reference", "other", "exact", "equal"),
    [
        # A sum over a padded length rounds as its largest term does, if eager shows it.
        (PADDING, of(LARGE), of(LARGE + torch.tensor([0.04, 0.0])), None, True),
        (PADDING, of(LARGE), of(LARGE + torch.tensor([0.06, 0.0])), None, False),
        (PADDING, of(LARGE), of(LARGE + 0.04), None, False),
        (COMPILING, of(LARGE), of(LARGE + 0.04), None, False),
        # In a row or a column, and beside a sentinel.
        (PADDING, of([[1e6, 0.3]]), of([[1e6 + 30, 0.45]]), None, False),
        (PADDING, of([[1e6, 0.3], [1e6, 1.0]]), of([[1e6 + 30, 0.3], [1e6, 1.1]]), None, False),
        (PADDING, of([[1e6, 0.3], [1e6, 1.0]]), of([[1e6 + 30, 0.3], [1e6, 1.0]]), None, True),
        (PADDING, of([-1e9, 0.3]), of([-1e9, 0.45]), None, False),
        # No gradient and a gradient of zeros are equal.
        (PADDING, of(weight=0.0), of(), None, True),
        (PADDING, of(weight=1.0), of(), None, False),
        (PADDING, of(), of(weight=1.0), None, False),
        # Beyond 2 ** 53 both are one number in double precision.
        (PADDING, of(2**60), of(2**60 + 1), None, False),
        # A value of 8 bits may be off by its last digit.
        (COMPILING, of(DIGITS[0]), of(DIGITS[1]), None, True),
        (COMPILING, of(DIGITS[0]), of(DIGITS[2]), None, False),
        # A result may be four times as far from the exact one as eager is.
        (COMPILING, of(1.0 + 1e-4), of(1.0 + 3e-4), double(1.0), True),
        (COMPILING, of(1.0 + 1e-4), of(1.0 + 1e-3), double(1.0), False),
        # What is far from eager too has computed something else: it excuses nothing.
        (COMPILING, of(1.0), of(1.01), double(1.004), True),
        (COMPILING, of(1.0), of(1.01), double(2.0), False),
        # What is not finite has to stand in the same places.
        *(
            (policy, of([right, 1.0]), of([wrong, 1.0 + 1e-4]), of([right, 1.0]), False)
            for policy in (COMPILING, PADDING)
            for right, wrong in (
                (math.inf, -math.inf), (math.nan, 0.0), (math.inf, 1.0), (1.0, math.nan),
            )
        ),
        (COMPILING, of([math.inf, math.nan]), of([math.inf, math.nan]), None, True),
    ],
)  # fmt: skip
def test_what_is_equal(
    policy: Any, reference: Outcome, other: Outcome, exact: Outcome | None, *, equal: bool
) -> None:
    assert bool(judge(reference, other, policy, lambda: exact)) is not equal
    assert not judge(reference, reference, policy, lambda: exact)


def test_what_is_reported() -> None:
    """Gradients too if a discontinuity may explain an output; none of a leaf the run has made."""
    for value in (math.nan, math.inf, 7.0):
        found, *more = judge(of(1.0, weight=1.0), of(value, weight=2.0), COMPILING)
        assert (found.part, found.key, found.kind) == ("outputs", 0, "numbers")
        assert found.finite is math.isfinite(value)
        assert [each.part for each in more] == ["gradients"] * found.finite
        (found,) = judge(of(1.0, weight=1.0), of(value, weight=2.0), PADDING)
    made = Outcome(gradients={("leaf", 1): Gradient(torch.ones(2), known=False)})
    assert not judge(made, Outcome(gradients={}), PADDING)


# --- other last digits, and nothing but these


def nudged(values: torch.Tensor, seed: int = 1) -> torch.Tensor:
    copy = values.clone()
    perturb_(copy, seed)
    return copy


@given(
    dtype=st.sampled_from(FLOATS),
    numbers=st.lists(st.floats(allow_nan=True), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
@example(dtype=torch.float32, numbers=[*(4 * [torch.finfo(torch.float32).max]), -math.inf], seed=1)
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


def test_many_values_move_and_what_has_no_digits_to_change_stays() -> None:
    for dtype in FLOATS:
        values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
        assert (nudged(values) != values).float().mean() > 0.4
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        values = torch.ones(8).to(dtype)
        assert torch.equal(nudged(values).float(), values.float())


def test_under_autocast_the_digits_are_those_that_autocast_keeps() -> None:
    values = torch.ones(1000)
    assert (nudged(values).bfloat16() == 1).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert (nudged(values).bfloat16() != 1).any()
