"""Tiny architectures of transformers, and a few convnets, with random weights.

    for architecture in ZOO:
        model = architecture.build()          # skips, with a reason, what can't be built here
        batch = architecture.batch([7, 4])    # B = 2 rows, padded on the right to T = 7
        architecture.loss(model, batch).backward()

Dropout is off, so that training steps can be compared, unless ``build(dropout=True)`` keeps the
defaults; nothing is downloaded.
B batch, T time (tokens, or samples of audio), C channels, H height, W width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY = 64
_IGNORED = -100
"""The label of a padded token: transformers leaves it out of the loss."""


@dataclass(frozen=True)
class Architecture:
    """One model, a batch for it, and what is known about it."""

    name: str
    kind: str
    """``encoder``, ``decoder`` and the like."""

    make: Callable[..., nn.Module]
    """Builds it; :meth:`build` seeds the random weights and skips what this environment lacks."""

    rows: Callable[[Sequence[int], torch.Generator], dict[str, torch.Tensor]]
    """Makes a batch from the lengths of its rows."""

    dims: dict[str, dict[int, str]] = field(default_factory=dict)
    """The padded dimensions, as ``bucketed(dims=...)`` takes them; empty where sizes are fixed."""

    mask: str | None = None
    """The argument that says which positions are real."""

    needs_mask: bool = False
    """Whether padding without a mask changes the result at real positions."""

    fill: dict[str, int] = field(default_factory=dict)
    """What labels are padded with, as ``bucketed(fill=...)`` takes it."""

    def __str__(self) -> str:
        return self.name

    def build(self, *, to_compile: bool = False, dropout: bool = False) -> nn.Module:
        """Build the model with weights that are the same every time.

        Args:
            to_compile: skip it too where plain ``torch.compile`` fails.
            dropout: leave the rates of dropout as they are by default.
        """
        asks = self.kind != "convnet" and not hasattr(torch.compiler, "is_exporting")
        if to_compile and asks:
            pytest.skip("this transformers asks for torch.compiler.is_exporting: can't be compiled")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                return self.make(dropout=dropout)
            except ImportError as error:
                pytest.skip(f"{self.name} can't be built here: {error}")

    def batch(self, lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Make a batch of rows with these lengths, labels included; the arguments of a call."""
        return self.rows(lengths, torch.Generator().manual_seed(seed))

    def loss(self, model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call the model; the loss is its own."""
        loss: torch.Tensor = model(**batch).loss
        return loss


_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "type_vocab_size": 2, "embedding_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_OF_DROPOUT = re.compile(r"drop|jitter|mask_(time|feature)_prob")


def _made(stem: str, head: str, sizes: dict[str, Any], **settings: Any) -> Callable[[], nn.Module]:
    """Build ``<stem><head>`` from ``<stem>Config``, with the cache off."""

    def make(*, dropout: bool = False) -> nn.Module:
        import transformers  # noqa: PLC0415 - seconds, and an extra

        if not hasattr(transformers, f"{stem}{head}"):
            raise ImportError(f"transformers {transformers.__version__} has no {stem}{head}")
        config_class = getattr(transformers, f"{stem}Config")
        known = config_class()
        given = {name: value for name, value in sizes.items() if _settable(known, name)}
        for name, value in known.to_dict().items():
            if _OF_DROPOUT.search(name) and isinstance(value, (int, float)) and not dropout:
                given[name] = type(value)(0)
        if hasattr(known, "use_cache"):
            given["use_cache"] = False
        model: nn.Module = getattr(transformers, f"{stem}{head}")(
            config_class(**{**given, **settings})
        )
        return model

    return make


def _settable(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def tokens(lengths: Sequence[int], random: torch.Generator) -> dict[str, torch.Tensor]:
    """Make ids, a mask and labels, (B, T) each, padded on the right."""
    shape = (len(lengths), max(lengths))
    ids = torch.randint(3, VOCABULARY, shape, generator=random)
    labels = torch.randint(3, VOCABULARY, shape, generator=random)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, _IGNORED),
    }


def _two_classes(lengths: Sequence[int], random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (len(lengths),), generator=random)


def _heard(lengths: Sequence[int], random: torch.Generator) -> dict[str, torch.Tensor]:
    """Make samples of audio and a mask, (B, T), 100 samples for a unit of length; a label a row."""
    made = tokens([100 * length for length in lengths], random)
    mask = made["attention_mask"]
    samples = torch.randn(mask.shape, generator=random) * mask
    return {
        "input_values": samples,
        "attention_mask": mask,
        "labels": _two_classes(lengths, random),
    }


def _transcribed(lengths: Sequence[int], random: torch.Generator) -> dict[str, torch.Tensor]:
    """Make spectrograms of a fixed length, (B, 8, 32), and the words that were said, (B, T)."""
    labels = tokens(lengths, random)["labels"]
    return {"input_features": torch.randn(len(lengths), 8, 32, generator=random), "labels": labels}


def _seen(lengths: Sequence[int], random: torch.Generator) -> dict[str, torch.Tensor]:
    """Make images of one size, (B, 3, 32, 32), and a label each."""
    images = torch.randn(len(lengths), 3, 32, 32, generator=random)
    return {"pixel_values": images, "labels": _two_classes(lengths, random)}


_TOKENS = {"input_ids": {1: "t"}, "attention_mask": {1: "t"}, "labels": {1: "t"}}
_LABELS = {"labels": _IGNORED}


def _encoder(name: str, stem: str, head: str = "ForMaskedLM", **settings: Any) -> Architecture:
    return _of_tokens(name, "encoder", _made(stem, head, _SIZES, **settings), needs_mask=True)


def _decoder(
    name: str, stem: str, head: str = "ForCausalLM", kind: str = "decoder", **settings: Any
) -> Architecture:
    # A causal model does not see what is padded on the right.
    return _of_tokens(name, kind, _made(stem, head, _SIZES, **settings))


def _seq2seq(name: str, stem: str, **settings: Any) -> Architecture:
    make = _made(stem, "ForConditionalGeneration", {**_SIZES, **_SEQ2SEQ}, **settings)
    return _of_tokens(name, "encoder-decoder", make, needs_mask=True)


_of_tokens = partial(Architecture, rows=tokens, dims=_TOKENS, mask="attention_mask", fill=_LABELS)


class Convnet(nn.Module):
    """Convolutions, one of them residual, then a linear layer; answers as transformers do."""

    def __init__(self, *, dropout: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(0.1 if dropout else 0.0)
        self.first = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.residual = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None) -> Any:
        """(B, 3, H, W) -> (B, 2)."""
        x = self.first(pixel_values)
        logits = self.head(self.drop(torch.relu(x + self.residual(x))).mean((2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return _Classes(logits, loss)


@dataclass
class _Classes:
    logits: torch.Tensor
    loss: torch.Tensor | None


ZOO: tuple[Architecture, ...] = (
    _encoder("bert", "Bert"),
    _encoder("deberta", "Deberta"),
    _encoder("deberta-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"],
             position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
    _encoder("modernbert", "ModernBert", local_attention=8, global_attn_every_n_layers=2),
    _encoder("t5-encoder", "T5", "ForTokenClassification", d_model=16, d_kv=8, d_ff=32,
             num_layers=2, num_heads=2, num_labels=VOCABULARY),
    _decoder("gpt2", "GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=64),
    _decoder("gpt-neo", "GPTNeo", num_layers=2, num_heads=2, window_size=4,
             attention_types=[[["global", "local"], 1]]),
    _decoder("bloom", "Bloom", n_layer=2, n_head=2),
    _decoder("llama", "Llama", num_key_value_heads=2),
    _decoder("mistral", "Mistral", sliding_window=4),
    _decoder("qwen3", "Qwen3"),
    _decoder("gemma2", "Gemma2", sliding_window=4, query_pre_attn_scalar=8),
    _decoder("mixtral", "Mixtral", kind="mixture of experts", num_local_experts=4,
             num_experts_per_tok=2),
    _decoder("mamba2", "Mamba2", kind="state space", state_size=4, expand=2, conv_kernel=4,
             num_heads=4, n_groups=1, chunk_size=4, head_dim=8),
    _seq2seq("t5", "T5", d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
             decoder_start_token_id=0),
    _seq2seq("bart", "Bart"),
    Architecture(
        "whisper", "audio",
        _made("Whisper", "ForConditionalGeneration", {**_SIZES, **_SEQ2SEQ}, num_mel_bins=8,
              max_source_positions=16, max_target_positions=64, suppress_tokens=None,
              begin_suppress_tokens=None),
        _transcribed, {"labels": {1: "t"}}, fill=_LABELS,
    ),
    Architecture(
        "wav2vec2", "audio",
        _made("Wav2Vec2", "ForSequenceClassification", _SIZES, conv_dim=(8, 8),
              conv_kernel=(10, 4), conv_stride=(5, 4), num_feat_extract_layers=2,
              num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
              feat_extract_norm="layer", do_stable_layer_norm=False),
        _heard, {"input_values": {1: "t"}, "attention_mask": {1: "t"}}, "attention_mask",
        needs_mask=True,
    ),
    Architecture(
        "swin", "vision",
        _made("Swin", "ForImageClassification", _SIZES, image_size=32, patch_size=4, num_labels=2,
              embed_dim=8, depths=[1, 1], num_heads=[2, 2], num_attention_heads=[2, 2],
              window_size=4),
        _seen,
    ),
    Architecture("residual-convnet", "convnet", Convnet, _seen),
)  # fmt: skip
"""The architectures; each name once."""


MORE: tuple[Architecture, ...] = (
    _encoder("roberta", "Roberta"),
    _encoder("distilbert", "DistilBert", dim=16, hidden_dim=32, n_layers=2, n_heads=2),
    _encoder("electra", "Electra"),
    _encoder("albert", "Albert", num_hidden_groups=1, inner_group_num=1),
    _decoder("gpt-neox", "GPTNeoX"),
    _decoder("opt", "OPT", ffn_dim=32, word_embed_proj_dim=16),
    Architecture(
        "vit", "vision",
        _made("ViT", "ForImageClassification", _SIZES, image_size=32, patch_size=8, num_labels=2),
        _seen,
    ),
    Architecture(
        "convnext", "vision",
        _made("ConvNext", "ForImageClassification", _SIZES, hidden_sizes=[8, 8], depths=[1, 1],
              num_stages=2, num_labels=2, drop_path_rate=0.2),
        _seen,
    ),
)  # fmt: skip
"""More of them, for sweeps that take one step of each."""


def named(name: str) -> Architecture:
    """Return the architecture of this name."""
    return next(architecture for architecture in ZOO if architecture.name == name)
