"""verified: what is compiled wrong is found and replaced, what is right is left alone."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from child_process import END_RANK, output_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard import (
    MiscompilationError,
    MiscompilationWarning,
    install,
    verification_report,
    verified,
    verified_backend,
)
from torchguard.equivalence.compare import COMPILING, judge
from torchguard.equivalence.copies import copy_inputs
from torchguard.equivalence.copies import run_on_copies as run
from torchguard.equivalence.run import Outcome
from torchguard.verification.graph import copy_graph
from torchguard.verification.minify import Case, minified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHGUARD_REPRODUCERS", str(tmp_path / "reproducers"))
    torch._dynamo.reset()
    # torch's own warning, of Python 3.13.0, would be counted with those of a wrong graph.
    known = hasattr(torch._dynamo.config, "issue_3_13_0_warning")
    with torch._dynamo.config.patch({"issue_3_13_0_warning": False} if known else {}):
        yield
    torch._dynamo.reset()


# --- planted defects: a backend that is right but for one thing


def spoiling(spoil: Callable[[Any, list[Any]], Any], *, after: bool = True) -> Any:
    """Make a backend that runs the graph and then spoils its outputs or inputs."""

    def planted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            return spoil(list(graph(*inputs)) if after else graph, list(inputs))

        return run

    return planted


def one_value(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].clone()
    outputs[0].view(-1)[3] += 0.01
    return outputs


def a_whole_number(outputs: list[Any], _: list[Any]) -> Any:
    outputs[1] = outputs[1] + 1
    return outputs


def a_mutated_input(outputs: list[Any], inputs: list[Any]) -> Any:
    inputs[1].data[0, 0] += 0.01
    return outputs


def an_untouched_input(outputs: list[Any], inputs: list[Any]) -> Any:
    inputs[0].data[-1, -1] = 0
    return outputs


def an_alias_of_an_input(outputs: list[Any], inputs: list[Any]) -> Any:
    outputs[2] = inputs[1]
    return outputs


def an_alias_of_an_output(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[3]
    return outputs


def a_lost_alias(outputs: list[Any], _: list[Any]) -> Any:
    outputs[4] = outputs[4].clone()
    return outputs


def a_nan(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].clone()
    outputs[0].data[1, 1] = math.nan
    return outputs


def an_infinity(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].clone()
    outputs[0].data[1, 1] = math.inf
    return outputs


def a_dtype(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].double()
    return outputs


def a_shape(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0][None]
    return outputs


def requires_grad(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].detach()
    return outputs


def an_output_too_few(outputs: list[Any], _: list[Any]) -> Any:
    return outputs[:-1]


def an_exception(_: list[Any], __: list[Any]) -> Any:
    raise RuntimeError("no kernel")


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        gradient[0, 0] += 0.01
        return gradient


def a_gradient(graph: Any, inputs: list[Any]) -> Any:
    inputs[0] = _WrongBackward.apply(inputs[0])  # type: ignore[no-untyped-call]
    return graph(*inputs)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise RuntimeError("no kernel")


def a_backward_pass(graph: Any, inputs: list[Any]) -> Any:
    inputs[0] = _NoBackward.apply(inputs[0])  # type: ignore[no-untyped-call]
    return graph(*inputs)


def workload(x: torch.Tensor, state: torch.Tensor) -> Any:
    """Two floats, a whole number, a copy of the state, a view of it, and a write."""
    y = (x * 2).sin()
    state.mul_(0.5)
    return y, torch.argmax(state), state.clone(), x.exp(), state[1:]


DEFECTS = [
    one_value, a_whole_number, a_mutated_input, an_untouched_input, an_alias_of_an_input,
    an_alias_of_an_output, a_lost_alias, a_nan, an_infinity, a_dtype, a_shape,
    requires_grad, an_output_too_few, an_exception, a_gradient, a_backward_pass,
]  # fmt: skip
WHERE = {
    one_value: "output 0: 1 of 24 elements differ, the largest by 0.01",
    a_whole_number: "output 1: 1 of 1 elements differ, the largest by 1",
    a_mutated_input: "after the call: 1 of 24 elements differ",
    an_alias_of_an_input: "output 2: shares memory with input",
    a_lost_alias: "output 4: does not share memory with input",
    requires_grad: "output 0: requires_grad False, eager has True",
    a_nan: "1 of 24 elements are NaN in one only",
    an_infinity: "1 of 24 elements are infinite in one only",
    an_exception: "the run: raises RuntimeError: no kernel",
    a_gradient: "gradient of input 0: 1 of 24 elements differ",
    a_backward_pass: "the backward pass: raises RuntimeError: no kernel",
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)


def results_of(function: Callable[..., Any]) -> list[Any]:
    x, state = inputs()
    outputs = function(x, state)
    (outputs[0].sum() + outputs[3].sum()).backward()
    return [*outputs, state, x.grad]


@pytest.mark.parametrize("spoil", DEFECTS, ids=lambda spoil: spoil.__name__)
def test_a_planted_defect_is_found_and_what_runs_is_right(spoil: Any) -> None:
    after = spoil not in {a_gradient, a_backward_pass}
    backend = verified_backend(spoiling(spoil, after=after))
    compiled = torch.compile(workload, backend=backend)
    with pytest.warns(MiscompilationWarning, match="compiled workload wrong") as caught:
        found = results_of(compiled)
    assert len(caught) == 1
    assert WHERE.get(spoil, "") in str(caught[0].message)
    torch.testing.assert_close(found, results_of(workload), rtol=0, atol=0)
    (record,) = backend.stats().graphs
    assert record.status == "mismatched"
    assert record.runs == "aot_eager"
    torch.testing.assert_close(results_of(compiled), results_of(workload), rtol=0, atol=0)


@pytest.mark.parametrize("forgets", [False, True], ids=["keeps", "forgets"])
def test_the_ladder_knows_the_sizes_though_dynamo_forgets_them(*, forgets: bool) -> None:
    """Dynamo forgets them after compiling with a backend of an installed package."""
    setting = "invalidate_compile_context_weakrefs"
    if not hasattr(torch._dynamo.config, setting):
        pytest.skip("this torch never forgets")
    backend = verified_backend(spoiling(one_value))
    with torch._dynamo.config.patch({setting: forgets}), pytest.warns(MiscompilationWarning):
        torch.compile(workload, backend=backend)(*inputs())
    assert backend.stats().graphs[0].runs == "aot_eager"


def test_without_the_check_a_planted_defect_is_a_wrong_result() -> None:
    found = results_of(torch.compile(workload, backend=spoiling(one_value)))
    assert not torch.equal(found[0], results_of(workload)[0])


def test_a_backend_that_is_right_is_not_blamed() -> None:
    backend = verified_backend(spoiling(lambda outputs, _: outputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(
            results_of(torch.compile(workload, backend=backend)), results_of(workload)
        )
    assert [graph.status for graph in backend.stats().graphs] == ["verified"]


class _OtherStrides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.t().contiguous().t()


def test_the_strides_of_a_gradient_are_nobodys_business() -> None:
    """AOTAutograd chooses them; what a leaf accumulates has the leaf's own."""

    def transposed(graph: Any, inputs: list[Any]) -> Any:
        inputs[0] = _OtherStrides.apply(inputs[0])  # type: ignore[no-untyped-call]
        return graph(*inputs)

    backend = verified_backend(spoiling(transposed, after=False))
    x, _ = inputs()
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    assert x.grad.stride() == x.stride()
    assert backend.stats().verified == 1


# --- rounding is no defect


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) * 1.7 + x).sum(0) / 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_rounded_otherwise_is_not_blamed(dtype: torch.dtype) -> None:
    def wide(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        """Compute in double precision and round once, better than eager does."""
        return lambda *values: [out.to(dtype) for out in graph(*(v.double() for v in values))]

    torch.manual_seed(0)
    x, w = (torch.randn(64, 64).to(dtype) for _ in "xw")
    backend = verified_backend(wide)
    torch.compile(chain, backend=backend)(x, w)
    (record,) = backend.stats().graphs
    assert record.status == "verified"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_defect_is_found_in_low_precision_too(dtype: torch.dtype) -> None:
    def shifted(outputs: list[Any], _: list[Any]) -> Any:
        return [outputs[0].roll(1)]

    torch.manual_seed(0)
    x, w = (torch.randn(64, 64).to(dtype) for _ in "xw")
    backend = verified_backend(spoiling(shifted))
    with pytest.warns(MiscompilationWarning):
        torch.testing.assert_close(torch.compile(chain, backend=backend)(x, w), chain(x, w))


def test_a_reference_far_from_eager_excuses_nothing() -> None:
    """Then it has computed something else: what a graph does may depend on the dtype."""
    eager = Outcome(outputs=[torch.ones(4)])
    compiled = Outcome(outputs=[torch.ones(4) * 1.01])
    far = Outcome(outputs=[torch.ones(4).double() + 1])
    assert not judge(eager, compiled, COMPILING, lambda: far).equal
    near = Outcome(outputs=[torch.ones(4).double() * 1.004])
    assert judge(eager, compiled, COMPILING, lambda: near).equal


# --- where a graph jumps, the last digit decides


def a_digit_further(digit_in_double: float) -> Any:
    """Make a backend whose weights are a digit larger than they should be."""
    digits = {torch.float32: 2.0**-22, torch.float64: digit_in_double}

    def planted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            larger = [
                value * (1 + digits[value.dtype])
                if isinstance(value, torch.Tensor) and value.requires_grad
                else value
                for value in inputs
            ]
            return graph(*larger)

        return run

    return planted


def stopped(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.relu(weight * x - 1)  # a gradient of zeros, or of x


def chosen(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return (weight * x)[0] * 0, torch.where(weight * x > 1, 7, 3)


def compared(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return (weight * x)[0] * 0, weight * x > 1


@pytest.mark.parametrize("jump", [stopped, chosen, compared])
@pytest.mark.parametrize("digit_in_double", [2.0**-51, 2.0**-22])
def test_a_jump_within_the_rounding_error_blames_only_what_is_wrong_in_double_too(
    jump: Callable[..., Any], digit_in_double: float
) -> None:
    x = torch.tensor([1.0, 2.0])
    weight = torch.tensor([1 - 2.0**-24, 2.0], requires_grad=True)  # a digit below, and far above
    backend = a_digit_further(digit_in_double)
    checked = verified(backend=backend)(jump)
    if digit_in_double < 2.0**-50:
        checked(weight, x)
        assert stats(checked).verified == 1
    else:
        with pytest.warns(MiscompilationWarning):
            checked(weight, x)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_many_jumps_at_once_blame_nobody(count: int) -> None:
    weight = torch.full((count,), 1 - 2.0**-24, requires_grad=True)
    checked = verified(backend=a_digit_further(2.0**-51))(compared)
    checked(weight, torch.ones(count))
    (record,) = stats(checked).graphs
    assert record.status == "verified"
    assert record.reason.startswith("rounding decides where it jumps: output 1: ")


def in_float32(spoil: Callable[[list[Any]], list[Any]]) -> Any:
    """Make a backend that is right in double precision."""

    def spoiled(outputs: list[Any], inputs: list[Any]) -> Any:
        wide = any(value.dtype == torch.float64 for value in inputs)
        return outputs if wide else spoil(outputs)

    return spoiling(spoiled)


def test_a_large_number_excuses_no_small_one() -> None:
    def off(outputs: list[Any]) -> list[Any]:
        return [outputs[0] + torch.tensor([0.0, 3.0])]  # rounding moves the first by more

    weight = torch.tensor([1e8, 1.0], requires_grad=True)
    with pytest.warns(MiscompilationWarning, match="1 of 2 elements differ, the largest by 3"):
        verified(backend=in_float32(off))(lambda w, x: w * x)(weight, torch.ones(2))


def test_a_jump_excuses_no_number_that_eager_never_names() -> None:
    def garbage(outputs: list[Any]) -> list[Any]:
        return [outputs[0], torch.tensor(-7)]

    def named(weight: torch.Tensor, x: torch.Tensor) -> Any:
        return (weight * x)[0] * 0, (weight * x).argmax()

    weight = torch.tensor([1.0, 1.0, 0.5], requires_grad=True)
    with pytest.warns(MiscompilationWarning):
        _, place = verified(backend=in_float32(garbage))(named)(weight, torch.ones(3))
    assert int(place) == 0


@pytest.mark.parametrize("when", ["compiling", "running", "copying"])
def test_what_double_precision_can_not_tell_is_blamed(when: str) -> None:
    further = a_digit_further(2.0**-51)

    def planted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        run = further(graph, inputs)
        wide = any(value.dtype == torch.float64 for value in inputs)
        if wide and when == "compiling":
            raise torch.OutOfMemoryError

        def run_or_not(*given: Any) -> Any:
            if wide and when == "running":
                raise torch.OutOfMemoryError
            return run(*given)

        return run_or_not

    def jump(weight: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return stopped(weight, x), a + 1, b + 1

    shared = torch.ones(2)
    other = shared.view(torch.int32) if when == "copying" else shared.clone()
    weight = torch.tensor([1 - 2.0**-24, 2.0], requires_grad=True)
    with pytest.warns(MiscompilationWarning):
        verified(backend=planted)(jump)(weight, torch.ones(2), shared, other.detach())


def test_a_jump_of_a_graph_with_dynamic_shapes_is_not_forgiven() -> None:
    further = a_digit_further(2.0**-51)

    def planted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        dynamic = any(isinstance(value, torch.SymInt) for value in inputs)
        return further(graph, inputs) if dynamic else graph.forward  # so right in double

    def jump(weight: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.relu(weight * x - 1) * x.shape[0]

    weight = torch.tensor([1 - 2.0**-24, 2.0], requires_grad=True)
    with pytest.warns(MiscompilationWarning):
        torch.compile(jump, backend=verified_backend(planted), dynamic=True)(weight, torch.ones(2))


def test_copies_are_not_kept_alive_by_autocast() -> None:
    seen = []

    def project(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        seen.append(weakref.ref(weight))
        return [nn.functional.linear(x, weight)]

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        run(project, [weight, x])
        gc.collect()
        assert [copied() for copied in seen] == [None]
        nn.functional.linear(x, weight)
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_storage_learns_if_any_tensor_over_it_does(order: tuple[int, int]) -> None:
    data = torch.ones(3)
    tensors = data, data.detach().requires_grad_()
    learns: list[bool] = []
    copy_inputs([tensors[i] for i in order], change=lambda _, learning: learns.append(learning))
    assert learns == [True]


def test_a_jump_draws_no_random_number_of_the_callers() -> None:
    further = a_digit_further(2.0**-51)

    def drawing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if inputs[0].dtype == torch.float64:
            torch.rand(3)
        return further(graph, inputs)

    weight = torch.tensor([1 - 2.0**-24, 2.0], requires_grad=True)
    checked, before = verified(backend=drawing)(stopped), torch.get_rng_state()
    checked(weight, torch.ones(2))
    assert stats(checked).graphs[0].reason
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("jump", [stopped, chain])
def test_what_rounding_never_does_is_blamed_though_double_is_right(
    jump: Callable[..., Any],
) -> None:
    def larger(outputs: list[Any], inputs: list[Any]) -> Any:
        off = 0.01 if inputs[0].dtype == torch.float32 else 0.0
        return [outputs[0] + off]

    weight = torch.full((4, 4), 0.7, requires_grad=True)
    with pytest.warns(MiscompilationWarning, match="the largest by 0.01"):
        verified(backend=spoiling(larger))(jump)(weight, torch.eye(4))


# --- what happens on a difference


def test_raise_refuses_to_run_a_wrong_graph() -> None:
    backend = verified_backend(spoiling(one_value), on_mismatch="raise")
    compiled = torch.compile(workload, backend=backend)
    for _ in range(2):
        with pytest.raises(MiscompilationError, match="compiled workload wrong"):
            results_of(compiled)
    assert backend.stats().graphs[0].runs == "nothing"


def test_warn_runs_the_wrong_graph_and_says_so_once() -> None:
    backend = verified_backend(spoiling(one_value), on_mismatch="warn", calls=3)
    compiled = torch.compile(workload, backend=backend)
    with pytest.warns(MiscompilationWarning, match="runs all the same") as caught:
        found = [results_of(compiled) for _ in range(3)]
    assert len(caught) == 1
    assert not torch.equal(found[2][0], results_of(workload)[0])


class RunningNorm(nn.Module):
    """AOTAutograd gets its gradient wrong: https://github.com/pytorch/pytorch/pull/197039."""

    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * self.variance.rsqrt() * self.weight
        self.variance.lerp_(batch.square().mean(0), 0.5)
        return scaled.sum()


def test_a_step_that_is_wrong_as_well_is_passed_over() -> None:
    wrong = spoiling(lambda outputs, _: [outputs[0] + 1, *outputs[1:]])
    norm, eager = verified(backend=wrong)(RunningNorm()), RunningNorm()
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with pytest.warns(MiscompilationWarning, match="eager runs instead") as caught:
        norm(batch).backward()
    assert len(caught) == 1
    norm(batch).backward()
    for _ in range(2):
        eager(batch).backward()
    torch.testing.assert_close(norm.weight.grad, eager.weight.grad)
    torch.testing.assert_close(norm.variance, eager.variance)


def test_a_step_that_adds_a_guard_which_nobody_watches_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = itertools.count()
    monkeypatch.setattr(
        importlib.import_module("torchguard.verification.fallback"),
        "shape_guards",
        lambda _: next(count),
    )
    backend = verified_backend(spoiling(one_value))
    with pytest.warns(MiscompilationWarning, match="eager runs instead"):
        torch.compile(workload, backend=backend)(*inputs())
    assert backend.stats().graphs[0].runs == "eager"


def test_the_warning_points_at_the_callers_line() -> None:
    compiled = torch.compile(workload, backend=verified_backend(spoiling(one_value)))
    with pytest.warns(MiscompilationWarning) as caught:
        compiled(*inputs())  # this line
    assert caught[0].filename == __file__
    line = Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
    assert line.strip() == "compiled(*inputs())  # this line"


def test_the_reproducer_shows_the_difference(tmp_path: Path) -> None:
    norm = verified(backend="aot_eager")(RunningNorm())
    with pytest.warns(MiscompilationWarning) as caught:
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).backward()
    script = tmp_path / "reproducers" / "RunningNorm.py"
    assert f"reproducer: {script}" in str(caught[0].message)
    assert "torchguard" not in script.read_text()
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "the largest difference is" in done.stdout


class LongNorm(RunningNorm):
    """The same among forty statements that are compiled right."""

    def forward(self, batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            other = batch
            for number in range(20):
                other = (other + number).sin()
        return super().forward(batch), other, other.sum(), batch.cos()


def test_the_reproducer_holds_little_else_than_the_fault(tmp_path: Path) -> None:
    norm = verified(backend="aot_eager")(LongNorm())
    with pytest.warns(MiscompilationWarning):
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[0].backward()
    script = (tmp_path / "reproducers" / "LongNorm.py").read_text()
    assert "lerp_" in script
    assert ".sin()" not in script
    assert ".cos()" not in script
    # What a mode is set with is never left out: half of a pair would set it for good.
    assert script.count("_enter_autocast(") == script.count("_exit_autocast(") == 1
    done = output_and_status(script)
    assert done.returncode == 1, done.stderr
    assert "the largest difference is" in done.stdout


def test_what_stays_after_reducing_shows_the_fault_and_time_is_kept() -> None:
    def two_writes(x: torch.Tensor, y: torch.Tensor, unused: torch.Tensor) -> Any:
        a = x.sin() + unused
        y.add_(1)
        b = y.exp() * 2
        c = (a + b).relu()
        y.mul_(2)
        return a, b, c.sum(), y[1:]

    graphs: list[torch.fx.GraphModule] = []

    def keeping(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    given = [torch.randn(4), torch.randn(4), torch.randn(4)]
    torch.compile(two_writes, backend=keeping)(*(value.clone() for value in given))
    tried = []

    def exp_is_wrong(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        tried.append(1)
        spoiled = copy_graph(graph)
        for node in spoiled.graph.nodes:
            if node.target == "exp":
                node.target = "sin"
        spoiled.recompile()
        return spoiled.forward

    case = Case(graphs[0], exp_is_wrong(graphs[0], []), given)
    small, ended_early = minified(case, exp_is_wrong, seconds=60, first=0)
    assert not ended_early
    statements = [node.target for node in small.graph.graph.nodes if node.op.startswith("call_")]
    assert statements == ["exp"]
    assert len(small.inputs) == 1
    assert small.differences(small.inputs)
    # The whole graph would take ten seconds once more, the end of it does not.
    small, ended_early = minified(case, exp_is_wrong, seconds=5, first=10)
    assert [node.target for node in small.graph.graph.nodes if node.op.startswith("call_")] == [
        "exp"
    ]
    tried.clear()
    assert minified(case, exp_is_wrong, seconds=1, first=100) == (case, True)
    assert tried == []


def output_and_status(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


# --- nobody notices


def test_random_numbers_are_those_of_one_run() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4)

    backend = verified_backend("aot_eager")
    compiled = torch.compile(noisy, backend=backend)
    torch.manual_seed(0)
    found = compiled(torch.zeros(4)), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(found[0], noisy(torch.zeros(4)))
    assert torch.equal(found[1], torch.rand(1))
    assert backend.stats().graphs[0].status == "verified"


def test_random_operators_of_a_backend_with_its_own_are_left_unverified() -> None:
    backend = verified_backend(spoiling(lambda outputs, _: outputs))
    torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend=backend)(torch.ones(4))
    (record,) = backend.stats().graphs
    assert record.status == "unverified"
    assert "random numbers" in record.reason


def test_gradients_are_accumulated_once_and_hooks_called_once() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    eager = copy.deepcopy(model)
    checked = verified(backend="aot_eager")(model)
    assert checked is model
    calls = []
    first.weight.register_hook(lambda gradient: calls.append("tensor"))
    first.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    x = torch.randn(8, 4)
    for module in (eager, model):
        module(x).sum().backward()
    assert calls == ["tensor", "accumulated"]
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    assert [graph.status for graph in stats(model).graphs] == ["verified"]


def test_hooks_on_saved_tensors_see_one_run() -> None:
    def packed(function: Callable[..., Any]) -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return tensor

        x = torch.randn(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(x).sum().backward()
        return count

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    bare = packed(torch.compile(function, backend="aot_eager"))
    torch._dynamo.reset()
    backend = verified_backend("aot_eager")
    assert packed(torch.compile(function, backend=backend)) == bare
    assert backend.stats().verified == 1


def test_what_communicates_is_left_alone() -> None:
    from torchguard.verification.graph import why_not_twice  # noqa: PLC0415

    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    reduce = torch.ops._c10d_functional.all_reduce.default
    graph.output((graph.call_function(reduce, (x, "sum", "0")),))
    reason = why_not_twice(torch.fx.GraphModule({}, graph))
    assert reason is not None
    assert "communicates with other processes" in reason


def test_inputs_above_max_bytes_are_not_copied() -> None:
    backend = verified_backend(spoiling(one_value), max_bytes=100)
    torch.compile(workload, backend=backend)(*inputs())
    assert backend.stats().graphs[0].reason == "its inputs have 192 bytes, max_bytes is 100"


def test_what_can_not_be_copied_is_left_unverified() -> None:
    backend = verified_backend("eager")
    sparse = torch.eye(3).to_sparse()
    torch.compile(lambda x: x * 2, backend=backend)(sparse)
    for record in backend.stats().graphs:
        assert record.status == "unverified", record


def test_what_eager_does_not_do_twice_blames_nobody() -> None:
    counted: list[int] = []

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        counted.append(1)
        return x + len(counted)

    unsteady.__module__ = "math"  # functions of which torchguard expects that they only compute
    graph = torch.fx.Graph()
    graph.output((graph.call_function(unsteady, (graph.placeholder("x"),)),))
    backend = verified_backend(spoiling(lambda outputs, _: outputs))
    x = torch.ones(3)
    backend(torch.fx.GraphModule({}, graph), [x])(x)
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("unverified", "planted")
    assert record.reason == "eager itself does not give the same result twice"


def test_hooks_of_a_parameter_that_the_graph_owns_are_not_called_for_a_check() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[torch.Tensor] = []
    weight.register_hook(seen.append)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.mul, (x, graph.get_attr("weight")))
    graph.output((graph.call_function(torch.sum, (product,)),))
    backend = verified_backend("eager")
    given = torch.ones(3)
    backend(torch.fx.GraphModule({"weight": weight}, graph), [given])(given)[0].backward()
    assert len(seen) == 1
    assert backend.stats().graphs[0].reason == "a tensor that the graph owns has hooks"


def test_nothing_is_kept_alive() -> None:
    backend = verified_backend("aot_eager")
    compiled = torch.compile(workload, backend=backend)
    x, state = inputs()
    outputs = compiled(x, state)
    alive = [weakref.ref(value) for value in (x, state, *outputs)]
    del x, state, outputs
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    from torchguard.verification.check import GraphCheck  # noqa: PLC0415

    assert [value for value in gc.get_objects() if isinstance(value, GraphCheck)] == []


# --- which calls are checked


def test_every_shape_is_checked_once_when_asked() -> None:
    backend = verified_backend("aot_eager", check_each="shape")
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend, dynamic=True)
    for size in (3, 4, 4, 5, 3):
        compiled(torch.ones(size))
    assert [graph.checks for graph in backend.stats().graphs] == [3]


def test_a_graph_with_dynamic_shapes_is_checked_once_when_asked() -> None:
    backend = verified_backend("aot_eager", check_each="graph")
    compiled = torch.compile(lambda x, n: x.sin() * n, backend=backend, dynamic=True)
    for size in (3, 4, 5):
        torch.testing.assert_close(compiled(torch.ones(size), size), torch.ones(size).sin() * size)
    assert [(graph.status, graph.checks) for graph in backend.stats().graphs] == [("verified", 1)]


def test_a_defect_that_shows_in_the_second_call_is_found_with_calls_2() -> None:
    def at_zero(outputs: list[Any], given: list[Any]) -> Any:
        return [outputs[0] + 1] if given[0].sum() == 0 else outputs

    backend = verified_backend(spoiling(at_zero), calls=2)
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    compiled(torch.ones(3))
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.zeros(3)).tolist() == [0, 0, 0]
    assert backend.stats().graphs[0].status == "mismatched"


def test_a_dynamic_graph_that_is_wrong_in_its_second_call_stays_right_for_every_size() -> None:
    def at_zero(outputs: list[Any], given: list[Any]) -> Any:
        x = next(value for value in given if isinstance(value, torch.Tensor))
        return [outputs[0] + 1] if x.sum() == 0 else outputs

    backend = verified_backend(spoiling(at_zero), calls=2)
    compiled = torch.compile(lambda x: x.expand(2, -1) * 2, backend=backend, dynamic=True)
    compiled(torch.ones(5))
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.zeros(6)).tolist() == [[0] * 6] * 2
    assert compiled(torch.ones(7)).tolist() == [[2] * 7] * 2
    assert backend.stats().graphs[0].runs == "aot_eager"


def test_a_dynamic_graph_that_is_wrong_falls_back_too() -> None:
    backend = verified_backend(spoiling(one_value))
    compiled = torch.compile(lambda x: (x * 2,), backend=backend, dynamic=True)
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.ones(5))[0].tolist() == [2] * 5
    assert compiled(torch.ones(7))[0].tolist() == [2] * 7
    assert backend.stats().graphs[0].runs in {"aot_eager", "eager"}


# --- other parts of torch


def _optimizer() -> Callable[[], Any]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.arange(3.0)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    return lambda: (optimizer.step(), weight.detach().clone())[1]


def _with_checkpoint() -> Callable[[], Any]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        value = layer(value)
        return value.sin()

    return lambda: checkpoint(block, x, use_reentrant=False).sum()


def _autocast() -> Callable[[], Any]:
    x = torch.full((4, 4), 0.3, requires_grad=True)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x).sum() * 2

    return run


def _aliased() -> Callable[[], Any]:
    base = torch.arange(12.0).view(3, 4)

    def run() -> Any:
        row, column = base[1], base[:, 2]
        row.mul_(0.5)
        return column.sum(), base.t(), row

    return run


def _differentiable_view() -> Callable[[], Any]:
    leaf = torch.ones(3, 4, requires_grad=True)

    def run() -> Any:
        x = leaf * 2
        return _write_through(x, x[0])

    return run


def _write_through(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    row.add_(1)
    return (x * x).sum()


def _empty() -> Callable[[], Any]:
    return lambda: (torch.zeros(0, 3) + 1, torch.zeros(3, 0).sum())


def _no_grad() -> Callable[[], Any]:
    x = torch.ones(3, requires_grad=True)

    def run() -> Any:
        with torch.no_grad():
            x.mul_(0.5)
        return x * 2

    return run


def _complex() -> Callable[[], Any]:
    x = torch.arange(4.0) + 1j

    def run() -> Any:
        return (x * 2j).abs()

    return run


MAKERS = [
    _optimizer, _with_checkpoint, _autocast, _aliased, _differentiable_view, _empty, _no_grad,
    _complex,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.strip("_"))
def test_it_lives_with_other_parts_of_torch(make: Callable[[], Any]) -> None:
    backend = verified_backend("aot_eager")
    compiled: Callable[[], Any] = torch.compile(make(), backend=backend)
    eager = make()
    for _ in range(2):
        torch.testing.assert_close(compiled(), eager())
    statuses = {graph.status for graph in backend.stats().graphs}
    assert statuses == {"verified"}, str(backend.stats())


def test_all_ranks_take_the_same_step(tmp_path: Path) -> None:
    printed = output_of(
        f"""
        import sys, warnings
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from torchguard import verified_backend

        def wrong_on_rank_1(graph, inputs):
            def run(*inputs):
                x = graph(*inputs)[0]
                return (x + dist.get_rank(),)
            return run

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 1)

            def forward(self, x):
                return self.layer(x)

        def train(rank):
            store = dist.FileStore({str(tmp_path / "store")!r}, 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            backend = verified_backend(wrong_on_rank_1, group=dist.group.WORLD)
            model = Net()
            data_parallel = torch.nn.parallel.DistributedDataParallel(model)
            compiled = torch.compile(data_parallel, backend=backend)
            loss = compiled(torch.ones(2, 3) * rank).sum()
            loss.backward()
            steps = [graph.runs for graph in backend.stats().graphs]
            statuses = [graph.status for graph in backend.stats().graphs]
            with open({str(tmp_path)!r} + f"/rank{{rank}}", "w") as file:
                file.write(f"{{steps}} {{statuses}} {{model.layer.weight.grad.tolist()}}")
            dist.destroy_process_group()
            {END_RANK}

        if __name__ == "__main__":
            mp.spawn(train, nprocs=2)
            for rank in range(2):
                print(open({str(tmp_path)!r} + f"/rank{{rank}}").read())
        """,
        folder=tmp_path,
    )
    ranks = printed.splitlines()[-2:]  # gloo may have talked before
    assert ranks[0] == "['aot_eager'] ['verified'] [[1.0, 1.0, 1.0]]"
    assert ranks[1] == "['aot_eager'] ['mismatched'] [[1.0, 1.0, 1.0]]"


def test_inference_mode() -> None:
    backend = verified_backend("aot_eager")
    with torch.inference_mode():
        x = torch.ones(3)
        assert torch.compile(lambda v: v.mul_(2) + 1, backend=backend)(x).tolist() == [3, 3, 3]
        assert x.tolist() == [2, 2, 2]
    assert backend.stats().graphs[0].status == "verified", str(backend.stats())


def test_an_unknown_backend_is_refused_where_it_is_named() -> None:
    """As ``torch.compile`` does, and not in the first call."""
    with pytest.raises(Exception, match="Invalid backend") as of_torch:
        torch.compile(workload, backend="no_such_backend")
    with pytest.raises(of_torch.type, match="Invalid backend"):
        verified(backend="no_such_backend")(workload)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_reaches_inductor_whichever_way_it_is_given(mode: str) -> None:
    expected = torch._inductor.list_mode_options(mode)
    assert expected
    given = verified_backend(mode=mode)._fallbacks({})
    by_torch_compile = verified_backend()._fallbacks({"mode": mode})
    for fallbacks in (given, by_torch_compile):
        for name, value in expected.items():
            assert f"{name!r}: {value!r}" in str(fallbacks[0].source)


@pytest.mark.cuda
def test_cuda_graphs_are_recorded_and_replayed_after_the_check() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
    eager = copy.deepcopy(model)
    checked = verified(mode="reduce-overhead")(model)
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((4, 8), float(step), device="cuda")
        for module in (checked, eager):
            module.zero_grad()
            module(x).sum().backward()
        for one, other in zip(eager.parameters(), checked.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
    assert [graph.runs for graph in stats(checked).graphs] == ["inductor"]
    assert stats(checked).verified == 1


# --- three ways in


def stats(checked: Any) -> torchguard.VerificationReport:
    report: torchguard.VerificationReport = checked.stats()
    return report


def test_a_function_stays_a_function_and_has_stats() -> None:
    @verified(backend="aot_eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x * 2

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert stats(double).verified == 1


def test_a_module_stays_what_it_was() -> None:
    module = nn.Linear(3, 2)
    keys, original = list(module.state_dict()), module
    module = verified(backend="aot_eager")(module)
    assert module is original
    assert type(module) is nn.Linear
    assert list(module.state_dict()) == keys
    module(torch.ones(1, 3))
    assert stats(module).verified == 1
    again = pickle.loads(pickle.dumps(module))  # noqa: S301
    torch.testing.assert_close(again(torch.ones(1, 3)), module(torch.ones(1, 3)))


def test_two_wrappers_are_counted_apart_and_the_process_counts_both() -> None:
    before = len(verification_report().graphs)
    one, other = verified_backend("eager"), verified_backend("aot_eager")
    torch.compile(lambda x: x + 1, backend=one)(torch.ones(1))
    torch.compile(lambda x: x + 2, backend=other)(torch.ones(1))
    assert len(one.stats().graphs) == len(other.stats().graphs) == 1
    assert len(verification_report().graphs) == before + 2


def test_the_report_is_a_table() -> None:
    backend = verified_backend(spoiling(one_value))
    with pytest.warns(MiscompilationWarning):
        torch.compile(workload, backend=backend)(*inputs())
    shown = str(backend.stats())
    assert "workload (" in shown
    assert "mismatched  aot_eager" in shown
    assert shown.splitlines()[-1].startswith("1 graphs: 0 verified, 1 mismatched, 0 unverified; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls": 0}, "calls is 0, expected a number of 1 or more"),
        ({"on_mismatch": "panic"}, "expected 'fallback' or 'raise' or 'warn'"),
        ({"check_each": "call"}, "expected 'auto' or 'graph' or 'shape'"),
        ({"max_bytes": -1}, "max_bytes is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified_backend(**options)
    with pytest.raises(ValueError, match=message):
        verified(**options)


def test_options_that_inductor_does_not_know_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        verified_backend(options={"no_such_option": 1})
    with install("verified"), pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(lambda x: x, options={"no_such_option": 1})


def test_install_leaves_other_backends_alone() -> None:
    before = len(verification_report().graphs)
    with install("verified"):
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert len(verification_report().graphs) == before
    assert "verified" not in torchguard.installed()


# --- with inductor: the three everyday lines


def shift(x: torch.Tensor) -> None:
    x[1:] = x[:-1].clone()


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def write_and_copy(x: torch.Tensor) -> torch.Tensor:
    x[2] = 5.0
    return x.clone()


EVERYDAY: list[Any] = [shift, swap, write_and_copy]


def outcome_of(function: Callable[..., Any], count: int) -> list[Any]:
    given = [torch.arange(4.0) + 10 * i for i in range(count)]
    result = function(*given)
    if result is not None:
        result.add_(1)  # it must be nobody's alias
    return [value.tolist() for value in given] + [None if result is None else result.tolist()]


def wrong_everyday_lines(compile_: Callable[..., Any]) -> list[str]:
    wrong = []
    for function in EVERYDAY:
        torch._dynamo.reset()
        count = function.__code__.co_argcount
        if outcome_of(compile_(function), count) != outcome_of(function, count):
            wrong.append(function.__name__)
    return wrong


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def bare(function: Any) -> Any:
    return torch.compile(function)


def by_decorator(function: Any) -> Any:
    return verified()(function)


def around_compiled(function: Any) -> Any:
    return verified()(torch.compile(function))


def by_backend(function: Any) -> Any:
    return torch.compile(function, backend=verified_backend("inductor"))


def by_install(function: Any) -> Any:
    with install("verified"):
        return torch.compile(function)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_the_everyday_lines_are_wrong_bare_and_right_each_way() -> None:
    assert wrong_everyday_lines(bare) != []
    for way in (by_decorator, around_compiled, by_backend, by_install):
        before = len(verification_report().graphs)
        assert wrong_everyday_lines(way) == [], way.__name__
        assert len(verification_report().graphs) == before + len(EVERYDAY), way.__name__


@pytest.mark.slow
def test_the_backend_is_found_by_name_with_no_import(tmp_path: Path) -> None:
    information = tmp_path / "torchguard_runtime-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 0\n")
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    group = project.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    line = group.partition("\n")[0].replace('"', "")
    (information / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    (tmp_path / "everyday.py").write_text(
        "from __future__ import annotations\nimport torch\n"
        + "\n".join(inspect.getsource(each) for each in (*EVERYDAY, outcome_of))
        + "EVERYDAY = shift, swap, write_and_copy\n"
    )
    printed = output_of(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from everyday import EVERYDAY, outcome_of
        options = {{"max_fusion_size": 32}}
        for function in EVERYDAY:
            count = function.__code__.co_argcount
            expected = outcome_of(function, count)
            compiled = torch.compile(function, backend="torchguard", options=options)
            print(outcome_of(compiled, count) == expected)
        import torchguard
        print(len(torchguard.verification_report().graphs))
        """
    )
    assert printed.split() == ["True", "True", "True", "3"]


@pytest.mark.slow
def test_settings_of_what_was_compiled_already_are_kept() -> None:
    compiled = torch.compile(
        lambda x: torch.rand(3) + x, options={"fallback_random": True}, fullgraph=True
    )
    checked = verified()(compiled)
    torch.manual_seed(0)
    found = checked(torch.zeros(3))
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))
    (record,) = stats(checked).graphs
    assert record.status == "verified", record


def test_what_was_compiled_already_keeps_its_settings_or_is_refused() -> None:
    with pytest.raises(TypeError, match="keeps its own backend, mode and options"):
        verified(mode="max-autotune")(torch.compile(lambda x: x))


def test_what_another_backend_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="pass what was compiled"):
        verified()(torch.compile(lambda x: x, backend="eager"))
