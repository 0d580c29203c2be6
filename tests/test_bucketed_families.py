"""The table of docs/bucketed.md, "What each family of models needs": each row runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from torchguard import Buckets, bucketed

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "bucketed.md"
_ROWS = re.findall(
    r"^\| [^|`]*: `(\w+)` \| `(dims=.*?)`[^`]*(?:`\w+`[^|]*)?\|$", _PAGE.read_text(), re.MULTILINE
)
_SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": _SIZES,
    "LlamaForCausalLM": _SIZES,
    "GPT2ForSequenceClassification": {
        "vocab_size": 99,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "pad_token_id": 0,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 99,
        "d_model": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "decoder_start_token_id": 0,
    },
}


def test_the_table_has_every_family() -> None:
    assert [name for name, _ in _ROWS] == list(_CONFIGS)


@pytest.mark.parametrize(("name", "written"), _ROWS)
def test_a_row_runs_and_equals_the_model(name: str, written: str) -> None:
    transformers = pytest.importorskip("transformers")
    options = eval(f"dict({written})", {})  # noqa: S307 - a row of our own page
    torch.manual_seed(0)
    config = getattr(transformers, name.partition("For")[0] + "Config")(**_CONFIGS[name])
    model = getattr(transformers, name)(config).eval()
    wrapped = bucketed(model, buckets=Buckets([8, 16]), **options)
    lengths = {"t": 5, "s": 9}
    inputs: dict[str, Any] = {
        argument: torch.randint(1, 2, (2, lengths[dims[1]]))
        if argument in {"labels", "token_type_ids"}
        else torch.randint(3, 90, (2, lengths[dims[1]]))
        for argument, dims in options["dims"].items()
    }
    if "Bert" not in name:
        inputs["use_cache"] = False
    found, expected = wrapped(**inputs), model(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)
    if "labels" in inputs:
        torch.testing.assert_close(found.loss, expected.loss)
    assert wrapped.stats().waste > 0
