"""Loading and to_empty() leave one parameter where there was one; an optimizer goes by names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from torchguard.errors import TorchGuardWarning


class Tied(nn.Module):
    """An embedding whose weight is that of the output layer, and a tied buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("same_scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.embedding(x))
        return logits


def is_tied(model: Any) -> bool:
    return model.embedding.weight is model.output.weight and model.scale is model.same_scale


def separate(model: nn.Module, value: float | None = None) -> dict[str, Any]:
    """A state whose tensors share no memory, as safetensors gives it."""
    state = {name: each.clone() for name, each in model.state_dict().items()}
    return state if value is None else {k: torch.full_like(v, value) for k, v in state.items()}


def ours(target: Any, state: Any, **options: Any) -> Any:
    return torchguard.load_state_dict(target, state, **options)


def installed(target: Any, state: Any, **options: Any) -> Any:
    with torchguard.install("load"):
        return target.load_state_dict(state, **options)


def trained(model: nn.Module) -> torch.Tensor:
    """The weight after five steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tokens = torch.arange(5)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    return next(model.parameters()).detach()


LOADERS = pytest.mark.parametrize("load", [ours, installed])


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


class TestLoad:
    @LOADERS
    @pytest.mark.parametrize("make", [Tied, on_meta])
    def test_assign_trains_as_a_copy_does(
        self, load: Callable[..., Any], make: Callable[[], Tied]
    ) -> None:
        torch.manual_seed(0)
        state = separate(Tied())
        model, copied, plain = make(), Tied(), make()
        assert load(
            model, copy.deepcopy(state), assign=True
        ) == nn.modules.module._IncompatibleKeys([], [])
        copied.load_state_dict(state)
        plain.load_state_dict(copy.deepcopy(state), assign=True)
        assert is_tied(model)
        assert not is_tied(plain)
        assert model.embedding.weight.requires_grad
        expected = trained(copied)
        assert torch.equal(trained(model), expected)
        assert not torch.equal(trained(plain), expected)

    @LOADERS
    @pytest.mark.parametrize("left_out", ["embedding.weight", "output.weight"])
    def test_a_state_with_one_of_the_names(self, load: Callable[..., Any], left_out: str) -> None:
        """What a copy does: the other name has the value, too."""
        model, state = Tied(), separate(Tied(), 7.0)
        del state[left_out]
        result = load(model, state, strict=False, assign=True)
        assert result.missing_keys == [left_out]
        assert is_tied(model)
        assert bool((model.output.weight == 7).all())

    @LOADERS
    @pytest.mark.parametrize("assign", [True, False])
    def test_two_values_for_one_tensor(self, load: Callable[..., Any], assign: bool) -> None:
        """An error that names both, and the model is as it was; torch takes the last one."""
        model, state = Tied(), separate(Tied(), 1.0)
        state["output.weight"] += 1
        before, weight = separate(model), model.embedding.weight
        with pytest.raises(RuntimeError, match=r"embedding\.weight and output\.weight are one"):
            load(model, state, assign=assign)
        assert is_tied(model)
        assert model.embedding.weight is weight
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        model.load_state_dict(state)
        assert bool((model.embedding.weight == 2).all())

    @LOADERS
    @pytest.mark.parametrize("assign", [True, False])
    @pytest.mark.parametrize(
        ("value", "dtype"), [(float("nan"), torch.bfloat16), (0.0, torch.float32)]
    )
    def test_equal_values_are_no_error(
        self, load: Callable[..., Any], assign: bool, value: float, dtype: torch.dtype
    ) -> None:
        model, state = Tied().to(dtype), separate(Tied().to(dtype), value)
        model.same_scale = model.scale
        state["output.weight"] = state["output.weight"].t().contiguous().t()
        load(model, state, assign=assign)
        assert is_tied(model) or not assign

    @LOADERS
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
    def test_recurrent_layers(self, load: Callable[..., Any], kind: Any) -> None:
        """One with two names, and two with one weight; both compute with a list besides."""
        first, second = kind(2, 2), kind(2, 2)
        second.weight_hh_l0 = first.weight_hh_l0
        model = nn.ModuleList([first, first, second])
        load(model, separate(model), assign=True)
        assert first.weight_hh_l0 is second.weight_hh_l0
        for layer in (first, second):
            assert all(any(p is each for each in layer._flat_weights) for p in layer.parameters())
            assert all(each is not None for each in layer.all_weights[0])

    @LOADERS
    def test_what_was_not_tied_is_not_tied(self, load: Callable[..., Any]) -> None:
        model: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        state = separate(model)
        load(model, state, assign=True)
        assert model[0].weight is not model[1].weight
        assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()


class TestToEmpty:
    def test_from_the_meta_device(self) -> None:
        plain, model = on_meta(), on_meta()
        plain.to_empty(device="cpu")
        assert not is_tied(plain)
        with torchguard.install("load"):
            assert model.to_empty(device="cpu") is model
        assert is_tied(model)
        assert isinstance(model.output.weight, nn.Parameter)
        assert not model.output.weight.is_meta
        state = separate(Tied())
        model.load_state_dict(state)
        copied = Tied()
        copied.load_state_dict(state)
        assert torch.equal(trained(model), trained(copied))


# An optimizer's state goes to the parameters of the same names, where both sides have names.


def parameters() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(2)) for name in "abc"}


def saved(named: dict[str, torch.nn.Parameter], *, names: bool = True) -> dict[str, Any]:
    """Train a step, so that each has moments of its own."""
    optimizer = torch.optim.Adam(list(named.items()) if names else list(named.values()))
    for number, each in enumerate(named.values()):
        each.grad = torch.full((2,), float(number + 1))
    optimizer.step()
    return optimizer.state_dict()


def moments(optimizer: torch.optim.Optimizer, named: dict[str, torch.nn.Parameter]) -> list[float]:
    return [float(optimizer.state[each]["exp_avg"][0]) for each in named.values()]


@LOADERS
@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_names_say_what_belongs_to_what(load: Callable[..., Any], order: str) -> None:
    named = parameters()
    state = saved(named)
    optimizer = torch.optim.Adam([(name, named[name]) for name in order])
    load(optimizer, state)
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])
    assert optimizer.param_groups[0]["param_names"] == list(order)


@LOADERS
@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ((("a", "b"), ("a", "b")), (("b", "a"), ("a", "b")), False),
        ((("a", "b", "a", "b"),), (("a", "b", "a", "b"),), True),
        ((("a", "b", "a", "b"),), (("a", "b", "b", "a"),), False),
        ((("a", "b"), ("a", "b")), (("b", "a"), ("b", "c")), False),
        ((("a",), ("b", "a")), (("b", "a"), ("a",)), False),
        ((("a", "b"),), (("a", "b", "b"),), False),
    ],
)
def test_names_that_occur_twice_are_matched_in_the_same_order_alone(
    load: Callable[..., Any], theirs: Any, ours: Any, fits: bool
) -> None:
    """Each keeps its own state, or nothing is loaded."""

    def made(names: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [(name, torch.nn.Parameter(torch.ones(2))) for name in each]}
            for each in names
        ]
        return torch.optim.SGD(groups, momentum=0.9)

    def held(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, float]]]:
        """What each group has, in an order that does not depend on that of its parameters."""
        return [
            sorted(
                (name, float(optimizer.state[each]["momentum_buffer"][0]))
                for name, each in zip(group["param_names"], group["params"], strict=True)
            )
            for group in optimizer.param_groups
        ]

    first, second = made(theirs), made(ours)
    for number, each in enumerate(p for group in first.param_groups for p in group["params"]):
        each.grad = torch.full((2,), float(number + 1))
    first.step()
    if fits:
        load(second, first.state_dict())
        assert held(second) == held(first)
    else:
        with pytest.raises(ValueError, match="load_state_dict: "):
            load(second, first.state_dict())
        assert not second.state


@LOADERS
def test_names_that_are_not_there_are_refused(load: Callable[..., Any]) -> None:
    named = parameters()
    state = saved(named)
    optimizer = torch.optim.Adam([(f"new.{name}", each) for name, each in named.items()])
    with pytest.raises(ValueError, match=r"it lacks new.a, new.b, new.c and has a, b, c besides"):
        load(optimizer, state)
    assert not optimizer.state


@LOADERS
@pytest.mark.parametrize("names", [True, False])
def test_names_on_one_side_are_said(load: Callable[..., Any], names: bool) -> None:
    named = parameters()
    state = saved(named, names=names)
    optimizer = torch.optim.Adam(list(named.values()) if names else list(named.items()))
    with pytest.warns(TorchGuardWarning, match="by their order") as caught:
        load(optimizer, state)
    assert caught[0].filename == __file__
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])


@LOADERS
@pytest.mark.parametrize("names", [True, False])
def test_without_names_or_with_a_hook_of_the_users_it_goes_by_position_in_silence(
    load: Callable[..., Any], names: bool
) -> None:
    """torch's documentation shows a hook that maps names itself."""
    named = parameters()
    state = saved(named, names=names)
    optimizer = torch.optim.Adam(list(named.values()))
    if names:
        optimizer = torch.optim.Adam([(f"new.{name}", each) for name, each in named.items()])
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(optimizer, state)
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])
