"""Models of everyday use, compiled, against the same model unpadded and eager.

Shapes: B batch, T time, D features, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchguard import Buckets, PaddingLeakError, bucketed
from torchguard.defects.catalog import find

LADDER = Buckets([8, 16])


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs are counted from none."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


AOT: Any = {"backend": "aot_eager"}
"""What is about shapes, masks and gradients needs no kernels."""


def gradients(loss: torch.Tensor, module: nn.Module) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same_values_and_gradients(model: nn.Module, wrapped: nn.Module, loss_of: Any) -> None:
    expected, found = loss_of(model), loss_of(wrapped)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    wanted, got = gradients(expected, model), gradients(found, model)
    assert wanted.keys() == got.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-4 * largest, msg=name)


class ConvPads(nn.Module):
    """Pads a dim that varies, then relu: https://github.com/pytorch/pytorch/issues/169760."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.conv = nn.Conv1d(6, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, 3, T - 1)."""
        hidden = self.linear(x).transpose(1, 2)
        return torch.relu(self.conv(functional.pad(hidden, (1, 0))))


@pytest.mark.slow
def test_a_conv_linear_model_that_pads_a_dim_that_varies() -> None:
    model = ConvPads()
    wrapped: Any = bucketed(model, dims={"x": {1: "t"}}, buckets=LADDER, compile=True)
    for length in (5, 8, 13):
        x = torch.randn(2, length, 4)
        assert wrapped(x).shape == (2, 3, length - 1)
        same_values_and_gradients(model, wrapped, lambda m, x=x: m(x).square().mean())
    assert wrapped.stats().graphs == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_record_cuda_graphs_where_there_is_a_gpu(mode: str) -> None:
    model = nn.Linear(4, 4)
    wrapped: Any = bucketed(
        model, dims={"input": {0: "t"}}, buckets=Buckets([8]), compile={"mode": mode}
    )
    inputs = [torch.randn(length, 4) for length in (5, 7, 8)]
    outputs = [wrapped(x) for x in inputs]  # none of them is overwritten by the next
    for x, found in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(found, model(x))
    same_values_and_gradients(model, wrapped, lambda m: m(inputs[0]).square().sum())
    assert wrapped.stats().graphs == 1


class Encoder(nn.Module):
    """A transformer encoder that classifies every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> Any:
        """ids (B, T), padding (B, T) True where nothing is -> (B, T, 5)."""
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        return self.head(hidden)


@pytest.mark.slow
def test_an_encoder_trained_for_20_steps_as_without_padding() -> None:
    torch.manual_seed(0)
    plain = Encoder()
    padded = copy.deepcopy(plain)
    # Up to torch 2.6 inductor's gradient of an embedding is wrong where it compiles for one thread.
    is_wrong = find("repeated-id").probe() is not None
    wrapped: Any = bucketed(
        padded,
        dims={"ids": {1: "t"}, "padding": {1: "t"}},
        buckets=LADDER,
        mask={"padding": "padding"},
        compile={"options": {"cpp.dynamic_threads": True}} if is_wrong else True,
    )
    # Adam divides by the root of a gradient; with its usual eps a gradient that is only rounding
    # makes as long a step as any other.
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4) for model in (plain, wrapped)
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(2, 17, (4,), generator=generator)
        longest = int(lengths.max())
        ids = torch.randint(1, 20, (4, longest), generator=generator)
        padding = torch.arange(longest) >= lengths[:, None]
        labels = torch.randint(0, 5, (4, longest), generator=generator)
        labels[padding] = -100
        losses = []
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            logits = model(ids, padding)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(plain.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)
    assert wrapped.stats().graphs == 2


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers", reason="the test extra `transformers` is missing")
    if hasattr(module.utils, "is_torchdynamo_exporting") and not hasattr(
        torch.compiler, "is_exporting"
    ):
        pytest.skip("this transformers asks for torch.compiler.is_exporting: it can't be compiled")
    return module


@pytest.mark.slow
def test_a_bert_classifier(transformers: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    wrapped = bucketed(
        model,
        dims={"input_ids": {1: "t"}, "attention_mask": {1: "t"}},
        buckets=LADDER,
        mask="attention_mask",
        compile=AOT,
    )
    for length in (5, 13):
        ids = torch.randint(1, 50, (2, length))
        mask = torch.ones_like(ids)
        mask[1, length // 2 :] = 0
        labels = torch.tensor([0, 1])
        given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        same_values_and_gradients(model, wrapped, lambda m, given=given: m(**given).loss)
        found = wrapped(**given)
        assert type(found) is type(model(**given))
        torch.testing.assert_close(found.logits, model(**given).logits, rtol=1e-4, atol=1e-5)
    assert wrapped.stats().graphs == 2


@pytest.fixture(scope="module")
def gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.slow
def test_gpt2_with_labels(gpt2: Any) -> None:
    wrapped = bucketed(
        gpt2,
        dims={"input_ids": {1: "t"}, "labels": {1: "t"}},
        buckets=LADDER,
        fill={"labels": -100},
        mask={"attention_mask": "real"},
        compile=AOT,
    )
    for length in (5, 13):
        ids = torch.randint(1, 50, (2, length))
        same_values_and_gradients(
            gpt2, wrapped, lambda m, ids=ids: m(input_ids=ids, labels=ids).loss
        )
        found, expected = wrapped(input_ids=ids, labels=ids), gpt2(input_ids=ids, labels=ids)
        assert type(found) is type(expected)
        assert found.logits.shape == (2, length, 50)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_generation_step_padded_on_the_left(gpt2: Any) -> None:
    def step(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> Any:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return gpt2(**given).logits[:, -1]  # (B, V): the last token is always real

    wrapped = bucketed(
        step,
        dims={"ids": {1: "t"}, "mask": {1: "t"}, "positions": {1: "t"}},
        buckets=LADDER,
        mask="mask",
        fill={"positions": 0},
        side="left",
        compile=AOT,
    )
    gpt2.eval()
    with torch.no_grad():
        ids = torch.randint(1, 50, (2, 6))
        for _ in range(4):  # over the edge of the first bucket
            mask = torch.ones_like(ids)
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            found, expected = wrapped(ids, mask, positions), step(ids, mask, positions)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            ids = torch.cat([ids, expected.argmax(-1, keepdim=True)], 1)
    assert wrapped.stats().hits == {(8,): 3, (16,): 1}


class Tagger(nn.Module):
    """The part of a recurrent tagger that is not recurrent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, D)."""
        return torch.tanh(self.linear(self.embedding(ids)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tagger: Any = Tagger()
        self.gru = nn.GRU(8, 4, batch_first=True)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        hidden = self.tagger(ids)
        packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True)
        return self.gru(packed)[1]


@pytest.mark.slow
def test_an_embedding_and_a_gru_on_packed_sequences_outside() -> None:
    model = Recurrent()
    wrapped = copy.deepcopy(model)
    wrapped.tagger = bucketed(wrapped.tagger, dims={"ids": {1: "t"}}, buckets=LADDER, compile=AOT)
    for lengths in ([7, 5], [14, 3]):
        ids = torch.randint(0, 20, (2, lengths[0]))
        expected, found = model(ids, torch.tensor(lengths)), wrapped(ids, torch.tensor(lengths))
        torch.testing.assert_close(found, expected)
        wanted = gradients(expected.square().sum(), model)
        got = gradients(found.square().sum(), wrapped)
        assert wanted.keys() == got.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)


class Speech(nn.Module):
    """Frames (B, S, D) to characters (B, U): halves time, then CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, 10)

    def forward(
        self,
        frames: torch.Tensor,
        text: torch.Tensor,
        frame_counts: torch.Tensor,
        text_counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        scores = self.head(hidden).log_softmax(-1)  # (B, (S + 1) // 2, 10)
        counts = (frame_counts + 1) // 2
        loss = functional.ctc_loss(
            scores.transpose(0, 1), text, counts, text_counts, reduction="sum"
        )
        return loss, scores


@pytest.mark.slow
def test_a_speech_model_with_two_dims_and_a_ctc_loss() -> None:
    model = Speech()
    wrapped = bucketed(
        model,
        dims={"frames": {1: "s"}, "text": {1: "u"}},
        buckets={"s": Buckets([24, 48]), "u": Buckets([6])},
        # The convolution reads zeros behind the end; text has to be a valid character.
        fill={"frames": 0, "text": 1},
        outputs=(None, {1: lambda s: (s + 1) // 2}),  # torch can't run ctc_loss without data
        compile=AOT,
    )
    for frames, text in ((20, 5), (33, 6)):
        given = (
            torch.randn(2, frames, 6),
            torch.randint(1, 10, (2, text)),
            torch.tensor([frames, frames - 3]),
            torch.tensor([text, text - 1]),
        )
        found, expected = wrapped(*given), model(*given)
        assert found[1].shape == expected[1].shape == (2, (frames + 1) // 2, 10)
        torch.testing.assert_close(found[1], expected[1])
        same_values_and_gradients(model, wrapped, lambda m, given=given: m(*given)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, D), mask (B, T) True where real -> (B, T, D); causal."""
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        size = x.shape[1]
        allowed = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            itself = torch.eye(size, dtype=torch.bool, device=x.device)
            allowed = (allowed & mask[:, None, None, :]) | itself
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_scaled_dot_product_attention_with_causal_and_padding_masks() -> None:
    model = Attention()
    wrapped = bucketed(
        model, dims={"x": {1: "t"}}, buckets=LADDER, mask="mask", compile={"fullgraph": True}
    )
    for length in (5, 13):
        x = torch.randn(2, length, 8)
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, -2:] = False
        same_values_and_gradients(model, wrapped, lambda m, x=x: m(x).square().sum())
        same_values_and_gradients(
            model, wrapped, lambda m, x=x, mask=mask: m(x, mask).square().sum()
        )


@pytest.mark.slow
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
        torch.compile(attend)(x, torch.tensor(37))
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"flex_attention does not compile on this machine: {type(error).__name__}")
    wrapped = bucketed(
        attend, dims={"x": {2: "t"}}, buckets=Buckets([64]), lengths="real", compile=True
    )
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), expected, rtol=1e-4, atol=1e-5)


# What padding does change.


def mean_over_time(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def softmax_over_time(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x - 1).square().sum()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (mean_over_time, "first differs after mean, test_bucketed_cases.py"),
        (softmax_over_time, "first differs after softmax, test_bucketed_cases.py"),
        (sum_of_squares, "first differs after sum, test_bucketed_cases.py"),
        (Normalised(), "first differs after native_batch_norm"),
    ],
    ids=["mean", "softmax", "sum of squares", "BatchNorm"],
)
def test_what_padding_changes_is_refused(function: Any, cause: str) -> None:
    wrapped = bucketed(function, dims={"x": {1: "t"}}, buckets=LADDER, compile=AOT)
    x = torch.randn(2, 5, 4)
    with pytest.raises(PaddingLeakError, match="largest difference") as caught:
        wrapped(x)
    assert cause in str(caught.value)
    assert "output" in str(caught.value)
    # An exact fit is not padded, so there is nothing to refuse.
    wrapped(torch.randn(2, 8, 4))


@pytest.mark.slow
def test_batch_norm_that_does_not_train_is_fine() -> None:
    model = Normalised().eval()
    wrapped = bucketed(model, dims={"x": {1: "t"}}, buckets=LADDER, compile=AOT)
    same_values_and_gradients(model, wrapped, lambda m: m(torch.ones(2, 5, 4)).square().sum())
