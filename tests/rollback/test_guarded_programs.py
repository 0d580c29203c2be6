"""guarded() leaves programs on their way: fast paths, optimizers, what is recorded in a scope."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from support.scopes import GUARDED_ONLY, each_scope

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")

SCOPES = (nullcontext, *(scope for _, scope in GUARDED_ONLY))


def _encoder(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    found: torch.Tensor = encoder(x, src_key_padding_mask=padding)
    return found


def _attention(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    found, weights = attention(x, x, x, key_padding_mask=padding)
    return torch.cat([found.flatten(), weights.flatten()])


def _convolutions(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    layers = (nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5, True))
    network = nn.Sequential(*layers, nn.Hardswish(inplace=True), nn.InstanceNorm1d(4))
    found: torch.Tensor = nn.LSTM(6, 4, batch_first=True)(network.train()(x))[0]
    return found


MODULES = (_encoder, _attention, _convolutions)


@each_scope
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_compute_bit_for_bit_what_they_compute_outside(
    module: Callable[..., torch.Tensor], scope: Callable[[], AbstractContextManager[Any]]
) -> None:
    found = []
    for each in (nullcontext, scope):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8)
        padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
        with torch.no_grad(), each():
            found.append(module(x, padding))
    assert torch.equal(found[0], found[1])


@each_scope
def test_code_that_asks_for_overrides_finds_none(
    scope: Callable[[], AbstractContextManager[Any]],
) -> None:
    """All that asks ``has_torch_function`` for its way, in torch and elsewhere, asks these."""
    x = torch.ones(2)
    with scope():
        assert not torch.overrides.has_torch_function((x, nn.Parameter(x)))
        assert not torch.overrides.has_torch_function_unary(x)
        assert not torch.overrides.has_torch_function_variadic(x, x)
        assert torch._C._len_torch_function_stack() == 0
        assert not torch._C._is_torch_function_mode_enabled()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_end_bit_for_bit_where_they_end_outside(name: str) -> None:
    found = []
    for scope in SCOPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = OPTIMIZERS[name](model.parameters())
        x = torch.randn(8, 4)

        def closure() -> float:
            optimizer.zero_grad()  # noqa: B023
            loss = model(x).square().mean()  # noqa: B023
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: B023
            return float(loss.detach())

        with scope():
            for _ in range(3):
                optimizer.step(closure)
        found.append([parameter.tolist() for parameter in model.parameters()])
    assert found[1] == found[2] == found[0]
