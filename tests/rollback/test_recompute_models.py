"""A whole model of transformers, trained with and without activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchguard

transformers = pytest.importorskip("transformers")


def train(checkpointed: str | None) -> list[Tensor]:
    transformers.set_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.2,
        mask_time_length=2, mask_time_min_masks=1,
    )  # fmt: skip
    model: Any = transformers.Wav2Vec2Model(config)
    if checkpointed is not None:
        switch = getattr(model, "activation_checkpointing_enable", None)
        switch = switch or model.gradient_checkpointing_enable
        switch({"use_reentrant": checkpointed == "reentrant"})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    transformers.set_seed(1)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(2, 400))[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.double() for value in model.state_dict().values()), torch.rand(2)]


def near(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("mode", ["recommended", "reentrant"])
def test_a_model_trains_as_without_checkpointing(mode: str) -> None:
    """Losses, weights and the random numbers drawn afterwards, after five steps."""
    expected = train(None)
    with torchguard.install("recompute"):
        assert near(train(mode), expected)
