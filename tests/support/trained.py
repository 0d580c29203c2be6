"""Small models as people train them, with random numbers of every kind; each returns its loss.

    for name, (make, batch) in TRAINED.items():
        make()(*batch()).backward()

B batch, T time, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Perceptron(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Dropout(rate), nn.BatchNorm1d(16), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> Any:
        """(B, C) -> ()."""
        return functional.cross_entropy(self.layers(x), torch.zeros(len(x), dtype=torch.long))


class Decoder(nn.Module):
    """As nanoGPT is."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(8, 8)
        self.query, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.2)

    def block(self, x: torch.Tensor) -> Any:
        parts = self.query(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.narrow(functional.gelu(self.wide(self.norm(x)))))

    def forward(self, ids: torch.Tensor) -> Any:
        """(B, T) -> ()."""
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for _ in range(2):
            if self.checkpointed:
                x = checkpoint(self.block, x, use_reentrant=False)
            else:
                x = self.block(x)
        logits = x @ self.tokens.weight.t()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> Any:
        """(B, T, C) -> ()."""
        return self.layers(x).square().mean()


class Autoencoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> Any:
        """(B, C) -> ()."""
        mean, log = self.encode(x).chunk(2, 1)
        made = self.decode(mean + torch.randn_like(mean) * (log / 2).exp())
        distance = (1 + log - mean.square() - log.exp()).mean()
        return functional.mse_loss(made, x) - 0.5 * distance


class Adversarial(nn.Module):
    """A generator and what judges it."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.3), nn.LeakyReLU(), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> Any:
        """(B, C) -> ()."""
        made = self.make(torch.randn(len(x), 4))
        return (
            functional.softplus(-self.judge(x)).mean()
            + functional.softplus(self.judge(made)).mean()
        )


class Diffusion(nn.Module):
    """Removes noise of random strength, with a convolution down and one up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)
        self.drop, self.time = nn.Dropout2d(0.1), nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor) -> Any:
        """(B, C, H, W) -> ()."""
        time, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        share = (time / 10).view(-1, 1, 1, 1)
        hidden = self.down(x * (1 - share) + noise * share) + self.time(time)[:, :, None, None]
        return functional.mse_loss(self.up(self.drop(functional.silu(hidden))), noise)


class Experts(nn.Module):
    """A mixture of experts whose gate is noisy."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.noise = nn.Linear(6, 4), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        """(B, C) -> ()."""
        scores = self.gate(x) + torch.randn(len(x), 4) * functional.softplus(self.noise(x))
        best, index = scores.topk(2, 1)
        weights = torch.zeros_like(scores).scatter(1, index, best.softmax(1))
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (made * weights[:, :, None]).sum(1).square().mean()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 5))
        self.over_channels = nn.Sequential(
            nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout()
        )

    def forward(self, x: torch.Tensor) -> Any:
        """(B, T, C) -> ()."""
        x = x + self.over_time(x.transpose(1, 2)).transpose(1, 2)
        keep = torch.empty(len(x), 1, 1).bernoulli_(0.9) / 0.9  # drop path
        return (x + self.over_channels(x) * keep).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """(B, T, C) -> ()."""
        state = (torch.zeros(len(x), 8), torch.zeros(len(x), 8))
        for step in x.unbind(1):
            state = self.cell(functional.dropout(step, 0.2), state)
        return self.head(functional.alpha_dropout(state[0], 0.1, training=True)).square().mean()


def _floats(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)),)


def _ids() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 16, (3, 6), generator=torch.Generator().manual_seed(1)),)


TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "perceptron": (Perceptron, partial(_floats, 4, 6)),
    "decoder": (Decoder, _ids),
    "checkpointed decoder": (partial(Decoder, checkpointed=True), _ids),
    "nn.TransformerEncoder": (Encoder, partial(_floats, 3, 5, 8)),
    "autoencoder": (Autoencoder, partial(_floats, 4, 6)),
    "adversarial": (Adversarial, partial(_floats, 4, 6)),
    "diffusion": (Diffusion, partial(_floats, 2, 3, 8, 8)),
    "experts": (Experts, partial(_floats, 5, 6)),
    "mixer": (Mixer, partial(_floats, 4, 5, 6)),
    "recurrent": (Recurrent, partial(_floats, 3, 4, 6)),
}
