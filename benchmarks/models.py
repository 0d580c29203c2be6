"""The models of the benchmarks, in the shapes of well-known ones, with random weights.

Shapes: B batch, T time, V vocabulary, D width, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderSize:
    """GPT-2 small, unless said otherwise."""

    vocabulary: int = 50_257
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12


class Block(nn.Module):
    """Attention over what came before, then two linear layers, with the norm in front of each."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.project = nn.Linear(size.width, 3 * size.width)
        self.gather = nn.Linear(size.width, size.width)
        self.before_network = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """(B, T, D) -> queries, keys and values, each (B, H, T, D / H)."""
        parts = self.project(self.before_attention(x)).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def join(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add what was attended (B, H, T, D / H) to x (B, T, D), then the network's output."""
        x = x + self.gather(attended.transpose(1, 2).flatten(-2))
        widened = functional.gelu(self.widen(self.before_network(x)), approximate="tanh")
        found: torch.Tensor = x + self.narrow(widened)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        queries, keys, values = self.split(x)
        attend = functional.scaled_dot_product_attention
        return self.join(x, attend(queries, keys, values, is_causal=True))

    def advance(
        self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """(B, 1, D) -> (B, 1, D); keys and values go to their position of the cache."""
        queries, keys, values = self.split(x)
        cache[0][:, :, position] = keys
        cache[1][:, :, position] = values
        attend = functional.scaled_dot_product_attention
        return self.join(x, attend(queries, cache[0], cache[1], attn_mask=seen))


class Decoder(nn.Module):
    """A language model of the shape of GPT-2."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (B, T) -> scores (B, T, V)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    def advance(
        self, ids: torch.Tensor, caches: Sequence[torch.Tensor], position: torch.Tensor
    ) -> torch.Tensor:
        """One token more: ids (B, 1), caches of (2, B, H, T, D / H), position (1,) -> (B, 1, V)."""
        x = self.tokens(ids) + self.positions(position)
        steps = torch.arange(caches[0].shape[3], device=ids.device)
        seen = (steps <= position)[None, None, None]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.advance(x, cache, position, seen)  # type: ignore[operator]
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    def caches(self, batch: int) -> list[torch.Tensor]:
        """Return empty keys and values for every block, each (2, B, H, T, D / H)."""
        size, weight = self.size, self.head.weight
        shape = (2, batch, size.heads, size.context, size.width // size.heads)
        return [weight.new_zeros(shape) for _ in range(size.layers)]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)),
            *(nn.ReLU(True), nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) -> (B, C', h', w')."""
        return functional.relu(self.layers(x) + self.shortcut(x))


class Convolutions(nn.Module):
    """A classifier of images of the shape of ResNet-50, unless said otherwise."""

    def __init__(
        self, depths: Sequence[int] = (3, 4, 6, 3), channels: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        first = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = [*first, nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        here = channels
        for stage, depth in enumerate(depths):
            inner = channels << stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(here, inner, stride))
                here = 4 * inner
        self.layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(here, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, 3, h, w) -> scores (B, classes)."""
        scores: torch.Tensor = self.head(self.layers(images))
        return scores


def resnet_sized(channels: int, kernel: int, classes: int) -> nn.Sequential:
    """Return 161 parameters and 159 buffers, as ResNet-50 has: 53 convolutions, a linear layer."""
    layers: list[nn.Module] = []
    for _ in range(53):
        layers += [nn.Conv2d(channels, channels, kernel, bias=False), nn.BatchNorm2d(channels)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))
