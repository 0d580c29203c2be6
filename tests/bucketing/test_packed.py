"""packed(): sequences one behind the other, with cu_seqlens; padding belongs to none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from support.bucketed import same_gradients
from torchguard import Buckets, PaddingLeakError, bucketed, no_recompile, packed

LONGEST = 9


def documents(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the number of each token's sequence; that of padding is above all others."""
    counted = torch.arange(tokens, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, counted, right=True)


class Attention(nn.Module):
    """Embedding and learned positions, and attention within each sequence."""

    def __init__(self, kind: str = "sdpa") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.positions = nn.Embedding(LONGEST, 16)  # an index above it is an error
        self.projection = nn.Linear(16, 48)
        self.head = nn.Linear(16, 3)
        self.kind = kind

    def forward(
        self, ids: torch.Tensor, cu_seqlens: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        tokens = ids.shape[0]
        x = self.embedding(ids) + self.positions(position_ids)
        q, k, v = self.projection(x).view(tokens, 3, 2, 8).permute(1, 2, 0, 3)
        document = documents(cu_seqlens, tokens)
        same = document[:, None] == document
        if self.kind == "sdpa":
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=same[None])
        elif self.kind == "flex":
            mixed = self.flex(q, k, v, document)
        elif self.kind == "leaks":
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:  # padding attends to nothing: rows of minus infinity
            real = torch.arange(tokens) < cu_seqlens[-1]
            scores = (q @ k.transpose(1, 2)).masked_fill(~(same & real[:, None]), float("-inf"))
            mixed = scores.softmax(-1) @ v
        output: torch.Tensor = self.head(mixed.transpose(0, 1).reshape(tokens, 16))
        return output

    def flex(self, q: Any, k: Any, v: Any, document: torch.Tensor) -> torch.Tensor:
        flex = pytest.importorskip("torch.nn.attention.flex_attention")

        def within(_b: Any, _h: Any, query: Any, key: Any) -> Any:
            return document[query] == document[key]

        tokens = q.shape[1]
        blocks = flex.create_block_mask(within, None, None, tokens, tokens, device="cpu")
        mixed: torch.Tensor = flex.flex_attention(q[None], k[None], v[None], block_mask=blocks)[0]
        return mixed


def batch(lengths: list[int], dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, ...]:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(1, 20, (sum(lengths),))
    return ids, ends.to(dtype), torch.cat([torch.arange(length) for length in lengths])


def in_buckets(model: nn.Module, **options: Any) -> Any:
    given = {**packed(["ids", "position_ids"], tokens=[16, 32, 64], sequences=[3, 7]), **options}
    return bucketed(model, **given)


def one_by_one(model: Attention, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Run each sequence alone."""
    ids, ends, positions = arguments
    found = [
        model(ids[a:b], torch.tensor([0, b - a], dtype=ends.dtype), positions[a:b])
        for a, b in zip(ends.tolist(), ends[1:].tolist(), strict=False)
    ]
    return torch.cat(found)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=7),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_packed_batch_is_as_each_sequence_alone(lengths: list[int], dtype: torch.dtype) -> None:
    """Outputs and gradients; the check of padding has nothing to say."""
    model = Attention()
    arguments = batch(lengths, dtype)
    wrapped = in_buckets(model)
    found, expected = wrapped(*arguments), one_by_one(model, arguments)
    torch.testing.assert_close(found, expected)
    same_gradients(found.square().sum(), expected.square().sum(), model.parameters())
    tokens = Buckets([16, 32, 64]).bucket_for(sum(lengths))
    assert wrapped.stats().hits == {(tokens, 4 if len(lengths) <= 3 else 8): 1}


def test_attention_across_sequences_is_refused() -> None:
    """Without the document mask real tokens attend to padding."""
    wrapped = in_buckets(Attention("leaks"))
    with pytest.raises(PaddingLeakError, match="padding changes output"):
        wrapped(*batch([5, 4]))


def test_rows_of_nothing_but_minus_infinity_are_refused() -> None:
    """They are NaN, and NaN reaches the gradients of the weights, though the rows are cut off."""
    model = Attention("empty rows")
    arguments = batch([5, 4])
    wrapped = in_buckets(model)
    with pytest.raises(PaddingLeakError, match="gradient"):
        wrapped(*arguments)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(*arguments), one_by_one(model, arguments))
    own = in_buckets(Attention())  # a document of their own, and all is finite
    own(*arguments).sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in own.parameters())


def test_positions_of_the_padding_stay_in_the_table() -> None:
    """55 tokens of padding after positions up to 8, in a table of 9."""
    model = Attention()
    arguments = batch([9])
    wrapped = bucketed(model, **packed(["ids", "position_ids"], tokens=[64], sequences=[1]))
    torch.testing.assert_close(wrapped(*arguments), one_by_one(model, arguments))
    seen: list[torch.Tensor] = []

    def function(ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        seen.append(at)
        return ids * 2

    given = packed({"ids": 1, "at": 1}, tokens=[8], positions="at")
    bucketed(function, check_padding="never", outputs={1: "tokens"}, **given)(
        torch.ones(1, 3), torch.tensor([[0, 1, 0]])
    )
    assert seen[-1].tolist() == [[0, 1, 0, 0, 1, 0, 1, 0]]


def test_pairs_of_tokens_and_sequences_are_as_many_graphs() -> None:
    model = Attention()
    pairs = Buckets.fit_pairs([(16, 3), (20, 7), (60, 2)], 3)
    options = packed(["ids", "position_ids"], tokens=pairs)
    wrapped = bucketed(model, **options, compile={"backend": "eager"})
    with torch.no_grad():
        wrapped.warmup(*batch([4, 4, 4]))
        assert wrapped.stats().graphs == 3
        with no_recompile():
            for lengths in ([9, 5], [2] * 7, [8, 9], [9, 7, 3]):
                arguments = batch(lengths)
                if lengths != [9, 7, 3]:
                    torch.testing.assert_close(wrapped(*arguments), one_by_one(model, arguments))
    assert sorted(wrapped.stats().hits) == [(16, 4), (20, 8), (60, 3)]


def test_offsets_are_not_cut_short_by_the_check() -> None:
    """Half of the offsets and half of the tokens are no packed batch: that would be a false alarm.

    A difference that might be the beginning of a leak has the inputs cut short.
    """

    seen = []

    class Strained(Attention):
        def forward(self, ids: Any, cu_seqlens: Any, position_ids: Any) -> torch.Tensor:
            seen.append(ids.shape[0])
            output: torch.Tensor = super().forward(ids, cu_seqlens, position_ids)
            # Depends on the padding's values, in the last digits.
            output += 1e-7 * self.embedding(ids)[:, 0].detach().sum()
            return output

    in_buckets(Strained())(*batch([9, 9, 9, 9]))
    assert min(seen) == 36


@pytest.mark.slow
def test_flex_attention_with_a_document_mask() -> None:
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        pytest.skip("this torch has no rule for flex_attention under a dispatch mode")
    model = Attention("flex")
    arguments = batch([5, 9, 3])
    with torch.no_grad():
        expected = model(*arguments)
        torch.testing.assert_close(expected, Attention()(*arguments))
        wrapped = in_buckets(model)
        torch.testing.assert_close(wrapped(*arguments), expected)
        arguments = batch([9, 8, 1, 1, 7])
        torch.testing.assert_close(wrapped(*arguments), one_by_one(Attention(), arguments))


@pytest.mark.slow
def test_a_decoder_that_finds_sequences_by_their_positions() -> None:
    """transformers takes positions that begin again for the next sequence, without cu_seqlens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    inputs = dict.fromkeys(("input_ids", "position_ids", "labels"), 1)
    wrapped = bucketed(model, **packed(inputs, tokens=[32, 64], fill={"labels": -100}))
    for lengths in ([5, 9, 7], [12, 20, 9]):
        ids, _, positions = (each[None] for each in batch(lengths))
        labels = ids.masked_fill(positions == 0, -100)
        given: Any = {"input_ids": ids, "position_ids": positions, "labels": labels}
        expected, found = model(**given), wrapped(**given)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        same_gradients(found.loss, expected.loss, model.parameters())


def test_options_are_what_the_docstring_says() -> None:
    assert packed({"ids": 1}, tokens=[8], sequences=[2], cu_seqlens=["q", "k"]) == {
        "dims": {"ids": {1: "tokens"}, "q": {0: "cu_seqlens"}, "k": {0: "cu_seqlens"}},
        "buckets": {("tokens",): Buckets([8]), ("cu_seqlens",): Buckets([3])},
        "fill": {"q": "repeat-last", "k": "repeat-last"},
    }
    assert packed(["ids"], tokens=[8])["dims"] == {"ids": {0: "tokens"}}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": 8}, TypeError, "packed: tokens is 8, expected Buckets, a list of sizes or"),
        ({"tokens": [8], "sequences": 2}, TypeError, "packed: sequences is 2, expected Buckets"),
        ({"tokens": [8], "fill": {"labels": -100}}, ValueError, "fill names 'labels', but inputs"),
        ({"tokens": Buckets.fit_pairs([(8, 2)]), "sequences": [2]}, TypeError,
         "leave sequences out"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        packed(["ids"], **options)
