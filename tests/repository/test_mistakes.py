"""Mistakes at the front door: each error names the argument, and says what to type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchguard

guard: Any = torchguard


def double(x: Any) -> Any:
    return 2 * x


def loader() -> Any:
    sampler = guard.BucketBatchSampler([1, 2, 3], [4], batch_size=2)
    return torch.utils.data.DataLoader([[1], [1, 2], [1, 2, 3]], sampler=sampler)  # type: ignore[arg-type]


def training(**options: Any) -> Any:
    model = nn.Linear(1, 1)
    return guard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an option of inductor": (
        lambda: guard.verified(double, fallback_random=True),
        "options={'fallback_random': True}",
    ),
    "options as a text": (
        lambda: guard.verified(double, options="max-autotune"),
        "is given as mode=",
    ),
    "dynamic as a text": (
        lambda: guard.verified(double, dynamic="no"),
        "dynamic is 'no', expected True, False or None",
    ),
    "a backend that is a number": (lambda: guard.verified(double, backend=3), "backend is 3"),
    "a staticmethod": (
        lambda: guard.verified(staticmethod(double)),
        "write @staticmethod above @verified",
    ),
    "a classmethod": (
        lambda: guard.verified(classmethod(double)),
        "write @classmethod above @verified",
    ),
    "rollback_on_error above a function": (
        lambda: guard.rollback_on_error(double),
        "is not a decorator; write `with",
    ),
    "rollback_on_error(...) above a function": (
        lambda: guard.rollback_on_error(torch.ones(1))(double),
        "is not a decorator; write `with",
    ),
    "samples for lengths": (
        lambda: guard.Buckets.fit([[1, 2, 3], [1]], 2),
        "[len(sample) for sample in samples]",
    ),
    "samples for a sampler": (
        lambda: guard.BucketBatchSampler([[1, 2], [3]], [8], batch_size=2),
        "lengths[0] is of type list",
    ),
    "one length": (lambda: guard.length_mask(3, 3), "lengths is 3, expected a list"),
    "a size as a text": (lambda: guard.length_mask([1], "3"), "size is '3', expected an integer"),
    "save the other way round": (
        lambda: guard.save("model.pt", nn.Linear(1, 1).state_dict()),
        "f is of type OrderedDict, expected a path or a file: save(state, path)",
    ),
    "a sampler of batches as sampler": (lambda: next(iter(loader())), "batch_sampler=..."),
    "a layer that was called": (
        lambda: guard.safe_checkpoint(torch.ones(2)),
        "safe_checkpoint(layer, x), not safe_checkpoint(layer(x))",
    ),
    "load_sharded the other way round": (
        lambda: guard.load_sharded("folder", {}),
        "path is of type dict, expected the checkpoint's folder: load_sharded(state, folder)",
    ),
    "a number for a folder": (
        lambda: guard.checkpoint_folder(3).__enter__(),
        "path is of type int, expected the path of a folder",
    ),
    "jobs as a text": (lambda: guard.doctor(jobs="2"), "jobs is '2', expected a number"),
    "a text for a model": (
        lambda: guard.replicas_agree("a"),
        "model is of type str, expected a module",
    ),
    "lengths as a text": (lambda: guard.length_mask("ab", 3), "lengths is 'ab', expected a list"),
    "a loss without a gradient": (
        lambda: training().run(lambda batch: batch.sum(), torch.ones(2)),
        "leave out .detach()",
    ),
    "a class of schedulers": (
        lambda: training(scheduler=torch.optim.lr_scheduler.StepLR),
        "scheduler is of type type, expected a scheduler",
    ),
    "a range for a scheduler": (
        lambda: training(scheduler=range(3)),
        "scheduler is of type int, expected a scheduler",
    ),
    "Transaction for transaction": (
        lambda: guard.Transaction(nn.Linear(1, 1)),
        "write transaction(model, optimizer)",
    ),
    "dim and buckets swapped": (
        lambda: guard.pad_to_bucket(torch.ones(3), [4], 0),
        "dim is [4], expected a number: pad_to_bucket(x, dim, buckets)",
    ),
    "a text for dims": (
        lambda: guard.bucketed(dims="x", buckets=[4, 8])(double),
        "dims is 'x', expected {argument: {dim: name}}, such as {'x': {1: 't'}}",
    ),
    "an array for a tensor": (
        lambda: guard.sliced_assign(np.ones(3), 0, 1.0),
        "sliced_assign: t is of type ndarray, expected a torch.Tensor",
    ),
    "a number for also=": (
        lambda: training(also=3),
        "also has 3, expected a tensor, a module, a torch.Generator or an object with",
    ),
    "a text in also=": (
        lambda: training(also=[torch.zeros(()), "ema"]),
        "also has 'ema', expected a tensor, a module",
    ),
    "a module for a scheduler": (
        lambda: training(scheduler=nn.Linear(1, 1)),
        "scheduler is of type Linear, expected a scheduler of torch.optim",
    ),
    "load a dict": (lambda: guard.load({}), "f is of type dict, expected a path or a file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_type(name: str) -> None:
    call, text = MISTAKES[name]
    with pytest.raises(TypeError, match=re.escape(text)):
        call()


def test_a_folder_is_no_file(tmp_path: Any) -> None:
    with pytest.raises(IsADirectoryError, match="expected a file in it"):
        torchguard.save(1, tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_in_no_folder_says_what_to_make(tmp_path: Any, there: bool) -> None:
    if there:
        (tmp_path / "runs").touch()
    error = NotADirectoryError if there else FileNotFoundError
    with pytest.raises(error, match=r"path is .*in a folder that exists: os\.makedirs"):
        guard.checkpoint_folder(tmp_path / "runs" / "last").__enter__()


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="samples is empty"):
        guard.BucketCollator([4], {"ids": {1: "t"}})([])


@pytest.mark.parametrize("name", ["install", "guarded", "rollback_on_error", "transaction"])
def test_a_block_of_a_function_that_is_not_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected a call, `with torchguard.{name}\("):
        exec(f"with torchguard.{name}: pass")  # noqa: S102 - a statement that raises


def test_a_sample_that_no_bucket_holds_is_named() -> None:
    collate = guard.BucketCollator([2, 4], {"ids": {1: "t"}})
    samples = [{"ids": torch.ones(size)} for size in (1, 7, 5)]
    with pytest.raises(ValueError, match=r"samples\[1\] is 7 long in 't', .* bucket is 4: cut or"):
        collate(samples)


@pytest.mark.parametrize("samples", [1, 4])
def test_memory_that_runs_out_at_one_sample_says_what_else_helps(samples: int) -> None:
    def fail(_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    step = training()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step.run(fail, torch.ones(samples, 1), retry="halve")
    assert "one sample, which can't be halved" in "".join(caught.value.__notes__)  # type: ignore[attr-defined]
