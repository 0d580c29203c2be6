"""The table of docs/compile/bucketed.md, "What each family of models needs": each row runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from torchguard import Buckets, bucketed

pytestmark = pytest.mark.slow

_PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "compile" / "bucketed.md"
_ROWS = re.findall(
    r"^\| [^|`]*: `(\w+)` \| `(dims=.*?)`[^`]*(?:`\w+`[^|]*)?\|$", _PAGE.read_text(), re.MULTILINE
)
_SIZES = {
    "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
_GPT2 = {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
_CONFIGS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": _SIZES,
    "LlamaForCausalLM": _SIZES,
    "GPT2ForSequenceClassification": _GPT2,
    "LlamaForSequenceClassification": {**_SIZES, "pad_token_id": 0},
    "GPT2LMHeadModel": _GPT2,
    "MixtralForCausalLM": {
        **_SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 99, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip


def test_the_table_has_every_family() -> None:
    assert [name for name, _ in _ROWS] == list(_CONFIGS)


def made(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**_CONFIGS[name])).eval()


@pytest.mark.parametrize(("name", "written"), _ROWS)
def test_a_row_runs_and_equals_the_model(name: str, written: str) -> None:
    model = made(name)
    options = eval(f"dict({written})", {})  # noqa: S307 - a row of our own page
    wrapped = bucketed(model, buckets=Buckets([8, 16]), **options)
    lengths = {"t": 5, "s": 9}
    inputs: dict[str, Any] = {
        argument: torch.randint(1, 2, (2, lengths[dims[1]]))
        if argument in {"labels", "token_type_ids"}
        else torch.randint(3, 90, (2, lengths[dims[1]]))
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
    prompt = torch.randint(3, 90, mask.shape) * mask
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
