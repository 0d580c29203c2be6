"""verified: a defect is found, reported and replaced; what is a mismatch, and how it is named."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.child_process import run_python
from support.miscompiling import inputs, one_value, spoiling, verified_backend, workload
from torchguard import MiscompilationWarning, verified
from torchguard.defects.probes.gradients import _RunningVariance
from torchguard.equivalence.compare import same_strides
from torchguard.errors import MiscompilationError
from torchguard.verification.check import GraphCheck
from torchguard.verification.graph import why_not_twice

pytestmark = pytest.mark.usefixtures("fresh_reports")


def output(place: int, change: Callable[[Any, list[Any]], Any]) -> Any:
    """Return what spoils an output, given it and the inputs."""

    def spoil(outputs: list[Any], inputs: list[Any]) -> Any:
        outputs[place] = change(outputs[place], inputs)
        return outputs

    return spoil


def with_element(value: float) -> Any:
    def change(output: torch.Tensor, _: Any) -> torch.Tensor:
        output = output.clone()
        output.data[1, 1] = value
        return output

    return output(0, change)


def written(place: int, *at: int, value: float) -> Any:
    """Return what writes to an element of an input."""

    def spoil(outputs: list[Any], inputs: list[Any]) -> Any:
        inputs[place].data[at] = value
        return outputs

    return spoil


def raises(*_: Any) -> Any:
    raise RuntimeError("no kernel")


def through(backward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what has an input pass through a function that has another gradient."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return backward(gradient)

    def spoil(graph: Any, inputs: list[Any]) -> Any:
        inputs[0] = Spoiled.apply(inputs[0])  # type: ignore[no-untyped-call]
        return graph(*inputs)

    return spoiling(spoil, after=False)


def one_larger(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.index_put((torch.tensor([0]), torch.tensor([0])), gradient[0, 0] + 0.01)


ONE = "1 of 24 elements"
DEFECTS: dict[str, tuple[Any, str]] = {
    "one value": (spoiling(one_value), f"output 0: {ONE} differ, the largest by 0.01"),
    "a whole number": (
        spoiling(output(1, lambda out, _: out + 1)),
        "output 1: 1 of 1 elements differ, the largest by 1",
    ),
    "a mutated input": (spoiling(written(1, 0, 0, value=9)), f"after the call: {ONE} differ"),
    "an untouched input": (spoiling(written(0, -1, -1, value=0)), f"after the call: {ONE} differ"),
    "an alias of an input": (
        spoiling(output(2, lambda _, inputs: inputs[1])),
        "output 2: shares memory with state",
    ),
    "an alias of an output": (
        spoiling(lambda outputs, _: [outputs[3], *outputs[1:]]),
        "output 0: 24 of 24 elements differ",
    ),
    "a lost alias": (
        spoiling(output(4, lambda out, _: out.clone())),
        "output 4: does not share memory with state",
    ),
    "a NaN": (spoiling(with_element(math.nan)), f"{ONE} are NaN in one only"),
    "a dtype": (spoiling(output(0, lambda out, _: out.double())), "output 0: "),
    "a shape": (spoiling(output(0, lambda out, _: out[None])), "output 0: "),
    "requires_grad": (
        spoiling(output(0, lambda out, _: out.detach())),
        "output 0: requires_grad False, eager has True",
    ),
    "an output too few": (spoiling(lambda outputs, _: outputs[:-1]), ""),
    "an exception": (spoiling(raises), "the run: raises RuntimeError: no kernel"),
    "a gradient": (through(one_larger), f"gradient of x: {ONE} differ"),
    "a backward pass": (through(raises), "the backward pass: raises RuntimeError: no kernel"),
}


def results_of(function: Callable[..., Any]) -> list[Any]:
    x, state = inputs()
    outputs = function(x, state)
    (outputs[0].sum() + outputs[3].sum()).backward()
    return [*outputs, state, x.grad]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_what_runs_is_right(name: str) -> None:
    planted, where = DEFECTS[name]
    backend = verified_backend(planted)
    compiled = torch.compile(workload, backend=backend)
    with pytest.warns(MiscompilationWarning, match="compiled workload wrong") as caught:
        found = results_of(compiled)
    assert len(caught) == 1
    assert where in str(caught[0].message)
    assert caught[0].filename == __file__
    line = Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
    assert line.strip() == "outputs = function(x, state)"
    torch.testing.assert_close(found, results_of(workload), rtol=0, atol=0)
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("mismatched", "eager")
    torch.testing.assert_close(results_of(compiled), results_of(workload), rtol=0, atol=0)


def test_the_strides_of_a_gradient_are_not_compared() -> None:
    """AOTAutograd chooses them; what a leaf accumulates has the leaf's own."""
    backend = verified_backend(through(lambda gradient: gradient.t().contiguous().t()))
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
    with pytest.warns(MiscompilationWarning, match="the wrong version still runs") as caught:
        found = [results_of(compiled) for _ in range(3)]
    assert len(caught) == 1
    assert not torch.equal(found[2][0], results_of(workload)[0])


def test_the_reproducer_shows_the_difference(tmp_path: Path) -> None:
    norm = verified(backend="aot_eager")(_RunningVariance())
    with pytest.warns(MiscompilationWarning) as caught:
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).backward()
    script = tmp_path / "reproducers" / "_RunningVariance.py"
    assert f"reproducer: {script}" in str(caught[0].message)
    assert "torchguard" not in script.read_text()
    done = run_python(script.read_text(), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the largest difference is" in done.stdout


class ReadmeNorm(nn.Module):
    """The module of README, which inductor compiles wrong because its buffer is static."""

    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.variance.lerp_(x.detach().var(dim=0), 0.1)
        return (x / self.variance * self.weight).sum()


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.6 compiles it right")
def test_the_reproducer_has_the_buffers_and_parameters_static(tmp_path: Path) -> None:
    norm = verified()(ReadmeNorm())
    with pytest.warns(MiscompilationWarning):
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).backward()
    text = (tmp_path / "reproducers" / "ReadmeNorm.py").read_text()
    assert text.count("torch._dynamo.mark_static_address(") == 2
    done = run_python(text, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gradient of input" in done.stdout


# --- which calls are checked


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_defect_that_shows_in_the_second_call_is_found_with_calls_2(*, dynamic: bool) -> None:
    """A graph with dynamic shapes stays right for every size."""

    def at_zero(outputs: list[Any], given: list[Any]) -> Any:
        x = next(value for value in given if isinstance(value, torch.Tensor))
        return [outputs[0] + 1] if x.sum() == 0 else outputs

    backend = verified_backend(spoiling(at_zero), calls=2)
    compiled = torch.compile(lambda x: x.expand(2, -1) * 2, backend=backend, dynamic=dynamic)
    compiled(torch.ones(5))
    size = 6 if dynamic else 5
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.zeros(size)).tolist() == [[0] * size] * 2
    assert compiled(torch.ones(size + dynamic)).tolist() == [[2] * (size + dynamic)] * 2
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("mismatched", "eager")


def test_nothing_is_kept_alive() -> None:
    def checks() -> list[GraphCheck]:
        # By type: isinstance() asks a dead weakref.proxy for its class, which raises.
        return [value for value in gc.get_objects() if type(value) is GraphCheck]

    # What other tests have compiled may still wait for a first call.
    before = weakref.WeakSet(checks())
    backend = verified_backend("aot_eager")
    compiled = torch.compile(workload, backend=backend)
    x, state = inputs()
    outputs = compiled(x, state)
    alive = [weakref.ref(value) for value in (x, state, *outputs)]
    del x, state, outputs
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    # The graph writes its inputs: another pattern of inputs that overlap would be checked.
    before = weakref.WeakSet(checks())
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    assert [check for check in checks() if check not in before] == []


@pytest.mark.parametrize("compile_", [torch.compile, verified])
def test_the_guards_of_dynamo_are_not_kept(compile_: Any) -> None:
    """PyTorch 2.6 waits for itself in ``torch._dynamo.reset()`` if compiled code holds them."""
    kept: list[weakref.ref[Any]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(weakref.ref(torch._guards.TracingContext.get().guards_context))
        return graph

    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(1) + y  # a graph that writes stays under check

    compiled = compile_(writes, backend=note)
    for size in (3, 2, 5):
        compiled(torch.ones(size), torch.ones(size))
    gc.collect()
    assert len(kept) == 2
    assert [ref() for ref in kept] == [None, None]


# --- strides of outputs


def first_cache(empty: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(0,), (B, T, D) -> (B, H, T, D / H): the first keys of a decoder, and their double."""
    keys = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    return torch.cat([empty, keys], dim=-2), keys * 2


# The decompositions that inductor has, and no code generated: `cat` drops what is empty there.
DECOMPOSED = "aot_eager_decomp_partition"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning")
def test_a_first_cache_gets_the_strides_eager_gives_it(*, dynamic: bool) -> None:
    """A decoder's first keys are ``cat([empty, keys])``: no warning, and view() works."""
    compiled = verified(backend=DECOMPOSED, dynamic=dynamic)(first_cache)
    for time in (7, 9, 4) if dynamic else (7, 7):
        empty, x = torch.tensor([]), torch.randn(2, time, 8, requires_grad=True)
        want, found = first_cache(empty, x), compiled(empty, x)
        assert [value.stride() for value in found] == [value.stride() for value in want]
        assert found[0].view(2, 2 * time, 4)._base is found[0]
        assert not found[0]._is_view()
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        torch.autograd.backward(found, [torch.ones_like(value) for value in found])
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 3))
    (record,) = compiled.stats().graphs
    assert (record.status, record.runs) == ("verified", DECOMPOSED)
    assert record.reason == f"{DECOMPOSED} gives outputs other strides, they get eager's: 0"


def test_strides_that_shared_memory_needs_are_a_fault() -> None:
    """A copy with eager's strides would not share memory any more."""

    def transposed(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        return lambda *inputs: [value.t() for value in graph(*inputs)]

    compiled = verified(backend=transposed)(lambda x: x.view(3, 3))
    x = torch.randn(3, 3)
    with pytest.warns(MiscompilationWarning, match=r"strides \(1, 3\), eager has \(3, 1\)"):
        found = compiled(x)
    assert found.data_ptr() == x.data_ptr()
    assert found.stride() == (3, 1)


def test_strides_are_the_same_where_view_can_not_tell() -> None:
    for expected, actual, same in (
        ((6, 1), (6, 1), True),
        ((6, 1), (8, 1), False),  # padded rows: view(-1) raises
        ((8, 1), (6, 1), True),
        ((6, 1), (1, 4), False),
        ((0, 1), (6, 1), True),
        ((6, 1), (0, 1), False),
    ):
        made = [torch.empty_strided((4, 6), strides) for strides in (expected, actual)]
        assert same_strides(*made) is same


# --- custom operators

CALLS: list[str] = []


def operator_called(name: str) -> Any:
    @torch.library.custom_op(f"torchguard_tests::{name}", mutates_args=())
    def made(x: torch.Tensor) -> torch.Tensor:
        CALLS.append(name)
        return x * 2

    made.register_fake(torch.empty_like)
    made.register_autograd(lambda _, gradient: gradient * 2)
    return made


pure = operator_called("pure")
sending = operator_called("sending")


@torch.library.custom_op("torchguard_tests::filling", mutates_args=("x",))
def filling(x: torch.Tensor) -> None:
    x.fill_(3)


@filling.register_fake
def _(x: torch.Tensor) -> None:
    pass


@pytest.fixture
def with_token() -> Iterator[None]:
    """Give the operator ``sending`` a token, as an operator that prints has."""
    operator = torch.ops.torchguard_tests.sending.default
    effects: Any = torch._higher_order_ops.effects
    handle = effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    yield
    effects._deregister_effectful_op(operator) if handle is None else handle.destroy()


def test_a_custom_operator_that_writes_nothing_is_checked() -> None:
    compiled = verified(backend="aot_eager")(lambda x: pure(x) + 1)
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert [record.status for record in compiled.stats().graphs] == ["verified"]
    torch._dynamo.reset()
    spoiled = verified(backend=off_by_one)(lambda x: pure(x) + 1)
    with pytest.warns(MiscompilationWarning):
        assert spoiled(torch.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.usefixtures("with_token")
def test_a_custom_operator_with_a_token_or_that_writes_runs_once() -> None:
    compiled = verified(backend="eager")(lambda x: sending(x) + 1)
    CALLS.clear()
    compiled(torch.ones(3))
    assert CALLS == ["sending"]
    (record,) = compiled.stats().graphs
    assert record.status == "unverified"
    assert record.reason.startswith("torchguard_tests::sending is a custom operator whose schema")

    def writes(x: torch.Tensor) -> torch.Tensor:
        filling(x)
        return x + 1

    compiled = verified(backend="eager")(writes)
    assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
    assert [record.status for record in compiled.stats().graphs] == ["unverified"]


def test_with_other_ranks_a_custom_operator_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an all-reduce: the schema does not say, and a second one would wait for ever."""
    module = torch.fx.symbolic_trace(lambda x: torch.ops.torchguard_tests.pure.default(x) + 1)
    assert why_not_twice(module) is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "may communicate with other ranks" in (why_not_twice(module) or "")


# --- names


def inner(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def tripled_twice(x: torch.Tensor) -> torch.Tensor:
    y = inner(x)
    torch._dynamo.graph_break()
    return inner(y)


class Tripling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tripled_twice(x)


def off_by_one(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    return lambda *inputs: [value + 1 for value in graph(*inputs)]


def test_the_warning_names_what_was_decorated_and_the_backend() -> None:
    """The last statement is in ``inner``, and torch.compile has done nothing wrong."""
    with pytest.warns(MiscompilationWarning) as caught:
        verified(backend=off_by_one)(Tripling())(torch.ones(3))
    first = (
        f"torchguard: the backend off_by_one (torch {torch.__version__}) compiled Tripling wrong:"
    )
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2  # one on each side of the graph break
    for text in texts:
        assert text.splitlines()[0] == first
        assert "none: off_by_one is a callable, which a" in text  # why there is no reproducer


def test_without_a_decorator_it_is_what_dynamo_compiled() -> None:
    backend = verified_backend("eager")
    torch.compile(tripled_twice, backend=backend)(torch.ones(3))
    assert [graph.function for graph in backend.stats().graphs] == ["tripled_twice"] * 2
