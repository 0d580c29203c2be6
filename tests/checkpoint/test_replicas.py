"""replicas_agree(): each fault is named in its first step, and right runs raise nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.child_process import JOIN_RANKS, run_ranks
from torchguard.replicas import _hash

PROGRAM = (
    JOIN_RANKS
    + '''
import contextlib
import torchguard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)

torch.set_num_threads(1)
last = world_size - 1


def made(norm=False, frozen=False):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8) if norm else torch.nn.Tanh(),
              torch.nn.Linear(8, 3)]
    model = torch.nn.Sequential(*layers)
    if frozen:
        model[0].weight.requires_grad_(False)
        if rank == last:
            with torch.no_grad():
                model[0].weight.add_(1)
    return model


def run(steps, fault="", wrap=DDP, every=1, **options):
    """Train; return the first step that raised, and what it said."""
    model = made(norm=fault == "norm", frozen=fault == "frozen")
    if fault == "unused":  # its gradient is None on all ranks
        model.unused = torch.nn.Parameter(torch.ones(3))
    if fault == "ignored":
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
        with torch.no_grad():
            model[0].bias.add_(rank)
    broadcast = {} if fault != "norm" else {"broadcast_buffers": False}
    if fault == "unused":
        broadcast = {"find_unused_parameters": True}
    ddp = wrap(model, **broadcast)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    agree = torchguard.replicas_agree(ddp, optimizer, every=every, **options)
    generator = torch.Generator().manual_seed(rank)
    try:
        for step in range(steps):
            parts = 2 if fault in ("accumulation", "no_sync") else 1
            for part in range(parts):
                sync = part == parts - 1 or not hasattr(ddp, "no_sync")
                if fault == "no_sync" and rank == last and step == 2:
                    sync = not sync  # off by one
                with contextlib.nullcontext() if sync else ddp.no_sync():
                    if fault == "seed":
                        x = torch.randn(4, 6)
                    else:
                        x = torch.randn(4, 6, generator=generator)
                    ddp(x).square().mean().backward()
            if fault == "weight" and step == 1 and rank == last:
                with torch.no_grad():
                    model[2].weight[1, 3] += 1e-6
            norm = 0.1 if fault != "clip" or rank != last else 0.05
            # What DDP ignores has a gradient of this rank alone; it takes no part in the norm.
            named = model.named_parameters()
            averaged = [p for n, p in named if (fault, n) != ("ignored", "0.bias")]
            torch.nn.utils.clip_grad_norm_(averaged, norm)
            agree.gradients()
            if fault == "lr" and rank == last:
                optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
            agree()
            optimizer.zero_grad()
    except torchguard.replicas_error as error:
        return [step, str(error)]
    except AttributeError as error:  # FSDP2 of torch 2.6 does not train on a CPU
        assert "record_event" in str(error)
        return "not here"
    return None


import torchguard.errors
torchguard.replicas_error = torchguard.errors.ReplicasDisagreeError
right = ("right", "accumulation", "norm", "frozen", "ignored", "unused")
result = {name: run(60, name) for name in right}
for name in ("weight", "no_sync", "clip", "lr"):
    result[name] = run(5, name)
result["rare"] = run(3, "weight", every=100)

mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
result["fsdp"] = run(5, wrap=lambda m: fully_shard(m, mesh=mesh))
if world_size == 4:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    result["hsdp"] = run(5, wrap=lambda m: fully_shard(m, mesh=both))

    def broken(model):
        wrapped = fully_shard(model, mesh=both)
        if rank == 3:
            with torch.no_grad():
                model[0].weight.to_local().add_(1)
        return wrapped

    result["hsdp broken"] = run(5, wrap=broken)


def compared(model, what="__call__"):
    try:
        getattr(torchguard.replicas_agree(model), what)()
    except torchguard.replicas_error as error:
        return str(error)
    return None


# What DDP ignores stays ignored where torch.compile wraps it.
model = made()
DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
with torch.no_grad():
    model[0].bias.add_(rank)
wrapped = torch.compile(DDP(model), backend="eager")
result["ignored, compiled"] = compared(wrapped)
with torch.no_grad():
    model[2].bias.add_(rank)
result["broken, compiled"] = compared(wrapped)

# Tensor parallel: the first weight is sharded, the last bias has a copy on each rank.
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallel = parallelize_module(made(), mesh, plan)
result["tp"] = compared(parallel)
if rank == last:
    with torch.no_grad():
        parallel[0].weight.to_local().add_(1)
        parallel[2].bias.to_local().add_(1)
result["tp broken"] = compared(parallel)

# A rank without the gradient of a tensor that is compared in its mesh must not leave the others.
parallel = parallelize_module(made(), mesh, plan)
parallel(torch.ones(2, 6)).sum().backward()
result["tp gradients"] = compared(parallel, "gradients")
if rank == last:
    parallel[2].bias.grad = None
result["tp no gradient"] = compared(parallel, "gradients")

model = DDP(made())
optimizer = torch.optim.AdamW(model.parameters())
agree = torchguard.replicas_agree(model, optimizer, every=1)
step = torchguard.transaction(model, optimizer, group=True)
try:
    for number in range(3):
        loss_of = lambda x: model(x).square().mean()
        step.run(loss_of, torch.randn(4, 6), before_step=agree.gradients)
        agree()
    result["transaction"] = None

    def broken():
        if rank == last:
            model.module[2].weight.grad.add_(1)
        agree.gradients()

    before = model.module[2].weight.detach().clone()
    try:
        step.run(loss_of, torch.randn(4, 6), before_step=broken)
        result["transaction broken"] = None
    except torchguard.replicas_error as error:
        kept = torch.equal(before, model.module[2].weight)
        result["transaction broken"] = [str(error), kept]
except torchguard.replicas_error as error:
    result["transaction"] = str(error)

model = made()
agree = torchguard.replicas_agree(model)


def batch(ids, **options):
    try:
        agree.batch(ids, **options)
    except torchguard.replicas_error as error:
        return str(error)
    return None


result["batch"] = [
    batch([rank * 2, rank * 2 + 1]),
    batch(torch.tensor([1, 2])),
    batch([1, 2], same=dist.group.WORLD),
    batch([rank], same=dist.group.WORLD),
]
print(json.dumps(result))
'''
)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("replicas")
    return run_ranks(PROGRAM, folder, request.param)


@pytest.mark.parametrize(
    "case",
    [
        "right",
        "accumulation",
        "norm",
        "frozen",
        "ignored",
        "ignored, compiled",
        "unused",
        "fsdp",
        "tp",
        "transaction",
    ],
)
def test_right_runs_raise_nothing(ranks: Any, case: str) -> None:
    if case == "fsdp" and ranks[0][case] == "not here":
        pytest.skip("FSDP2 of this torch does not train on a CPU")
    assert [each[case] for each in ranks] == [None] * len(ranks)


@pytest.mark.parametrize(
    ("case", "step", "names"),
    [
        ("weight", 1, "2.weight"),
        ("no_sync", 2, "0.weight.grad"),
        ("clip", 0, "0.weight.grad"),
        ("lr", 0, "optimizer 0 param_groups[0]['lr']"),
    ],
)
def test_a_fault_is_named_in_its_first_step(ranks: Any, case: str, step: int, names: str) -> None:
    for each in ranks:
        found = each[case]
        assert found is not None
        assert found[0] == step
        assert names in found[1]
    groups = f"{', '.join(map(str, range(len(ranks) - 1)))} | {len(ranks) - 1}"
    assert groups in ranks[0][case][1]


def test_a_compiled_model_is_compared(ranks: Any) -> None:
    for each in ranks:
        assert each["broken, compiled"].startswith("replicas_agree: 2.bias is not the same")


def test_hsdp_is_compared_along_the_dimension_that_replicates(ranks: Any) -> None:
    if len(ranks) == 4 and ranks[0]["hsdp"] != "not here":
        assert [each["hsdp"] for each in ranks] == [None] * 4
        for each in ranks:
            assert "0.weight" in each["hsdp broken"][1]
            assert "ranks 1 | 3" in each["hsdp broken"][1]


def test_tensor_parallel_compares_what_has_copies(ranks: Any) -> None:
    for each in ranks:
        assert "2.bias is not the same" in each["tp broken"]
        assert "1 of" in each["tp broken"]
        assert each["tp gradients"] is None
        assert "2.bias.grad is not the same" in each["tp no gradient"]


def test_a_transaction_takes_back_a_step_whose_gradients_differ(ranks: Any) -> None:
    for each in ranks:
        text, kept = each["transaction broken"]
        assert "2.weight.grad" in text
        assert kept


def test_between_two_comparisons_nothing_is_compared(ranks: Any) -> None:
    assert [each["rare"] for each in ranks] == [None] * len(ranks)


def test_batches(ranks: Any) -> None:
    for each in ranks:
        different, same, shared, unshared = each["batch"]
        assert (different, shared) == (None, None)
        assert "ranks 0 and 1 both have sample 1" in same
        assert "share a batch and have other samples" in unshared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_the_hash_sees_one_bit_an_exchange_and_two_signs(dtype: torch.dtype) -> None:
    values = torch.randn(70_001)
    values = values > 0 if dtype is torch.bool else values.to(dtype)
    first = _hash(values)
    assert torch.equal(first, _hash(values.clone()))
    assert torch.equal(first, _hash(torch.cat([values[:1], values])[1:]))  # another alignment
    for place in (0, 1, 40_000, 70_000):
        changed = values.clone()
        changed[place] = ~changed[place] if dtype is torch.bool else -changed[place]
        assert not torch.equal(first, _hash(changed))
    exchanged = values.clone()
    other = int((values != values[3]).nonzero()[5])
    exchanged[3], exchanged[other] = values[other].clone(), values[3].clone()
    assert not torch.equal(first, _hash(exchanged))
    if dtype is not torch.bool:
        signs = values.clone()
        signs[10] *= -1
        signs[12] *= -1
        assert not torch.equal(first, _hash(signs))
    assert not torch.equal(first, _hash(values.reshape(1, -1)))
