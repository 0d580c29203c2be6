"""Whole models of transformers, trained with and without activation checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import torchguard

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)

STEPS = 5


def resnet() -> tuple[nn.Module, Any]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"
    )
    model = transformers.ResNetModel(config)
    return model, lambda: {"pixel_values": torch.randn(4, 3, 16, 16)}


def wav2vec2() -> tuple[nn.Module, Any]:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.2,
        mask_time_length=2, mask_time_min_masks=1,
    )  # fmt: skip
    model = transformers.Wav2Vec2Model(config)
    return model, lambda: {"input_values": torch.randn(2, 400)}


def train(make: Callable[[], tuple[nn.Module, Any]], *, checkpointed: str | None) -> list[Tensor]:
    transformers.set_seed(0)
    model: Any
    model, batch = make()
    if make is resnet:  # has no switch of its own
        for stage in model.encoder.stages if checkpointed else ():
            for i, layer in enumerate(stage.layers):
                stage.layers[i] = checkpoint_wrapper(layer)
    elif checkpointed is not None:
        switch = getattr(model, "activation_checkpointing_enable", None)
        switch = switch or model.gradient_checkpointing_enable
        switch({"use_reentrant": checkpointed == "reentrant"})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    transformers.set_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch())[0].square().mean()
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
@pytest.mark.parametrize("make", [resnet, wav2vec2], ids=lambda make: make.__name__)
def test_a_model_trains_as_without_checkpointing(make: Any, mode: str) -> None:
    """Losses, weights, statistics and the random numbers drawn afterwards, after five steps."""
    expected = train(make, checkpointed=None)
    with torchguard.install("recompute"):
        assert near(train(make, checkpointed=mode), expected)


def test_without_the_guard_a_resnet_trains_another_way() -> None:
    """Dropout alone torch gets right: it restores its own generator."""
    assert not near(train(resnet, checkpointed="recommended"), train(resnet, checkpointed=None))
