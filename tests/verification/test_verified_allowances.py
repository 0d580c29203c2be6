"""verified: each allowance is a share of what is compared, whatever a program scales it with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from support.miscompiling import stats, verified_backend
from torchguard import MiscompilationWarning, verified
from torchguard.equivalence.copies import run_on_copies

pytestmark = pytest.mark.usefixtures("fresh_reports")


def warned(call: Callable[[], Any]) -> int:
    """Return how many mismatches a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum(each.category is MiscompilationWarning for each in caught)


# --- a gradient that is small beside another tensor's

FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch.neg,
    "lost": torch.zeros_like,
    "thirty times too large": lambda gradient: gradient * 30,
}


def with_gradient(place: int, fault: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a backend that is right but for the gradient of one input."""

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> Any:
            return fault(gradient)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        floats = [
            at
            for at, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        chosen = floats[place]

        def run(*values: Any) -> Any:
            spoiled: list[Any] = list(values)
            spoiled[chosen] = Fault.apply(spoiled[chosen])  # type: ignore[no-untyped-call]
            return graph(*spoiled)

        return run

    return backend


def sigmoids(small: torch.Tensor, large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each sigmoid takes a quarter of the gradient at most."""
    for _ in range(12):
        small = small.sigmoid()
    return (small * x).sum() + (large * x).square().mean()


def penalty(small: torch.Tensor, large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 3e-10 * small.square().sum() + (large * x).square().mean()


def scaled(small: torch.Tensor, large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x + 1e-8 * (small * x).relu()) * large).square().mean()


def tiny(small: torch.Tensor, large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 1e-25 * (small * x).sin().sum() + (large * x).square().mean()


@pytest.mark.parametrize("function", [sigmoids, penalty, scaled, tiny])
@pytest.mark.parametrize(
    ("fault", "dtype"), zip(FAULTS, (torch.float32, torch.float64, torch.bfloat16), strict=True)
)
def test_a_gradient_that_is_small_beside_anothers_is_compared(
    function: Any, fault: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    small, large, x = (torch.randn(16, dtype=dtype) for _ in range(3))
    small.requires_grad_()
    large.requires_grad_()
    checked = verified(backend=with_gradient(0, FAULTS[fault]))(function)
    assert warned(lambda: checked(small, large, x)) == 1
    torch._dynamo.reset()
    right = verified(backend="aot_eager")(function)
    assert warned(lambda: right(small, large, x)) == 0
    assert stats(right).verified == 1


# --- values that are small beside others of the same tensor


def rows(weight: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Each row of the weight has a gradient of its own size."""
    return (weight * x * sizes).sum()


def columns(weight: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return weight.detach() * x * sizes


@pytest.mark.parametrize("function", [rows, columns])
@pytest.mark.parametrize(
    ("fault", "dtype", "size"),
    [
        ("negated", torch.float32, 1e-6),
        ("lost", torch.float32, 1e6),
        ("thirty times too large", torch.float64, 1e-8),
        ("negated", torch.bfloat16, 1e-6),
        ("lost", torch.float16, 3e-6),
    ],
)
def test_rows_that_are_small_beside_others_are_compared(
    function: Any, fault: str, dtype: torch.dtype, size: float
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16, dtype=dtype, requires_grad=True), torch.rand(8, 16) + 1
    sizes = torch.ones(8, 1).index_fill(0, torch.tensor([3]), size).to(dtype)
    small = sizes == sizes.min()

    def spoiled(values: torch.Tensor) -> torch.Tensor:
        return torch.where(small, FAULTS[fault](values), values)

    def of_output(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        return lambda *values: [spoiled(each) for each in graph(*values)]

    backend = with_gradient(0, spoiled) if function is rows else of_output
    checked = verified(backend=backend)(function)
    assert warned(lambda: checked(weight, x.to(dtype), sizes)) == 1
    torch._dynamo.reset()
    right = verified(backend="aot_eager")(function)
    assert warned(lambda: right(weight, x.to(dtype), sizes)) == 0
    assert stats(right).verified == 1


class Attention(nn.Module):
    """A third of the bias, that of the keys, has no gradient but what rounding leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mixes(x, x, x, need_weights=False)[0]
        return mixed.square().mean()


def confident(x: torch.Tensor) -> torch.Tensor:
    """Half of the losses are what the rounding of a sum of exponentials leaves."""
    scores = torch.where(torch.arange(64)[:, None] % 2 == 0, x * 20, x)
    return -scores.log_softmax(1).amax(1)


def tails(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.cat([x, x - 5])) + F.logsigmoid(torch.cat([x, x + 16]))


@pytest.mark.parametrize("function", [Attention(), confident, tails])
def test_what_rounding_leaves_of_larger_values_is_no_mismatch(function: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16, 32) if isinstance(function, nn.Module) else torch.randn(64, 32)
    x.requires_grad_()

    def in_double(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        """Compute in another way than eager, to its last digits."""

        def run(*values: Any) -> Any:
            wide = [v.double() if v.is_floating_point() else v for v in values]
            with torch.no_grad():
                noise = [v * 1e-7 * torch.randn_like(v) for v in wide]
            return [each.float() for each in graph(*map(torch.add, wide, noise))]

        return run

    checked = verified(backend=in_double)(function)
    assert warned(lambda: checked(x)) == 0
    assert stats(checked).verified == 1


# --- what a graph writes


def edited(change: Callable[[torch.fx.Graph, torch.fx.Node, str], bool]) -> Any:
    """Make a backend that changes one operation of the graph."""

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if node.op.startswith("call") and change(graph.graph, node, name):
                break
        else:
            raise AssertionError(graph.code)
        graph.recompile()
        return graph.forward

    return backend


def without(name: str) -> Any:
    def change(graph: torch.fx.Graph, node: torch.fx.Node, found: str) -> bool:
        if found != name:
            return False
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
        return True

    return edited(change)


def negated(name: str) -> Any:
    def change(_: torch.fx.Graph, node: torch.fx.Node, found: str) -> bool:
        if found == name:
            node.kwargs = {"alpha": -node.kwargs["alpha"]}  # type: ignore[operator]
        return found == name

    return edited(change)


def steps(state: torch.Tensor, x: torch.Tensor) -> None:
    state.sub_(x, alpha=1e-6)


def averages(state: torch.Tensor, x: torch.Tensor) -> None:
    state.lerp_(x, 1e-5)


def counts(state: torch.Tensor, x: torch.Tensor) -> None:
    state.add_(x.shape[0] / 16)


@pytest.mark.parametrize(
    ("function", "backend", "start"),
    [
        (steps, without("sub_"), 1.0),
        (steps, negated("sub_"), 1.0),
        (averages, without("lerp_"), 1.0),
        (counts, without("add_"), 1e6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_write_that_is_small_beside_what_it_is_added_to_is_compared(
    function: Any, backend: Any, start: float, dtype: torch.dtype
) -> None:
    state, x = torch.full((16,), start, dtype=dtype), torch.linspace(0.2, 0.9, 16, dtype=dtype)
    with torch.no_grad():
        checked = verified(backend=backend)(function)
        assert warned(lambda: checked(state.clone(), x)) == 1
        torch._dynamo.reset()
        right = verified(backend="aot_eager")(function)
        assert warned(lambda: right(state, x)) == 0
    assert stats(right).verified == 1


def decays(lr: float) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return optimizer, model.weight


def without_decay(graph: torch.fx.Graph, node: torch.fx.Node, name: str) -> bool:
    is_decay = name == "_foreach_mul_" and isinstance(node.args[1], float) and not node.users
    if is_decay and 0.9 < node.args[1] < 1:  # type: ignore[operator]
        graph.erase_node(node)
        return True
    return False


@pytest.mark.parametrize("lr", [1e-3, 3e-4, 1e-4, 3e-5])
def test_adamw_without_its_weight_decay_is_a_mismatch(lr: float) -> None:
    optimizer, weight = decays(lr)
    checked = verified(backend=edited(without_decay))(lambda: optimizer.step())  # noqa: PLW0108 - as users write it
    before = weight.detach().clone()
    assert warned(checked) == 1
    assert not torch.equal(weight, before)


def power_iteration(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As ``spectral_norm`` does: what is written hardly differs from what was there."""
    with torch.no_grad():
        u.copy_(F.normalize(w @ F.normalize(w.t() @ u, dim=0), dim=0))
    return (u.clone() @ w).sum()


def many_writes(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for row in w:
            u.add_(row, alpha=1e-4).mul_(0.999)
    return (u.clone() @ w).sum()


def in_another_order(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compute in double precision and round once, as no eager run does."""

    def run(*values: Any) -> Any:
        wide = [v.detach().double().requires_grad_(v.requires_grad) for v in values]
        outputs = graph(*wide)
        with torch.no_grad():
            for value, now in zip(values, wide, strict=True):
                if not value.requires_grad:
                    value.copy_(now)
        return [each.to(inputs[0].dtype) for each in outputs]

    return run


@pytest.mark.parametrize("function", [power_iteration, many_writes])
def test_what_is_written_with_other_last_digits_is_no_mismatch(function: Any) -> None:
    torch.manual_seed(0)
    u, w = F.normalize(torch.randn(48), dim=0), torch.randn(48, 48)
    for _ in range(200):
        power_iteration(u, w)
    checked = verified(backend=in_another_order)(function)
    assert warned(lambda: checked(u, w)) == 0
    assert stats(checked).verified == 1


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}),
    (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 1e-4}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_no_step_of_an_optimizer_is_a_false_alarm(kind: Any, options: dict[str, Any]) -> None:
    """As inductor rounds it, which aot_eager does as eager does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = kind(model.parameters(), **options)
    step = verified()(lambda: optimizer.step())  # noqa: PLW0108 - likewise
    x = torch.randn(8, 16)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()

    assert warned(train) == 0
    assert stats(step).mismatched == 0
    assert stats(step).verified == len(stats(step).graphs)


# --- copies that both runs share


def test_a_write_that_eager_does_not_make_is_found_in_copies_that_both_runs_share() -> None:
    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*values: Any) -> Any:
            outputs = graph(*values)
            values[0].data.add_(1e-3)  # which no version counter counts
            return outputs

        return run

    x = torch.ones(8)
    checked = verified(backend=backend)(lambda x: (x * 2, x[2:]))
    assert warned(lambda: checked(x)) == 1
    assert x.tolist() == [1] * 8


def test_a_run_leaves_copies_to_the_next_only_if_it_has_not_written_them() -> None:
    x, y = torch.ones(4), torch.ones(4)
    eager = run_on_copies(lambda a, b: [a.data.add_(1) * b], [x, y])
    assert eager.inputs[1].data_ptr() == y.data_ptr()
    assert eager.inputs[0].tolist() == [2] * 4
    assert len(eager.spare) == 1
    again = run_on_copies(lambda a, b: [a * b], [x, y], reference=eager)
    assert again.outputs[0].tolist() == [1] * 4
    assert (x.tolist(), y.tolist(), eager.spare) == ([1] * 4, [1] * 4, {})


# --- a backward that raises in eager only


class Masks(torch.autograd.Function):
    """Writes the gradient that it is given, which may be expanded."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 0.0, 1.0, 0.0])

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(torch.tensor([1.0, 0.0, 1.0, 0.0]))


def residual(x: torch.Tensor) -> torch.Tensor:
    half = x * 2
    masked: torch.Tensor = Masks.apply(half)  # type: ignore[no-untyped-call]
    return (masked + half).sum()


@pytest.mark.parametrize("options", [{}, {"against": "python"}])
def test_a_backward_that_raises_in_eager_only_is_a_mismatch(options: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/81417"""
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="single memory location"):
        residual(x).backward()
    try:
        torch.compile(residual, backend="aot_eager")(x)
    except torch._dynamo.exc.BackendCompilerFailed:
        pytest.skip("this torch refuses to compile it")
    torch._dynamo.reset()
    checked = verified(backend="aot_eager", **options)(residual)
    assert warned(lambda: checked(x)) == 1
    with pytest.raises(RuntimeError, match="single memory location"):
        checked(x).backward()


def test_a_large_tensor_that_differs_at_one_place_is_found() -> None:
    """It is compared in blocks."""
    x = torch.ones(3 * 2**20 + 5)

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*values: Any) -> Any:
            (out,) = graph(*values)
            out[-1] += 1e-3
            return (out,)

        return run

    checked = torch.compile(lambda x: x * 2, backend=verified_backend(backend))
    assert warned(lambda: checked(x)) == 1
