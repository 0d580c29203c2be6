"""Fused steps on the CPU: right for any layout of memory, and for bfloat16 and float16."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of
from torchguard.transactions.hooks import fused_replacements


def optimizer_of(kind: Any, **fixed: Any) -> Callable[..., Any]:
    return lambda parameters, **options: kind(parameters, lr=0.1, **fixed, **options)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": optimizer_of(torch.optim.SGD),
    "SGD with momentum": optimizer_of(torch.optim.SGD, momentum=0.9),
    "SGD with dampening": optimizer_of(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "Adam": optimizer_of(torch.optim.Adam),
    "Adam with amsgrad": optimizer_of(torch.optim.Adam, amsgrad=True),
    "AdamW": optimizer_of(torch.optim.AdamW),
    "Adagrad": optimizer_of(torch.optim.Adagrad),
}
# Each has the elements of a contiguous tensor, in another place.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.stack((t, t + 1), dim=-1)[..., 0],
    "expanded": lambda t: t[:1].clone().expand_as(t),
    "one number": lambda t: t[:1, :1].clone().expand_as(t),  # the gradient of a sum
}
SHAPE = 24, 20
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["install", "transaction"])
def guard(request: pytest.FixtureRequest) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    if request.param == "install":
        return lambda *_: torchguard.install("optimizer")

    @contextlib.contextmanager
    def transactions(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        module = nn.Module()
        module.register_parameter("weight", parameter)
        step = torchguard.transaction(module, optimizer)
        plain = optimizer.step

        def in_block() -> None:
            with step:
                plain()

        optimizer.step = in_block  # type: ignore[assignment, method-assign]
        yield
        del optimizer.step  # it holds the transaction, which holds the optimizer

    return transactions


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_parameter", ["contiguous", "transposed", "with gaps"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layouts_do_not_matter(name: str, of_parameter: str, of_gradient: str, guard: Any) -> None:
    """The bits are those of contiguous tensors; the gradient stays the user's, to the stride."""
    expected = nn.Parameter(numbers(0))
    reference = OPTIMIZERS[name]([expected], fused=True)
    parameter = nn.Parameter(LAYOUTS[of_parameter](expected.detach()))
    optimizer = OPTIMIZERS[name]([parameter], fused=True)
    beside = parameter.detach().as_strided((24, 20), (40, 2), 1) if "gaps" in of_parameter else None
    before = beside.clone() if beside is not None else None
    with guard(parameter, optimizer):
        for seed in range(1, 4):
            gradient = LAYOUTS[of_gradient](numbers(seed))
            strides, version = gradient.stride(), gradient._version
            parameter.grad = gradient
            optimizer.step()
            assert parameter.grad is gradient
            assert (gradient.stride(), gradient._version) == (strides, version)
            assert torch.equal(gradient, LAYOUTS[of_gradient](numbers(seed)))
    for seed in range(1, 4):
        expected.grad = LAYOUTS[of_gradient](numbers(seed)).contiguous()
        reference.step()
    assert torch.equal(parameter, expected)
    for kind, value in reference.state[expected].items():
        assert torch.equal(optimizer.state[parameter][kind], value), kind
    if beside is not None and before is not None:
        assert torch.equal(beside, before)


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam with amsgrad", "Adagrad"])
def test_a_model_that_becomes_channels_last_keeps_its_moments(name: str, guard: Any) -> None:
    """Module.to(memory_format=...) changes parameters and gradients, not the optimizer's state."""
    torch.manual_seed(0)
    plain, other = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(3, 4, 3, bias=False)
    other.load_state_dict(plain.state_dict())
    reference = OPTIMIZERS[name](plain.parameters(), foreach=False)
    optimizer = OPTIMIZERS[name](other.parameters(), fused=True)
    with guard(other.weight, optimizer):
        for seed in range(3):
            if seed == 1:
                other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for module, each in ((plain, reference), (other, optimizer)):
                module(numbers(seed, (2, 3, 8, 8))).square().sum().backward()
                each.step()
                each.zero_grad()
    assert torch.allclose(plain.weight, other.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_scaler_finds_the_gradient_unscaled(layout: str, dtype: torch.dtype) -> None:
    """A fused kernel divides the gradient by the scale; what it divided was a copy."""
    parameter = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    optimizer: Any = torch.optim.SGD([parameter], lr=1.0, fused=True)
    gradient = LAYOUTS[layout](numbers(0).to(dtype))
    expected = gradient.contiguous() / 4
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    parameter.grad = gradient
    with torchguard.install("optimizer"):
        optimizer.step()
    assert parameter.grad is gradient
    assert torch.equal(gradient.contiguous(), expected)
    assert torch.equal(parameter, -expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"maximize": True}],
    ids=str,
)
def test_half_precision_is_trained(options: dict[str, Any], dtype: torch.dtype, guard: Any) -> None:
    """As in float32, each step rounded; torch up to 2.13 leaves most of the elements alone."""
    weight = numbers(0, (77,)).to(dtype)
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True, **options)
    exact = nn.Parameter(weight.float())
    reference = torch.optim.SGD([exact], lr=0.1, fused=True, **options)
    with guard(parameter, optimizer):
        for seed in range(1, 4):
            parameter.grad = numbers(seed, (77,)).to(dtype)
            exact.grad = parameter.grad.float()
            optimizer.step()
            reference.step()
            with torch.no_grad():
                exact.copy_(exact.to(dtype))
                for state in reference.state.values():
                    if state.get("momentum_buffer") is not None:
                        state["momentum_buffer"].copy_(state["momentum_buffer"].to(dtype))
    assert torch.equal(parameter.float(), exact)
    buffer = optimizer.state[parameter].get("momentum_buffer")
    assert buffer is None or buffer.dtype == dtype


def test_a_closure_makes_the_gradient_inside_of_step() -> None:
    def closure() -> torch.Tensor:
        parameter.grad = LAYOUTS["transposed"](numbers(0))
        return parameter.sum()

    for guard in ("resize", "optimizer"):  # torch alone gets it wrong
        parameter = nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        with torchguard.install(guard):
            optimizer.step(closure)
        assert torch.equal(parameter, -numbers(0)) is (guard == "optimizer")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_sparse_gradient_is_torchs_error_and_is_forgotten(kind: Any, guard: Any) -> None:
    """``step()`` before and after it steps as plain torch does."""

    def steps(scope: Callable[..., Any]) -> list[str]:
        parameter = nn.Parameter(torch.zeros(4, 2))
        optimizer = kind([parameter], lr=0.1, fused=True)
        found = []
        with scope(parameter, optimizer):
            for layout in "sdds":
                one = torch.ones(4, 2)
                parameter.grad = one.to_sparse(1) if layout == "s" else one
                try:
                    optimizer.step()
                except RuntimeError as error:
                    found.append(str(error))
                found.append(str(parameter.tolist()))
        return found

    assert steps(guard) == steps(lambda *_: contextlib.nullcontext())


def test_fake_tensors_have_no_memory_to_copy() -> None:
    """With a copy of their gradients the process ends by a segmentation fault."""
    output_of("""
        import torch, torchguard
        from torch._subclasses.fake_tensor import FakeTensorMode

        torchguard.install("optimizer")
        with FakeTensorMode():
            parameter = torch.nn.Parameter(torch.ones(3, 4))
            parameter.grad = torch.ones(4, 3).t()
            torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    """)


def test_other_code_sees_torch_again() -> None:
    """After the last guard the kernels are called as torch calls them."""
    places = [path.rpartition(".") for path in fused_replacements()]

    def standing() -> list[Any]:
        return [getattr(sys.modules[module], name) for module, _, name in places]

    before = standing()
    module = nn.Linear(2, 2)
    step = torchguard.transaction(module, torch.optim.SGD(module.parameters(), fused=True))
    assert not set(standing()) & set(before)
    with torchguard.install("optimizer"):
        pass
    assert not set(standing()) & set(before)
    del step
    assert standing() == before
