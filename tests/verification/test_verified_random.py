"""Graphs that draw random numbers are verified: no false alarm, nothing wrong passes."""

from __future__ import annotations

import functools
import runpy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import fx, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from support.inductor_without_code import inductor_without_code
from support.miscompiling import right, stats
from support.slow import slow_except
from support.trained import TRAINED
from support.zoo import MORE, ZOO, Architecture
from torchguard import MiscompilationWarning, verified
from torchguard.errors import TorchGuardWarning, UnverifiedWarning
from torchguard.verification import random as draws
from torchguard.verification.backend import Inner, Options, inner_of

pytestmark = pytest.mark.usefixtures("fresh_reports")

aten = torch.ops.aten


# --- single functions


class NoisyBackward(torch.autograd.Function):
    """Draws in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient) * 0.1


class DropoutInBackward(NoisyBackward):
    """No mode sees which function it calls there."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return functional.dropout(gradient, 0.3)


class BernoulliInBackward(NoisyBackward):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.empty_like(gradient).bernoulli_(0.7)


class NoiseForBackward(torch.autograd.Function):
    """Draws in its forward what its backward alone uses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.rand_like(x))
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def filled(name: str, *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor in place."""
    return lambda x: getattr(torch.zeros_like(x), name)(*args) * x


def recomputed(block: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return what runs a block checkpointed."""
    return lambda x: checkpoint(block, x, use_reentrant=False, **options) * 2


def drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8) / 0.8


def dead_draw(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return functional.dropout(x, 0.5).sin()


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Draws by seeds and by operators that inductor leaves to eager."""
    first = functional.dropout(x, 0.3) * torch.bernoulli(torch.sigmoid(x.detach()))
    second = torch.feature_dropout(x[None], 0.2, train=True)[0]
    return functional.dropout(first + torch.rand_like(x), 0.1) * second


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.dropout(x @ x.t(), 0.3) * 1.0


def attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


def dropping(rate: float = 0.3, name: str = "dropout", **options: Any) -> Callable[..., Any]:
    """Return a function with one kind of dropout."""
    kind = getattr(functional, name)
    return lambda x: kind(x * 1.0, rate, training=True, **options) * 2


def bernoulli_in_backward(x: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x.detach().sigmoid()) * x


HEADS = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

SMALL: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "dropout": (dropping(), (4, 6)),
    "two dropouts": (lambda x: dropping(0.5)(dropping()(x).sin()), (4, 6)),
    "dropout2d": (dropping(name="dropout2d"), (2, 3, 5, 5)),
    "randn": (lambda x: x + torch.randn(4, 6), (4, 6)),
    "attention": (attention, (2, 4, 8)),
    "noise in a backward": (lambda x: NoisyBackward.apply(x) * 2, (4, 6)),  # type: ignore[no-untyped-call]
    "dropout in a backward": (lambda x: DropoutInBackward.apply(x) * 2, (4, 6)),  # type: ignore[no-untyped-call]
    "bernoulli_ in a backward": (lambda x: BernoulliInBackward.apply(x) * 2, (4, 6)),  # type: ignore[no-untyped-call]
    "checkpointed": (recomputed(lambda x: dropping()(x.sin()).cos()), (4, 6)),
    "checkpointed, by eager": (
        recomputed(lambda x: dropping(name="alpha_dropout")(x.sin()).cos()), (4, 6)
    ),
    "mixed": (mixed, (4, 6)),
    "a dead draw": (dead_draw, (4, 6)),
    # What inductor fuses it leaves in float32, where eager rounds.
    "noise in bfloat16": (lambda x: torch.randn_like(x.bfloat16()).float() * x, (4, 6)),
}  # fmt: skip
"""One of each kind; the others are of the sweep."""

SWEEP: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a module": (nn.Dropout(0.1), (4, 6)),
    "rate 0": (dropping(0.0), (4, 6)),
    "not in training": (lambda x: functional.dropout(x, 0.5, training=False) * x, (4, 6)),
    "in place": (dropping(inplace=True), (4, 6)),
    "transposed": (lambda x: functional.dropout(x.t(), 0.3) * 2, (4, 6)),
    "every second": (lambda x: functional.dropout(x[:, ::2], 0.3) * 2, (4, 8)),
    "expanded": (lambda x: functional.dropout(x.expand(3, 4, 6), 0.3) * 2, (4, 6)),
    "channels last": (
        lambda x: dropping()(x.contiguous(memory_format=torch.channels_last)), (2, 3, 4, 4)
    ),
    "bfloat16": (lambda x: functional.dropout(x.bfloat16(), 0.3) * 2, (4, 6)),
    "float16": (lambda x: functional.dropout(x.half(), 0.3) * 2, (4, 6)),
    "float64": (lambda x: functional.dropout(x.double(), 0.3) * 2, (4, 6)),
    "a scalar": (lambda x: functional.dropout(x.sum(), 0.3) * 2, (4, 6)),
    "dropout1d": (dropping(name="dropout1d"), (2, 3, 5)),
    "dropout3d": (dropping(name="dropout3d"), (2, 3, 4, 4, 4)),
    "alpha_dropout": (dropping(name="alpha_dropout"), (4, 6)),
    "feature_alpha_dropout": (dropping(name="feature_alpha_dropout"), (2, 3, 4)),
    "rand": (lambda x: x + torch.rand(4, 6), (4, 6)),
    "rand in float64": (lambda x: x + torch.rand(4, 6, dtype=torch.float64), (4, 6)),
    "rand_like": (lambda x: x + torch.rand_like(x), (4, 6)),
    "rand_like in bfloat16": (lambda x: x + torch.rand_like(x, dtype=torch.bfloat16), (4, 6)),
    "rand_like in float16": (lambda x: (x.half() + torch.rand_like(x.half())).float(), (4, 6)),
    "uniform_ in bfloat16": (
        lambda x: torch.zeros_like(x.bfloat16()).uniform_(-1, 1).float() * x, (4, 6)
    ),
    "normal of bfloat16": (
        lambda x: torch.normal(x.detach().bfloat16(), 1.0).float() * x, (4, 6)
    ),
    "randn_like": (lambda x: x * torch.randn_like(x), (4, 6)),
    "randn_like transposed": (lambda x: x.t() * torch.randn_like(x.t()), (4, 6)),
    "randint": (lambda x: x + torch.randint(0, 10, (4, 6)), (4, 6)),
    "randint of many": (lambda x: x + torch.randint(-5, 1_000_000, (4, 6)), (4, 6)),
    "randint_like": (lambda x: x + torch.randint_like(x, 5), (4, 6)),
    "bernoulli": (bernoulli_in_backward, (4, 6)),
    "bernoulli of one rate": (lambda x: torch.bernoulli(x.detach(), 0.3) * x, (4, 6)),
    "bernoulli_": (filled("bernoulli_", 0.3), (4, 6)),
    "bernoulli_ of rates": (
        lambda x: torch.zeros_like(x).bernoulli_(x.detach().sigmoid()) * x, (4, 6)
    ),
    "normal of tensors": (lambda x: torch.normal(x.detach(), torch.ones_like(x)) * x, (4, 6)),
    "normal of numbers": (lambda x: torch.normal(0.0, 1.0, (4, 6)) * x, (4, 6)),
    "normal_": (filled("normal_", 1.0, 2.0), (4, 6)),
    "uniform_": (filled("uniform_", -1.0, 2.0), (4, 6)),
    "exponential_": (filled("exponential_", 2.0), (4, 6)),
    "cauchy_": (filled("cauchy_"), (4, 6)),
    "geometric_": (filled("geometric_", 0.3), (4, 6)),
    "log_normal_": (filled("log_normal_"), (4, 6)),
    "random_": (filled("random_", 0, 10), (4, 6)),
    "multinomial": (lambda x: torch.multinomial(x.detach().softmax(-1), 2) * x.sum(), (4, 6)),
    "poisson": (lambda x: torch.poisson(x.detach().abs()) * x, (4, 6)),
    "gumbel_softmax": (lambda x: functional.gumbel_softmax(x, 0.5), (4, 6)),
    "hard gumbel_softmax": (lambda x: functional.gumbel_softmax(x, 0.5, hard=True), (4, 6)),
    "rrelu": (lambda x: functional.rrelu(x, training=True) * 2, (4, 6)),
    "rrelu in place": (
        lambda x: functional.rrelu(x * 1.0, training=True, inplace=True) * 2, (4, 6)
    ),
    "multi-head attention": (lambda x: HEADS(x, x, x)[0], (2, 4, 8)),
    "drop path": (drop_path, (4, 3, 2)),
    "noise for a backward": (lambda x: NoiseForBackward.apply(x) * 2, (4, 6)),  # type: ignore[no-untyped-call]
    "noise in a backward, dropout before": (lambda x: NoisyBackward.apply(dropping()(x)), (4, 6)),  # type: ignore[no-untyped-call]
    "dropout around a block": (
        lambda x: dropping()(recomputed(lambda y: dropping()(y.sin()).cos())(dropping()(x))), (4, 6)
    ),
    "two blocks": (lambda x: recomputed(dropping())(recomputed(dropping())(x)), (4, 6)),
    "a block in a block": (recomputed(lambda x: recomputed(dropping())(x.sin())), (4, 6)),
    "a dead draw between": (
        lambda x: (dropping()(x), torch.rand(2))[0] * dropping(0.2)(x), (4, 6)
    ),
    "autocast": (under_autocast, (4, 6)),
    "without gradients": (torch.no_grad()(dropping()), (4, 6)),
    "noise that is written": (lambda x: x.detach().clone().add_(torch.randn_like(x)), (4, 6)),
    "a layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
    "several results": (lambda x: (dropping()(x), torch.rand_like(x) > 0.5), (4, 6)),
}  # fmt: skip


def check(function: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> Any:
    """Verify a function's graphs, and return what says so; a warning is an error."""
    checked = verified(**options)(
        function if not isinstance(function, nn.Module) else function.forward
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = checked(torch.randn(shape, requires_grad=True))
    result = result[0] if isinstance(result, tuple) else result
    if result.requires_grad:
        result.sum().backward()
    return checked


def assert_verified(checked: Any) -> None:
    """Check that each graph is verified."""
    graphs = stats(checked).graphs
    assert graphs
    assert [graph.status for graph in graphs] == ["verified"] * len(graphs), stats(checked)


FUNCTIONS = {**SMALL, **SWEEP}


@pytest.mark.parametrize("name", slow_except(FUNCTIONS, *SMALL))
def test_what_draws_is_verified(name: str) -> None:
    with inductor_without_code():
        assert_verified(check(*FUNCTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *(each for each in SWEEP if "float16" in each)])
def test_what_draws_is_verified_with_real_code(name: str) -> None:
    assert_verified(check(*FUNCTIONS[name]))


# --- models as they are trained


def steps(loss: Callable[[], torch.Tensor]) -> None:
    """Go forward and backward twice; a warning of torchguard is an error."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TorchGuardWarning)
        for _ in range(2):
            loss().backward()


# torch.compile fails on the masks that wav2vec2 writes in training, with and without a check.
IN_TRAINING = [each for each in (*ZOO, *MORE) if each.name != "wav2vec2"]
GRAPHS = {
    **dict.fromkeys((*TRAINED, *map(str, IN_TRAINING)), 1),
    **dict.fromkeys(("gpt2", "swin", "vit", "convnext"), 2),
}
"""How many graphs each model has, all of which are verified."""


def test_as_many_functions_and_graphs_are_tried_as_were() -> None:
    assert (len(FUNCTIONS) >= 60, sum(GRAPHS.values()) >= 41) == (True, True)


@pytest.mark.parametrize("name", slow_except(TRAINED, "checkpointed decoder", "mixer"))
def test_a_model_is_verified_as_it_is_trained(name: str) -> None:
    make, batch = TRAINED[name]
    with inductor_without_code():
        model: Any = verified(make())
        steps(lambda: model(*batch()))
        assert_verified(model)
        assert len(stats(model).graphs) == GRAPHS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed decoder", "experts"])
def test_a_model_is_verified_with_real_code(name: str) -> None:
    make, batch = TRAINED[name]
    model: Any = verified(make())
    steps(lambda: model(*batch()))
    assert_verified(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", IN_TRAINING, ids=str)
def test_a_model_of_transformers_is_verified_as_it_is_trained(architecture: Architecture) -> None:
    """With the dropout that its configuration has by default."""
    model: Any = architecture.build(to_compile=True, dropout=True).train()
    with inductor_without_code():
        checked = verified(model)
        steps(lambda: architecture.loss(checked, architecture.batch([7, 4])))
        assert_verified(checked)
        assert len(stats(checked).graphs) == GRAPHS[str(architecture)]


# --- the program's own call


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_the_program_draws_what_it_draws_without_it(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5) + torch.rand_like(x)

    found = []
    with inductor_without_code():
        for compile_ in (torch.compile, verified):
            torch._dynamo.reset()
            compiled = compile_(function, backend=backend)
            torch.manual_seed(3)
            found.append([*(compiled(torch.ones(40)) for _ in range(3)), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_new_sizes_share_graphs_of_an_operator() -> None:
    def function(x: torch.Tensor) -> Any:
        rows, columns = x.shape
        bounds = torch.randint(rows, (2,)), torch.randint(rows, columns, (3,))
        return dropping()(x) + torch.rand(x.shape), *bounds, torch.randperm(columns)

    with inductor_without_code():
        checked = verified(dynamic=True)(function)
        for rows in range(3, 9):
            checked(torch.ones(rows, 2 * rows))
        (graph,) = stats(checked).graphs
        assert (graph.status, graph.checks) == ("verified", 6)
        assert sum(map(len, draws._compiled.values())) == 5


def test_several_calls_are_checked() -> None:
    with inductor_without_code():
        checked = verified(calls=3)(dropping())
        for _ in range(4):
            checked(torch.ones(4, 6))
        (graph,) = stats(checked).graphs
        assert (graph.status, graph.checks) == ("verified", 3)


# --- what is not understood


def test_what_is_not_checked_is_said_once_for_each_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnverifiedWarning)
        monkeypatch.setenv("TORCHGUARD", "off")
        verified(noisy, backend=right)(torch.ones(2))
        monkeypatch.delenv("TORCHGUARD")
        for function in (noisy, noisy, other):
            compiled = verified(function, backend=right)
            for rows in (3, 4, 5):
                torch._dynamo.reset()
                compiled(torch.ones(rows))
    said = [str(each.message) for each in caught if each.category is UnverifiedWarning]
    assert len(said) == 2
    assert "noisy" in said[0]
    assert "planted may draw in its own way" in said[0]
    assert caught[0].filename == __file__
    assert "other" in said[1]


def test_a_cuda_graph_is_left_alone() -> None:
    inner = inner_of(Options(mode="reduce-overhead"), {})
    assert "CUDA graph" in inner.why_draws_differ(on_gpu=True)
    assert not inner.why_draws_differ(on_gpu=False)  # nothing is recorded there
    assert not inner_of(Options(), {}).why_draws_differ(on_gpu=True)


def test_what_would_be_recorded_as_a_cuda_graph_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors are taken for some on a GPU; where nothing is random the check goes on."""
    differ = Inner.why_draws_differ
    monkeypatch.setattr(Inner, "why_draws_differ", lambda self, **_: differ(self, on_gpu=True))
    with inductor_without_code(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnverifiedWarning)
        checked = verified(mode="reduce-overhead")(dropping())
        for rows in (3, 4, 5):
            torch.manual_seed(0)
            checked(torch.ones(rows, 6))
        graphs = stats(checked).graphs
        assert_verified(check(torch.sin, (4, 6), mode="reduce-overhead"))
    assert {(each.status, each.runs) for each in graphs} == {("unverified", "inductor")}
    assert all("CUDA graph that is recorded" in each.reason for each in graphs)
    (said,) = [str(each.message) for each in caught if each.category is UnverifiedWarning]
    assert "CUDA graph that is recorded" in said


# --- planted faults


def on_operator(
    name: str, place: int, change: Callable[[fx.Graph, fx.Node], fx.Node]
) -> Callable[..., None]:
    """Return a fault: ``change`` what the operator at ``place`` gives, in forward or backward."""

    def fault(graph: fx.GraphModule, *, is_backward: bool) -> None:
        backward, _, operator = name.rpartition(" ")
        nodes = [n for n in graph.graph.nodes if str(n.target).startswith(operator)]
        if is_backward is bool(backward) and nodes:
            node = nodes[place]
            with graph.graph.inserting_after(node):
                made = change(graph.graph, node)
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    return fault


def scaled(factor: float) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    """Multiply."""
    return lambda graph, node: graph.call_function(aten.mul.Tensor, (node, factor))


def inverted(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(aten.logical_not.default, (node,))


def network(x: torch.Tensor) -> torch.Tensor:
    """(4, 6) -> (4, 6), with three dropouts, one of them checkpointed."""
    first = functional.dropout(torch.tanh(x * 1.3), 0.4)
    block = recomputed(lambda y: functional.dropout(torch.sigmoid(y).exp(), 0.3).sin())(first)
    return functional.dropout(block.cos(), 0.2).exp()


FAULTS = {
    "early": on_operator("aten.tanh", 0, scaled(1.01)),
    "middle": on_operator("aten.sigmoid", 0, scaled(1.01)),
    "late": on_operator("aten.exp", -1, scaled(1.01)),
    "early in backward": on_operator("backward aten.mul", 0, scaled(1.01)),
    "late in backward": on_operator("backward aten.mul", -1, scaled(1.01)),
    "inverted": on_operator("aten.gt", 1, inverted),
    "inverted when computed again": on_operator("backward aten.gt", 0, inverted),
    "lost scale": on_operator("aten.mul", 1, scaled(0.6)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    with inductor_without_code(FAULTS[name]):
        checked = verified()(network)
        with pytest.warns(MiscompilationWarning):
            checked(torch.randn(4, 6, requires_grad=True))
        (graph,) = stats(checked).graphs
        assert graph.status == "mismatched"


@pytest.mark.filterwarnings("ignore")
def test_a_fault_is_found_beside_what_a_backward_draws() -> None:
    """Inductor draws it in the forward already."""

    def function(x: torch.Tensor) -> Any:
        return NoisyBackward.apply(functional.dropout(x.tanh(), 0.5)).exp()  # type: ignore[no-untyped-call]

    with inductor_without_code(FAULTS["early"]):
        checked = verified(function)
        checked(torch.randn(4, 6, requires_grad=True))
        assert [graph.status for graph in stats(checked).graphs] == ["mismatched"]


@pytest.mark.filterwarnings("ignore")
def test_the_reproducer_has_both_draw_the_same() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x.tanh(), 0.5).exp()

    found: list[bool] = []
    for fault in (FAULTS["early"], None):
        with inductor_without_code(FAULTS["early"]):
            checked = verified(function)
            checked(torch.randn(4, 6, requires_grad=True))
            (graph,) = stats(checked).graphs
        assert graph.reproducer is not None
        with inductor_without_code(fault):
            scope = runpy.run_path(graph.reproducer, run_name=f"reproducer{len(found)}")
        found.append(bool(scope["wrong"]))
    assert found == [True, False]


@pytest.mark.parametrize("dead", [False, True])
def test_a_mask_that_is_drawn_again_in_the_backward_is_found(dead: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/190758"""

    def function(x: torch.Tensor) -> torch.Tensor:
        if dead:
            torch.rand(3)
        return functional.dropout(functional.dropout(x.sin(), 0.5).cos(), 0.5).exp()

    with (
        inductor_without_code(),
        torch._functorch.config.patch(activation_memory_budget=0.0),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        checked = verified()(function)
        checked(torch.randn(40, requires_grad=True))
        (graph,) = stats(checked).graphs
        assert graph.status == "mismatched"


# --- checkpointed blocks


def save_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator is aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def block(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x * 1.0, 0.5) * 1.0


BLOCKS: dict[str, Callable[..., Any]] = {
    "plain": recomputed(block),
    "selective": recomputed(
        block, context_fn=functools.partial(create_selective_checkpoint_contexts, save_products)
    ),
    "nested": recomputed(lambda x: recomputed(block)(x * 1.0) * 1.0),
    "by eager": recomputed(
        lambda x: functional.dropout2d(x.view(1, -1, 5, 2) * 1.0, 0.5).view(-1) * 1.0
    ),
    "state not kept": recomputed(block, preserve_rng_state=False),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "options",
    [{"backend": "aot_eager"}, {"backend": "eager"}, {"backend": "aot_eager", "against": "python"}],
    ids=str,
)
def test_a_checkpointed_block_keeps_its_mask(name: str, options: dict[str, Any]) -> None:
    """Of 2.13 the backend "eager" draws another one in the backward; it is not left to run."""
    if (name, options.get("against")) == ("state not kept", "python"):
        pytest.skip("Python draws other numbers, as it is told")
    checked: Any = verified(**options)(BLOCKS[name])
    for seed in range(2):
        x = torch.ones(2000, requires_grad=True)
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if options["backend"] == "eager" else "error")
            result = checked(x)
        result.sum().backward()
        assert x.grad is not None
        assert torch.equal(result != 0, x.grad != 0)
    if options["backend"] != "eager":
        assert_verified(checked)
