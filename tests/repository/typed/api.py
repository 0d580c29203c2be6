"""Uses every public name as a program would: mypy and pyright, both strict, must like it.

``assert_type`` also holds what a call returns: a name that turned into ``Any`` is found. The
program runs too, so that what is checked is what there is.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from typing_extensions import assert_type

import torchguard
from torchguard.rollback.consistency import is_consistent


def mutation() -> None:
    t = torch.zeros(4)
    assert_type(torchguard.safe_resize_(t, 2, 2), torch.Tensor)
    assert_type(torchguard.safe_resize_(t, (2, 3)), torch.Tensor)
    assert_type(torchguard.safe_resize_(t, torch.Size([2, 3])), torch.Tensor)
    assert_type(torchguard.safe_resize_as_(t, torch.zeros(3)), torch.Tensor)
    assert_type(torchguard.safe_set_(t, torch.zeros(6), 0, (2, 3), (3, 1)), torch.Tensor)
    assert_type(torchguard.safe_set_(t), torch.Tensor)
    torchguard.safe_checkpoint(torch.sin, t, use_reentrant=True, preserve_rng_state=False)
    with torchguard.rollback_on_error(t, torch.zeros(2), data=True):
        t.resize_(3)
    with torchguard.guarded():
        t.add_(1)

    @torchguard.guarded("out", "checks", "overlap")
    def doubled(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x * 2 * times

    assert_type(doubled(t, times=2), torch.Tensor)

    assert_type(is_consistent(t), bool)
    torchguard.check_consistent({"weights": [t, torch.nn.Linear(2, 2)]})


def buckets() -> None:
    lengths = np.array([3, 9, 17, 60])
    ladder = torchguard.Buckets([16, 64])
    assert_type(ladder, torchguard.Buckets)
    assert_type(torchguard.Buckets.powers_of_two(16, 64), torchguard.Buckets)
    assert_type(
        torchguard.Buckets.fit(lengths, 2, cost="quadratic", maximum=64), torchguard.Buckets
    )
    assert_type(ladder.bucket_for(5), int)
    assert_type(ladder.waste(lengths, "linear"), float)

    x = torch.ones(2, 5)
    padded = torchguard.pad_to_bucket(x, 1, ladder, value=-1, side="left")
    assert_type(padded, torchguard.Padded)
    assert_type(padded.tensor, torch.Tensor)
    assert_type(padded.length, int)
    tensor, length = padded
    assert_type(torchguard.unpad(tensor, 1, length, side="left"), torch.Tensor)
    assert_type(torchguard.length_mask([2, 5], 16), torch.Tensor)
    collate = torchguard.BucketCollator(ladder, dims={"ids": {1: "t"}})
    assert_type(collate, torchguard.BucketCollator)
    sampler = torchguard.BucketBatchSampler([3, 7], ladder, tokens=64)
    assert_type(next(iter(sampler)), list[int])
    assert_type(sampler.batch_sizes, dict[int, int])


def bucketed() -> None:
    ladder = torchguard.Buckets([16, 64])

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    wrapped = torchguard.bucketed(
        model, dims={"x": {1: "t"}}, buckets=ladder, fill={"x": 0}, compile={"backend": "eager"}
    )
    assert_type(wrapped(torch.ones(2, 5)), torch.Tensor)
    assert_type(wrapped.stats(), torchguard.BucketedStats)
    wrapped.warmup(torch.ones(2, 16))
    wrapped.verify(torch.ones(2, 5))

    @torchguard.bucketed(dims={"x": {1: "t"}}, check_padding="never")
    def decorated(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x + times

    assert_type(decorated(torch.ones(2, 5), times=2), torch.Tensor)

    # The mask is made: the caller need not give it.
    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(1)

    options = {"x": {1: "t"}}
    sums = torchguard.bucketed(masked, dims=options, buckets=[16], mask="mask", fill={"x": 0})
    assert_type(sums(torch.ones(2, 5)), torch.Tensor)

    layer = torchguard.bucketed(torch.nn.Linear(2, 2), dims=({0: "t"},), buckets=[8], compile=False)
    assert_type(layer, torchguard.BucketedModule)
    assert_type(layer.stats(), torchguard.BucketedStats)
    a_module: torch.nn.Module = layer
    named: torchguard.Bucketed[torch.Tensor] = sums
    del a_module, named


def assignment() -> None:
    t, rows = torch.zeros(4, 3), torch.tensor([0, 2])
    assert_type(torchguard.sliced_assign(t, (slice(1, 3), 0), 1.0), torch.Tensor)
    assert_type(torchguard.sliced_assign(t, rows, torch.ones(2, 3)), torch.Tensor)
    assert_type(torchguard.sliced_assign_(t, (..., [0, 2]), 1), torch.Tensor)


def verification() -> None:
    @torchguard.verified(calls=2, on_mismatch="raise", backend="aot_eager")
    def doubled(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x * 2 * times

    assert_type(doubled(torch.ones(2), times=2), torch.Tensor)
    assert_type(doubled.stats(), torchguard.VerificationReport)

    @torchguard.verified
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert_type(tripled.stats(), torchguard.VerificationReport)
    layer = torchguard.verified(backend="aot_eager")(torch.nn.Linear(2, 2))
    assert_type(layer, torch.nn.Linear)
    assert_type(torchguard.verified(layer), torch.nn.Linear)
    assert_type(list(layer.parameters()), list[torch.nn.Parameter])
    named: torchguard.Verified[..., torch.Tensor] = tripled
    del named
    assert_type(torchguard.verification_report(), torchguard.VerificationReport)
    assert_type(torchguard.verification_report().graphs[0], torchguard.GraphRecord)


def patching() -> None:
    installation = torchguard.install("resize", "out", only_if_needed=False)
    assert_type(installation, torchguard.Installation)
    assert_type(installation.names, tuple[str, ...])
    assert_type(installation.skipped, dict[str, str])
    assert_type(torchguard.installed(), tuple[str, ...])
    installation.uninstall()
    assert_type(torchguard.events(), tuple[torchguard.Event, ...])
    with torchguard.install() as entered:
        assert_type(entered, torchguard.Installation)
    torchguard.install("out")
    torchguard.uninstall("out")
    assert_type(torchguard.__version__, str)


def examination() -> int:
    report = torchguard.doctor(only=["resize-locked"])
    assert_type(report, torchguard.DoctorReport)
    assert_type(report.rows[0].id, str)
    assert_type(report.exit_status, int)
    return report.exit_status


def files() -> None:
    module = torch.nn.Linear(2, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torchguard.save(module.state_dict(), path, fsync=False)
        torchguard.load_state_dict(module, torchguard.load(path))
        with torchguard.checkpoint_folder(Path(folder, "all"), keep=2) as new:
            assert_type(new, Path)
            sharded: Any = dcp
            sharded.save(module.state_dict(), checkpoint_id=new)
        torchguard.load_sharded(module.state_dict(), Path(folder, "all"), partial=True)
        found: torchguard.CheckpointCheck = torchguard.verify_checkpoint(Path(folder, "all"))
        assert_type(found.faults, tuple[str, ...])


def training() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step: torchguard.Transaction = torchguard.transaction(module, optimizer, undo="auto")
    with step:
        optimizer.zero_grad()
    loss = step.run(lambda x: module(x).mean(), torch.ones(4, 2), retry="halve")
    assert_type(loss, torch.Tensor)
    assert_type(step.guarantee, str)
    assert_type(step.committed, bool)
    step.run(lambda x: module(x).mean(), torch.ones(4, 2), parts=2, metric=float)
    step.load_state_dict(step.state_dict())
    assert_type(step.stats(), torchguard.TransactionStats)
    if torch.distributed.is_initialized():
        agree: torchguard.Replicas = torchguard.replicas_agree(module, optimizer, every=10)
        agree.gradients()
    x = torch.ones(2, requires_grad=True)
    again: torch.Tensor = torchguard.safe_checkpoint(module, x, use_reentrant=False)
    assert_type(again.shape, torch.Size)
    with torchguard.rollback_on_error(module, optimizer, [torch.ones(1)], data=True):
        pass


def errors() -> None:
    kinds: tuple[type[torchguard.TorchGuardError], ...] = (
        torchguard.InconsistentTensorError, torchguard.PaddingLeakError,
        torchguard.DamagedFileError, torchguard.UnrecoverableStepError,
        torchguard.errors.SaveError,
    )  # fmt: skip
    warning: type[UserWarning] = torchguard.MiscompilationWarning
    warning = torchguard.OverlapWarning
    runtime: type[RuntimeError] = torchguard.errors.NonResizableStorageError
    del warning, runtime
    with contextlib.suppress(*kinds):
        raise torchguard.errors.SaveError("as a program might")


if __name__ == "__main__":
    parts = (mutation, buckets, bucketed, assignment, verification)
    for part in (*parts, patching, files, training, errors):
        part()
