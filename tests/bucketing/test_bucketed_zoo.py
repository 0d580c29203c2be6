"""The zoo's architectures in buckets: as without padding with their mask, refused without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import in_time, same_gradients
from support.zoo import ZOO, Architecture, _decoder, _encoder, named
from torchguard import PaddingLeakError

pytestmark = pytest.mark.slow

IN_TIME = [each for each in ZOO if each.dims]
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
        same_gradients(found.loss, expected.loss, model.parameters(), share=TOLERANCE)


@pytest.mark.parametrize("each", IN_TIME, ids=str)
def test_ragged_batches_are_as_without_padding(each: Architecture) -> None:
    model = each.build().train()
    wrapped = in_time(model, **options_of(each))
    for seed, lengths in enumerate(([7, 4], [9, 11])):
        as_without_padding(each, model, wrapped, each.batch(lengths, seed))
    model.eval()
    with torch.no_grad():
        as_without_padding(each, model, wrapped, each.batch([13, 15]))


@pytest.mark.parametrize("each", [each for each in IN_TIME if each.mask is not None], ids=str)
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


def test_a_recurrent_model_as_it_comes() -> None:
    """Without ``outputs=``: which part of an output is real is derived, of a loop over time too."""
    each = _decoder("rwkv", "Rwkv", attention_hidden_size=16, context_length=64)
    model = each.build().train()
    wrapped = in_time(model, **options_of(each, outputs=None))
    for seed, lengths in enumerate(([7, 4], [9, 11])):
        as_without_padding(each, model, wrapped, each.batch(lengths, seed))


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
