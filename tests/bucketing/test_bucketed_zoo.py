"""The zoo's architectures in buckets: as without padding with their mask, refused without one."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import in_time, same_gradients
from support.slow import slow_except
from support.zoo import (
    _SEQ2SEQ,
    _SIZES,
    VOCABULARY,
    ZOO,
    Architecture,
    _decoder,
    _encoder,
    _made,
    named,
)
from torchguard import Buckets, PaddingLeakError, bucketed

IN_TIME = [each for each in ZOO if each.dims]
MASKED = [each for each in IN_TIME if each.mask is not None]
TOLERANCE = 5e-5
"""Of the largest value, as bucketed allows it: sums over more terms round otherwise."""

# Sizes are said, because to derive them is most of the time that this file would take.
OUTPUTS = {"logits": {1: "t"}, "encoder_last_hidden_state": {1: "t"}}


def options_of(each: Architecture, **options: Any) -> dict[str, Any]:
    unit = 100 if each.mask is not None and "input_values" in each.dims else 1
    sizes = {} if unit > 1 else OUTPUTS
    if each.name == "whisper":
        sizes = {"logits": {1: "t"}}
    return {
        "dims": each.dims,
        "mask": each.mask,
        "buckets": [8 * unit, 16 * unit],
        "fill": each.fill,
        "outputs": sizes,
        **options,
    }


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * largest)


def as_without_padding(
    each: Architecture, model: nn.Module, wrapped: Any, batch: dict[str, torch.Tensor]
) -> None:
    """Compare outputs where they mean something, the loss, and the gradients."""
    expected, found = model(**batch), wrapped(**batch)
    assert type(found) is type(expected)
    close(found.loss, expected.loss)
    assert found.logits.shape == expected.logits.shape
    mask = batch.get(each.mask or "")
    if mask is None or expected.logits.dim() != 3:  # of a sequence, or of all of it
        close(found.logits, expected.logits)
    else:
        close(found.logits[mask != 0], expected.logits[mask != 0])
    if torch.is_grad_enabled():
        same_gradients(found.loss, expected.loss, model.parameters(), TOLERANCE)


@pytest.mark.parametrize("each", slow_except(IN_TIME, "bert", "gpt2"), ids=str)
def test_ragged_batches_are_as_without_padding(each: Architecture) -> None:
    model = each.build().train()
    wrapped = in_time(model, **options_of(each))
    for seed, lengths in enumerate(([7, 4], [9, 11])):
        as_without_padding(each, model, wrapped, each.batch(lengths, seed))
    model.eval()
    with torch.no_grad():
        as_without_padding(each, model, wrapped, each.batch([13, 15]))


@pytest.mark.parametrize("each", slow_except(MASKED, "bert", "gpt2"), ids=str)
def test_without_its_mask_what_needs_one_is_refused(each: Architecture) -> None:
    model = each.build().train()
    dims = {name: spec for name, spec in each.dims.items() if name != each.mask}
    wrapped = in_time(model, **options_of(each, dims=dims, mask=None))
    batch = each.batch([15, 15])  # little padding
    del batch[each.mask or ""]
    if not each.needs_mask:
        as_without_padding(each, model, wrapped, batch)
        return
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            with pytest.raises(PaddingLeakError, match="padding changes"):
                wrapped(**batch)


@pytest.mark.slow
def test_a_recurrent_model_as_it_comes() -> None:
    """Without ``outputs=``: which part of an output is real is derived, of a loop over time too."""
    each = _decoder("rwkv", "Rwkv", attention_hidden_size=16, context_length=64)
    model = each.build().train()
    wrapped = in_time(model, **options_of(each, outputs=None))
    for seed, lengths in enumerate(([7, 4], [9, 11])):
        as_without_padding(each, model, wrapped, each.batch(lengths, seed))


@pytest.mark.slow
def test_compiled_for_each_bucket() -> None:
    each = named("bert")
    model = each.build(to_compile=True).train()
    wrapped = in_time(model, **options_of(each, compile={"backend": "aot_eager"}))
    for lengths in ([7, 4], [9, 11], [6, 5]):
        as_without_padding(each, model, wrapped, each.batch(lengths))
    assert wrapped.stats().graphs == 2


@pytest.mark.parametrize(
    "each", [_encoder("fnet", "FNet"), _encoder("convbert", "ConvBert", num_groups=1)], ids=str
)
def test_what_mixes_positions_and_takes_no_mask_for_it_is_refused(each: Architecture) -> None:
    """A Fourier transform, and a convolution behind a layer with a bias."""
    wrapped = in_time(each.build().train(), **options_of(each))
    with pytest.raises(PaddingLeakError, match="attention_mask was given: something in"):
        wrapped(**each.batch([7, 4]))


# The table of docs/compile/bucketed.md, "What each family of models needs": each row runs.

_PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "compile" / "bucketed.md"
_ROWS = re.findall(
    r"^\| [^|`]*: `(\w+)` \| `(dims=.*?)`[^`]*(?:`\w+`[^|]*)?\|$", _PAGE.read_text(), re.MULTILINE
)
assert len(_ROWS) == 7


def made(name: str) -> Any:
    pytest.importorskip("transformers")
    stem, head = re.fullmatch("([A-Z].*?)(For.*|LMHead.*)", name).groups()  # type: ignore[union-attr]
    torch.manual_seed(0)
    return _made(stem, head, {**_SIZES, **_SEQ2SEQ}, decoder_start_token_id=0)().eval()


_QUICK = ("BertForTokenClassification", "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("name", "written"), slow_except(_ROWS, *_QUICK, name=operator.itemgetter(0))
)
def test_a_row_runs_and_equals_the_model(name: str, written: str) -> None:
    model = made(name)
    options = eval(f"dict({written})", {})  # noqa: S307 - a row of our own page
    wrapped = bucketed(model, buckets=Buckets([8, 16]), **options)
    lengths = {"t": 5, "s": 9}
    inputs: dict[str, Any] = {
        argument: torch.randint(1, 2, (2, lengths[dims[1]]))
        if argument in {"labels", "token_type_ids"}
        else torch.randint(3, VOCABULARY, (2, lengths[dims[1]]))
        for argument, dims in options["dims"].items()
    }
    if "position_ids" in inputs:  # those that generate() makes
        inputs["position_ids"] = torch.arange(lengths["t"]).expand(2, -1)
    if "Bert" not in name:
        inputs["use_cache"] = False
    found, expected = wrapped(**inputs), model(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)
    if "labels" in inputs:
        torch.testing.assert_close(found.loss, expected.loss)
    assert wrapped.stats().waste > 0
    for one, other in zip(
        found.get("router_logits", ()), expected.get("router_logits", ()), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "sampled"), [([6, 3], True), ([2, 12], False)], ids=str)
def test_generate_by_its_row_gives_the_tokens_of_the_model(
    lengths: list[int], sampled: bool
) -> None:
    model = made("GPT2LMHeadModel")
    written = dict(_ROWS)["GPT2LMHeadModel"]
    options = eval(f"dict({written})", {})  # noqa: S307 - a row of our own page
    wrapped = bucketed(model, buckets=Buckets([8, 16, 32]), **options)
    longest = max(lengths)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    prompt = torch.randint(3, VOCABULARY, mask.shape) * mask
    found, expected = (
        seeded(each, prompt, attention_mask=mask, do_sample=sampled) for each in (wrapped, model)
    )
    assert torch.equal(found, expected)
    assert found.shape == (len(lengths), longest + 6)
    assert wrapped.stats().calls == 6


def seeded(model: Any, prompt: torch.Tensor, **given: Any) -> torch.Tensor:
    torch.manual_seed(1)
    tokens: torch.Tensor = model.generate(
        prompt, max_new_tokens=6, min_new_tokens=6, use_cache=False, **given
    )
    return tokens
