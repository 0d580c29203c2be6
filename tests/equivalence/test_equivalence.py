"""equivalence/: a run leaves no trace, and two runs are compared by one table of tolerances."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.compare import COMPILING, PADDING, close, judge
from torchguard.equivalence.copies import run_on_copies as run
from torchguard.equivalence.copies import why_not_copied
from torchguard.equivalence.isolate import isolated, run_undoing_mutations
from torchguard.equivalence.outcome import Given, Gradient, Outcome, Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
        read=lambda output: (None, [Output(output)]),
        names=dict(enumerate("abc")),
        **options,
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

    assert run(function, [torch.ones(2)]).random
    run(function, [torch.ones(2)])
    undone(lambda x: function(x)[0], torch.ones(2))
    assert first[0] == first[1] == draw()
    assert first[2][1:] == first[0][1:]  # torch's own operators are deterministic there


def test_a_run_that_draws_nothing_says_so() -> None:
    """Only torch's numbers count: eager and compiled code draw those."""
    assert not run(lambda x: [x * random.random()], [torch.ones(2)]).random  # noqa: S311


def test_autocast_neither_keeps_casts_nor_takes_kept_ones() -> None:
    """A weight that autocast has cast before would hide that it was perturbed."""
    with torch.autocast("cpu", torch.bfloat16), isolated():
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


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


def test_hooks_for_saved_tensors_are_not_called() -> None:
    """A caller that offloads saved tensors does not see those of a check."""
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(lambda value: [value.exp()], [x])
        undone(torch.exp, x)
        assert seen == []
        x.exp()
    assert len(seen) == 1


def test_modules_are_as_they_were() -> None:
    """Buffers, attributes, hooks and gradients; what was written is reported."""
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    assert mean is not None

    def function(x: torch.Tensor) -> torch.Tensor:
        norm.register_forward_hook(lambda *_: None)
        setattr(norm, "seen", True)  # noqa: B010
        norm(x).sum().backward()
        result: torch.Tensor = norm(x)
        return result

    outcome = undone(function, torch.randn(4, 3), modules=[norm])
    assert not hasattr(norm, "seen")
    assert not norm._forward_hooks
    assert norm.weight.grad is None
    assert norm.running_mean is mean
    assert mean.tolist() == [0, 0, 0]
    assert set(outcome.buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert outcome.buffers["num_batches_tracked"].after == 2


def test_a_run_on_copies_leaves_its_inputs_and_says_which_it_has_written() -> None:
    """The outcome holds the inputs as they were after the run."""
    x = torch.zeros(2)
    outcome = run(lambda a, b, _: [a.add_(1) + b], [x, torch.zeros(2), 3])
    assert outcome.mutated == {0}
    assert x.tolist() == [0, 0]
    assert outcome.inputs[0].tolist() == [1, 1]


def test_a_write_to_an_input_is_undone_and_reported() -> None:
    """The version counter goes back too, so that a later backward does not fail."""
    x = torch.zeros(2)
    version = x._version
    assert undone(lambda a, _: a.add_(1), x, torch.zeros(2)).mutated == {0}
    assert (x.tolist(), x._version) == ([0, 0], version)


def test_what_can_not_be_copied_is_named_before_it_is_tried() -> None:
    """A differentiable view of another dtype has no base that could be copied."""
    real = torch.view_as_real(torch.ones(2, requires_grad=True) * (1 + 1j))
    assert why_not_copied([real]) == "input 0 is a differentiable view of another dtype"
    x = torch.ones(2)
    values = [x, x.detach().view(torch.int32)]
    assert why_not_copied(values) is None
    widened = why_not_copied(
        values, lambda dtype: torch.float64 if dtype.is_floating_point else dtype
    )
    assert widened == "input 1 shares a storage with one of another dtype"


# --- comparing


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex32, torch.complex64, torch.complex128,
    ],
)  # fmt: skip
def test_compiling_has_the_tolerances_of_assert_close(dtype: torch.dtype) -> None:
    """https://pytorch.org/docs/stable/testing.html"""
    relative, absolute = torch.testing._comparison.default_tolerances(dtype)
    found = COMPILING.tolerance(dtype)
    assert (found.relative, found.absolute, found.of_largest) == (relative, absolute, 0)


def test_padding_is_measured_by_the_largest_value() -> None:
    """A sum over a padded length rounds as its largest term does, and no more than that."""
    expected = torch.tensor([1000.0, 1e-3])
    for off, equal in ((0.04, True), (0.06, False)):
        one, other = Outcome(outputs=[expected]), Outcome(outputs=[expected + off])
        verdict = judge(one, other, PADDING)
        assert verdict.equal is equal
        assert not judge(one, other, COMPILING).equal
    assert judge(one, one, PADDING).strain == 0


@given(
    numbers=st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=6),
    same=st.booleans(),
)
def test_close_is_isclose(numbers: list[tuple[float, float]], *, same: bool) -> None:
    """NaN is close to NaN alone, infinity to itself alone."""
    expected = torch.tensor([one for one, _ in numbers])
    actual = expected * (1 + 1e-6) if same else torch.tensor([other for _, other in numbers])
    wanted = torch.isclose(actual.double(), expected.double(), 1.3e-6, 1e-5, equal_nan=True)
    assert torch.equal(close(expected, actual), wanted)


@pytest.mark.parametrize("policy", [COMPILING, PADDING], ids=["compiling", "padding"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 7.0])
def test_one_value_that_is_off_is_a_difference(policy: Any, value: float) -> None:
    """In an output, a gradient and a buffer alike."""
    right, wrong = torch.ones(3), torch.tensor([1.0, value, 1.0])
    for part in ("outputs", "gradients"):
        one, other = (
            Outcome(outputs=[each]) if part == "outputs" else Outcome(gradients={0: Gradient(each)})
            for each in (right, wrong)
        )
        (found,) = judge(one, other, policy).differences
        assert (found.part, found.key, found.kind) == (part, 0, "numbers")
        assert found.finite is math.isfinite(value)


def test_a_gradient_that_only_one_run_has_is_compared_with_zeros() -> None:
    """Unless it is of a leaf that the run itself has made."""
    none = Outcome(gradients={})
    for known in (True, False):
        one = Outcome(gradients={("leaf", 1): Gradient(torch.ones(2), known=known)})
        assert judge(one, none, PADDING).equal is not known
        assert judge(none, one, PADDING).equal is not known
    zeros = Outcome(gradients={0: Gradient(torch.zeros(2))})
    assert judge(zeros, none, PADDING).equal


def test_a_large_integer_that_is_off_by_one_is_found() -> None:
    """Beyond 2 ** 53 both are one number in double precision."""
    large = torch.tensor([2**60])
    assert not judge(Outcome(outputs=[large]), Outcome(outputs=[large + 1]), PADDING).equal


# --- ranks


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    where = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("which", [True, None])
def test_every_rank_gets_the_largest(which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has NCCL for its GPUs and gloo for the CPU is asked on the CPU."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    with torch.inference_mode():
        assert largest_of_all_ranks(which, [-2, 5]) == [-2, 5]


# --- tolerances at their edges


def _returning(*values: Any, **gradients: float) -> Outcome:
    """Make an outcome with these outputs, and with gradients of the parameters named."""
    outcome = Outcome(outputs=[torch.as_tensor(value) for value in values])
    for name, number in gradients.items():
        outcome.gradients[name] = Gradient(torch.tensor([number]), name)
    return outcome


def test_a_value_of_8_bits_may_be_off_by_its_last_digit_only() -> None:
    one, next_to_it, behind = torch.tensor([1.0, 1.25, 1.5]).to(torch.float8_e5m2)
    assert judge(_returning(one), _returning(next_to_it), COMPILING).equal
    assert not judge(_returning(one), _returning(behind), COMPILING).equal


def test_a_small_gradient_is_measured_by_a_hundredth_of_the_largest() -> None:
    """``PADDING`` allows 5e-5 of that: 5e-7 where the largest gradient is 1."""
    reference = _returning(weight=1.0, bias=0.0)
    assert judge(reference, _returning(weight=1.0, bias=4e-7), PADDING).equal
    assert not judge(reference, _returning(weight=1.0, bias=2e-6), PADDING).equal


def test_gradients_are_not_reported_where_outputs_are_wrong_already() -> None:
    found = judge(_returning(1.0, weight=1.0), _returning(2.0, weight=2.0), COMPILING)
    assert [each.part for each in found.differences] == ["outputs"]


@pytest.mark.parametrize(("off", "equal"), [(3e-4, True), (1e-3, False)])
def test_a_result_may_be_four_times_as_far_from_the_exact_one_as_eager_is(
    off: float, equal: bool
) -> None:
    exact = _returning(torch.ones((), dtype=torch.float64))
    found = judge(_returning(1.0 + 1e-4), _returning(1.0 + off), COMPILING, lambda: exact)
    assert found.equal is equal


@pytest.mark.parametrize(
    ("right", "wrong"), [(math.inf, -math.inf), (math.nan, 0.0), (math.inf, 1.0)], ids=str
)
def test_what_is_not_finite_has_to_stand_in_the_same_places(right: float, wrong: float) -> None:
    """Also where eager rounds enough for the double-precision reference to be asked."""
    exact = _returning(torch.tensor([right, 1.0], dtype=torch.float64))
    eager, compiled = ([value, 1.0 + 1e-4] for value in (right, wrong))
    assert judge(_returning(eager), _returning(eager), COMPILING, lambda: exact).equal
    assert not judge(_returning(eager), _returning(compiled), COMPILING, lambda: exact).equal


# --- what a run on copies does with tensors of other kinds


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.ones(2, device="meta"), "on the meta device"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_without_memory_of_its_own_is_not_copied(
    make: Callable[[], torch.Tensor], words: str
) -> None:
    reason = why_not_copied([torch.ones(2), make()])
    assert reason is not None
    assert reason.startswith("input 1 is ")
    assert words in reason


def test_a_tensor_that_the_graph_owns_keeps_its_data_and_its_version() -> None:
    weight = torch.zeros(2)
    version = weight._version
    outcome = run(lambda x: [weight.add_(x)], [torch.ones(2)], [weight])
    assert outcome.inputs[0].tolist() == [1, 1]
    assert (weight.tolist(), weight._version) == ([0, 0], version)


def test_an_inference_tensor_counts_as_written() -> None:
    """It has no version counter that could tell."""
    with torch.inference_mode():
        x = torch.ones(2)
        assert run(lambda x: [x + 1], [x]).mutated == {0}
    assert run(lambda x: [x + 1], [torch.ones(2)]).mutated == frozenset()


def test_running_out_of_memory_is_no_outcome_to_compare() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run(function, [torch.ones(2)])
