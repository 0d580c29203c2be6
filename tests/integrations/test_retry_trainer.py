"""``RetryTrainer``: out of memory, Ctrl-C and a kill in the steps of Hugging Face's ``Trainer``."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from torchguard.errors import TorchGuardWarning

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torchguard.integrations.transformers import RetryMixin, RetryTrainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Give a tiny decoder with random weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


class Classifier(nn.Module):
    """A model that knows nothing of ``num_items_in_batch``: its loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids) * attention_mask[..., None])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def data(rows: int = 32, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Give sequences of different lengths, padded; a part has fewer labels than another."""
    generator = torch.Generator().manual_seed(1)
    items = []
    for row in range(rows):
        ids = torch.randint(1, 32, (length,), generator=generator)
        real = torch.arange(length) < 3 + row % (length - 3)
        labels = torch.where(real, ids, -100)
        items.append({"input_ids": ids, "labels": labels, "attention_mask": real.long()})
    return items


def arguments(folder: Path, **given: Any) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no",
        "remove_unused_columns": False, "logging_steps": 1,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**defaults, **given})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def full_above(model: nn.Module, rows: int, calls: set[int] | None = None) -> list[int]:
    """Let memory run out in forward or backward of more rows; return the rows of each call."""
    seen: list[int] = []
    forward = model.forward

    @functools.wraps(forward)  # Trainer reads the signature
    def limited(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if not model.training:
            return out
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > rows and (calls is None or len(seen) in calls):
            if len(seen) % 2:
                out["logits"].register_hook(_raise)  # in the middle of backward
            else:
                _raise()
        return out

    def _raise(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.forward = limited
    return seen


class OwnLoss:
    """A loss of one's own, which ignores ``num_items_in_batch``: the usual override."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        del num_items_in_batch
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, None) if return_outputs else loss


class Plain(OwnLoss, transformers.Trainer):  # type: ignore[misc,name-defined]
    pass


class MeanLoss(OwnLoss, RetryTrainer):
    pass


class NoItems:
    """As with a model that does not take ``num_items_in_batch``; GPT2 shifts the labels itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class PlainNoItems(NoItems, transformers.Trainer):  # type: ignore[misc,name-defined]
    pass


class RetryNoItems(RetryMixin, PlainNoItems):
    pass


@pytest.mark.parametrize("accumulation", [1, 2])
def test_equals_trainer_where_nothing_fails(accumulation: int, tmp_path: Path) -> None:
    ends = []
    for kind in (transformers.Trainer, RetryTrainer):
        given = arguments(tmp_path, gradient_accumulation_steps=accumulation)
        trainer = kind(gpt2(0.1), given, train_dataset=data())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert [each for each in caught if issubclass(each.category, TorchGuardWarning)] == []
        ends.append((losses(trainer), weights(trainer.model).tolist()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("make", "plain", "retried"),
    [
        (gpt2, transformers.Trainer, RetryTrainer),
        (Classifier, transformers.Trainer, RetryTrainer),
        (gpt2, PlainNoItems, RetryNoItems),
        (gpt2, Plain, MeanLoss),
    ],
    ids=["a share of all items", "a mean", "a mean of shifted labels", "a mean of one's own"],
)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_halves_have_the_gradient_of_the_micro_batch(
    make: Callable[[], nn.Module], plain: Any, retried: Any, accumulation: int, tmp_path: Path
) -> None:
    if plain is Plain and accumulation > 1:
        pytest.skip("Trainer adds up the means of such a loss")
    given = arguments(tmp_path, gradient_accumulation_steps=accumulation, optim="sgd")
    right = plain(make(), given, train_dataset=data(64))
    right.train()
    model = make()
    seen = full_above(model, rows=1)
    trainer = retried(model, given, train_dataset=data(64))
    trainer.train()
    assert seen[:3] == [4, 2, 1]
    assert set(seen[3:]) == {1}  # remembered
    assert torch.allclose(weights(model), weights(right.model), rtol=0, atol=1e-6)
    assert losses(trainer) == pytest.approx(losses(right), abs=1e-3)


def test_one_micro_batch_of_four_fails(tmp_path: Path) -> None:
    """The gradients of the two before it stay."""
    given = arguments(tmp_path, gradient_accumulation_steps=4, max_steps=2, optim="sgd")
    right = RetryTrainer(gpt2(), given, train_dataset=data())
    right.train()
    model = gpt2()
    full_above(model, rows=2, calls={3})
    trainer = RetryTrainer(model, given, train_dataset=data())
    trainer.train()
    assert torch.allclose(weights(model), weights(right.model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"fp16": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"label_smoothing_factor": 0.1},
        {"optim": "adafactor"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    given = arguments(tmp_path, **options)
    right = transformers.Trainer(gpt2(), given, train_dataset=data())
    right.train()
    model = gpt2()
    seen = full_above(model, rows=2)
    trainer = RetryTrainer(model, given, train_dataset=data())
    trainer.train()
    assert 2 in seen
    tolerance = 2e-2 if "bf16" in options else 1e-3
    assert losses(trainer) == pytest.approx(losses(right), abs=tolerance)


def test_one_row_that_does_not_fit_raises(tmp_path: Path) -> None:
    model = gpt2()
    before = weights(model)
    full_above(model, rows=0)
    trainer = RetryTrainer(model, arguments(tmp_path), train_dataset=data())
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert torch.equal(weights(model), before)
    assert all(each.grad is None for each in model.parameters())


def test_what_can_not_be_split_is_named(tmp_path: Path) -> None:
    model = gpt2()
    forward = model.forward
    model.forward = lambda sizes, **kwargs: forward(**kwargs)
    full_above(model, rows=2)
    collate = transformers.default_data_collator
    trainer = RetryTrainer(
        model, arguments(tmp_path), train_dataset=data(),
        data_collator=lambda rows: {**collate(rows), "sizes": [1, 2, 3, 4]},
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"sizes.*split="):
        trainer.train()
    trainer.split = {"sizes": False}
    trainer.train()


class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Ends a training in a step: by an exception before it or behind it, or by a kill."""

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def on_pre_optimizer_step(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.at and self.how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        if state.global_step == self.at and self.how == "an error":
            raise RuntimeError("no more")

    def on_optimizer_step(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.at and self.how == "an error behind the step":
            raise RuntimeError("no more")


@pytest.mark.parametrize("how", ["Ctrl-C", "an error", "an error behind the step"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_continues_with_the_same_losses(how: str, accumulation: int, tmp_path: Path) -> None:
    """With dropout: the losses of a run that nothing stops, bit for bit."""
    given = {"gradient_accumulation_steps": accumulation, "max_steps": 6}
    right = RetryTrainer(gpt2(0.1), arguments(tmp_path / "a", **given), train_dataset=data(64))
    right.train()
    folder = tmp_path / "b"
    options = {**given, "save_strategy": "steps", "save_steps": 100}
    stopped = RetryTrainer(
        gpt2(0.1), arguments(folder, **options), train_dataset=data(64), callbacks=[Stop(how, 3)]
    )
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        stopped.train()
    complete = 4 if how == "an error behind the step" else 3
    assert [each.name for each in folder.iterdir()] == [f"checkpoint-{complete}"]
    assert torchguard.verify_checkpoint(folder / f"checkpoint-{complete}")
    again = RetryTrainer(gpt2(0.1), arguments(folder, **options), train_dataset=data(64))
    again.train(resume_from_checkpoint=True)
    assert losses(again)[complete - 6 :] == losses(right)[complete:]
    assert torch.equal(weights(again.model), weights(right.model))


def test_a_checkpoint_that_a_kill_left_is_not_resumed(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = RetryTrainer(gpt2(), arguments(tmp_path, **options), train_dataset=data())
    trainer.train()
    right = weights(trainer.model)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # the file that is written last
    again = RetryTrainer(gpt2(), arguments(tmp_path, **options), train_dataset=data())
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 2
    assert torch.equal(weights(again.model), right)
    for folder in tmp_path.glob("checkpoint-*"):
        os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete"):
        again.train(resume_from_checkpoint=True)


class OwnStep:
    """A ``training_step`` of one's own, in which memory runs out once."""

    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


class PlainOwnStep(OwnStep, transformers.Trainer):  # type: ignore[misc,name-defined]
    """It, in a trainer that is not retried."""


class RetryOwnStep(RetryMixin, PlainOwnStep):
    """The order that the page tells."""


class OwnStepOutside(OwnStep, RetryTrainer):
    """The other order: the mixin never sees the exception."""


def test_a_training_step_of_your_own_is_run_again_behind_the_mixin(tmp_path: Path) -> None:
    inside = RetryOwnStep(gpt2(), arguments(tmp_path), train_dataset=data())
    inside.train()
    assert inside.state.global_step == 4
    outside = OwnStepOutside(gpt2(), arguments(tmp_path), train_dataset=data())
    with pytest.raises(torch.OutOfMemoryError) as error:
        outside.train()
    notes = getattr(error.value, "__notes__", "")
    assert "memory ran out in OwnStep.training_step" in str(notes)
    # One that fails inside of the mixin has been run again: one row does not fit.
    model = gpt2()
    single = OwnStepOutside(model, arguments(tmp_path), train_dataset=data())
    full_above(model, 0)
    with pytest.raises(torch.OutOfMemoryError) as error:
        single.train()
    assert "YourTrainer" not in str(getattr(error.value, "__notes__", ""))
