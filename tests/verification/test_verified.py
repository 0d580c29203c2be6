"""verified: a planted defect is found, reported and replaced."""

from __future__ import annotations

import importlib
import itertools
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from support.dynamo import traces_autocast
from support.miscompiling import inputs, one_value, spoiling, workload
from torchguard import MiscompilationWarning, verified, verified_backend
from torchguard.errors import MiscompilationError
from torchguard.verification.graph import copy_graph
from torchguard.verification.minify import Case, minified

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


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
def test_fallbacks_know_the_sizes_though_dynamo_forgets_them(*, forgets: bool) -> None:
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


def test_a_backend_that_is_right_raises_no_false_alarm() -> None:
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


def test_the_strides_of_a_gradient_are_not_compared() -> None:
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


def test_a_fallback_that_is_wrong_as_well_is_skipped() -> None:
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


def test_a_fallback_that_adds_a_guard_dynamo_never_evaluates_is_skipped(
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
    assert f"reproducer: {script} (--minify makes it smaller)" in str(caught[0].message)
    text = script.read_text()
    assert "torchguard" not in text.partition('["--minify"]')[0]
    assert text.count("torchguard") == 2
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


def test_the_smaller_reproducer_holds_little_else_than_the_fault(tmp_path: Path) -> None:
    norm = verified(backend="aot_eager")(LongNorm())
    with pytest.warns(MiscompilationWarning):
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[0].backward()
    whole = tmp_path / "reproducers" / "LongNorm.py"
    done = subprocess.run(
        [sys.executable, str(whole), "--minify"], capture_output=True, text=True, check=False
    )
    if not traces_autocast():
        assert "it stays whole: this torch compiles it as 2 graphs" in done.stderr
        return
    assert done.returncode == 1, done.stderr
    script = Path(done.stdout.strip()).read_text()
    assert "lerp_" in script
    assert ".sin()" not in script
    assert ".cos()" not in script
    # What a mode is set with is never left out: half of a pair would set it for good.
    entered = script.count("_enter_autocast(") + script.count("autocast_increment_nesting(")
    left = script.count("_exit_autocast(") + script.count("autocast_decrement_nesting(")
    assert entered == left > 0
    done = output_and_status(script)
    assert done.returncode == 1, done.stderr
    assert "the largest difference is" in done.stdout


def test_what_stays_after_minifying_shows_the_fault() -> None:
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

    def exp_is_wrong(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        spoiled = copy_graph(graph)
        for node in spoiled.graph.nodes:
            if node.target == "exp":
                node.target = "sin"
        spoiled.recompile()
        return spoiled.forward

    case = Case(graphs[0], exp_is_wrong(graphs[0], []), given)
    small = minified(case, exp_is_wrong)
    statements = [node.target for node in small.graph.graph.nodes if node.op.startswith("call_")]
    assert statements == ["exp"]
    assert len(small.inputs) == 1
    assert small.differences(small.inputs)


def output_and_status(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


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


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
