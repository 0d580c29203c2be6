"""Models of everyday use, compiled, against the same model unpadded and eager.

Shapes: B batch, T time, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from support.bucketed import in_time, same_gradients, wrap

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs are counted from none."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


AOT: Any = {"backend": "aot_eager"}
"""What is about shapes, masks and gradients needs no kernels."""


def same_values_and_gradients(model: nn.Module, wrapped: Any, *given: Any) -> None:
    expected, found = model(*given), wrapped(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    losses = (each[0] if isinstance(each, tuple) else each for each in (found, expected))
    found, expected = (each.square().sum() for each in losses)
    same_gradients(found, expected, model.parameters(), rtol=1e-3, share=1e-4)


class Attention(nn.Module):
    """Attends; then pads a dim that varies: https://github.com/pytorch/pytorch/issues/169760."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.conv = nn.Conv1d(8, 3, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, D), mask (B, T) True where real -> (B, 3, T - 1); causal."""
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        size = x.shape[1]
        allowed = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            itself = torch.eye(size, dtype=torch.bool, device=x.device)
            allowed = (allowed & mask[:, None, None, :]) | itself
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        hidden = attended.transpose(1, 2).flatten(2).transpose(1, 2)
        return torch.relu(self.conv(functional.pad(hidden, (1, 0))))


def test_attention_and_a_conv_that_pads_a_dim_that_varies_by_inductor() -> None:
    model = Attention()
    wrapped = in_time(model, buckets=[16], mask="mask", compile={"fullgraph": True})
    for length in (5, 13, 16):
        x = torch.randn(2, length, 8)
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, -2:] = False
        assert wrapped(x, mask).shape == (2, 3, length - 1)
        same_values_and_gradients(model, wrapped, x, mask)
    assert wrapped.stats().graphs == 1


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_record_cuda_graphs_where_there_is_a_gpu(mode: str) -> None:
    model = nn.Linear(4, 4)
    wrapped = wrap(model, buckets=[8], compile={"mode": mode})
    inputs = [torch.randn(length, 4) for length in (5, 7, 8)]
    outputs = [wrapped(x) for x in inputs]  # none of them is overwritten by the next
    for x, found in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(found, model(x))
    same_values_and_gradients(model, wrapped, inputs[0])
    assert wrapped.stats().graphs == 1


def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def attend(x: torch.Tensor, real: torch.Tensor) -> Any:
        """x (B, H, T, D), real: how many keys there are."""

        def score(value: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return torch.where(k < real, value, -float("inf"))

        return flex.flex_attention(x, x, x, score_mod=score)

    x = torch.randn(1, 2, 37, 16)
    expected = attend(x, torch.tensor(37))
    try:
        torch.compile(attend, backend="aot_eager")(x, torch.tensor(37))
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"flex_attention does not compile on this machine: {type(error).__name__}")
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        pytest.skip("this torch runs flex_attention under no dispatch mode, and the check is one")
    wrapped = wrap(attend, dims={"x": {2: "t"}}, buckets=[64], lengths="real", compile=AOT)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), expected, rtol=1e-4, atol=1e-5)
