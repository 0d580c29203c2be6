"""BucketBatchSampler in the loops of trainers, as docs/compile/batches.md shows them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.child_process import output_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ROWS = """
import json, sys, torch
from torch.utils.data import DataLoader
from torchguard import BucketBatchSampler, BucketCollator

lengths = [1 + 7 * n % 32 for n in range(70)]
rows = [{"input_ids": [1 + n] * size, "labels": [1] * size, "attention_mask": [1] * size}
        for n, size in enumerate(lengths)]

def loader_of(workers=0, **ranks):
    sampler = BucketBatchSampler(lengths, [8, 16, 32], tokens=128, **ranks)
    dims = {name: {1: "t"} for name in rows[0]}
    collate = BucketCollator(
        [8, 16, 32], dims, fill={"labels": -100}, batch_sizes=sampler.batch_sizes
    )
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers)
"""

TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class BucketTrainer(Trainer):
    def get_train_dataloader(self):
        return loader_of(workers=1)

class Model(LlamaForCausalLM):
    def forward(self, input_ids=None, **more):
        self.seen.append([list(input_ids.shape), input_ids[:, 0].tolist()])
        return super().forward(input_ids=input_ids, **more)

def train(folder, resume=None):
    torch.manual_seed(0)
    model = Model(LlamaConfig(
        vocab_size=128, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    ))
    model.seen = []
    arguments = TrainingArguments(
        folder, num_train_epochs=2, report_to=[], use_cpu=True, save_steps=20, logging_steps=1,
        disable_tqdm=True,
    )
    trainer = BucketTrainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return model.seen, norms

seen, norms = train(sys.argv[1])
resumed, _ = train(sys.argv[1], sys.argv[1] + "/checkpoint-20")
steps = len(loader_of())
print(json.dumps([steps, seen, resumed, all(norm == norm for norm in norms)]))
"""

ACCELERATE = """
from accelerate.data_loader import prepare_data_loader

def dealt(process, **ranks):
    loader = prepare_data_loader(
        loader_of(**ranks), num_processes=2, process_index=process, put_on_device=False
    )
    return [[[list(batch["input_ids"].shape), batch["input_ids"][:, 0].tolist()]
             for batch in loader] for epoch in range(2)]

print(json.dumps([dealt(process, rank="all", world_size=2) for process in range(2)]))
"""


def items(batches: list[list[list[int]]]) -> list[int]:
    return sorted(first for _, rows in batches for first in rows if first)


def test_transformers_trains_and_resumes(tmp_path: Path) -> None:
    """Every row once per epoch, other orders, no NaN from rows of padding; exact after a stop."""
    pytest.importorskip("transformers")
    printed = output_of(ROWS + TRANSFORMERS, str(tmp_path / "run"), folder=tmp_path)
    steps, seen, resumed, finite = json.loads(printed.splitlines()[-1])
    assert len(seen) == 2 * steps
    first, second = seen[:steps], seen[steps:]
    assert items(first) == items(second) == list(range(1, 71))
    assert first != second
    assert {tuple(shape) for shape, _ in seen} <= {(16, 8), (8, 16), (4, 32)}
    assert resumed == seen[20:]
    assert finite


def test_accelerate_deals_the_batches_of_all_ranks_out(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks = json.loads(output_of(ROWS + ACCELERATE, folder=tmp_path).splitlines()[-1])
    for epoch in range(2):
        one, other = (rank[epoch] for rank in ranks)
        assert [shape for shape, _ in one] == [shape for shape, _ in other]
        assert set(items(one)) | set(items(other)) == set(range(1, 71))
    assert ranks[0][0] != ranks[0][1]
