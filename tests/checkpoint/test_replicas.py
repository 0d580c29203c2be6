"""replicas_agree(): each fault is named in its first step, and right runs raise nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchguard
from support.child_process import JOIN_RANKS, run_ranks
from torchguard.replicas import _hash

# What goes wrong, the step in which it is said, what is named, and the ranks that agree. Some are
# errors of TrainCheck, by its names: https://www.usenix.org/conference/osdi25/presentation/jiang
WRONG = {
    "weight": (1, "2.weight", "0, 1, 2 | 3"),
    "no_sync": (2, "0.weight.grad", "0, 1, 2 | 3"),
    "clip": (0, "0.weight.grad", "0, 1, 2 | 3"),
    "lr": (0, "optimizer 0 param_groups[0]['lr']", "0, 1, 2 | 3"),
    "pytorch-84803": (0, "0.weight.grad", "0, 1, 2 | 3"),
    "pytorch-96600": (0, "0.weight", "0, 1, 2 | 3"),
    "baichuan2-86": (0, "2.weight.grad", "0, 1, 2 | 3"),
    "deepspeed-1801": (0, "2.weight.grad", "0, 1, 2 | 3"),
    "pytorch-104336": (0, "0.weight.grad", "0 | 1 | 2 | 3"),
    "x-jxmnop-ddp-out-of-sync": (1, "0.weight.grad", "0 | 1 | 2 | 3"),
}

PROGRAM = (
    f"{JOIN_RANKS}\nWRONG = {[*WRONG]}\n"
    '''
import contextlib, warnings
import torchguard
from torchguard.errors import ReplicasDisagreeError
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)

torch.set_num_threads(1)
last = world_size - 1


def add(tensor, value=1.0):
    with torch.no_grad():
        tensor.add_(value)


def made(fault=""):
    """A model, changed on one rank or on all where no comparison may see it."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8) if fault == "norm" else torch.nn.Tanh()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), norm, torch.nn.Linear(8, 3))
    if fault == "frozen":
        add(model[0].weight.requires_grad_(False), rank)
    if fault == "unused":  # its gradient is None on all ranks
        model.unused = torch.nn.Parameter(torch.ones(3))
    if fault == "ignored":
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
        add(model[0].bias, rank)
    return model


OF_MEGATRON = ("megatron", "baichuan2-86", "deepspeed-1801")


def run(steps, fault="", wrap=DDP, every=1):
    """Train; return the first step that raised, and what it said."""
    model = made(fault)
    options = {"norm": {"broadcast_buffers": False}, "unused": {"find_unused_parameters": True}}
    ddp = wrap(model, **options.get(fault, {}))
    if fault in OF_MEGATRON:  # of its layers each rank has a part
        for parameter in model[0].parameters():
            parameter.tensor_model_parallel = True
            add(parameter, rank)
    if fault == "pytorch-96600" and rank == last:  # a weight was lost on its way to this rank
        add(model[0].weight[0])
    if fault == "pytorch-104336":  # DDP keeps hooks of what it was made with
        model.double().float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    agree = torchguard.replicas_agree(ddp, optimizer, every=every)
    generator = torch.Generator().manual_seed(rank)
    try:
        for step in range(steps):
            parts = 2 if fault in ("accumulation", "no_sync") else 1
            for part in range(parts):
                sync = part == parts - 1 or not hasattr(ddp, "no_sync")
                if fault == "no_sync" and rank == last and step == 2:
                    sync = not sync  # off by one
                unwrapped = fault == "x-jxmnop-ddp-out-of-sync" and step == 1
                with contextlib.nullcontext() if sync else ddp.no_sync():
                    forward = model if unwrapped else ddp
                    forward(torch.randn(4, 6, generator=generator)).square().mean().backward()
            if fault in ("pytorch-84803", "baichuan2-86") and rank == last:
                model[2].weight.grad.zero_()  # lost between the cards
            if fault == "weight" and step == 1 and rank == last:
                add(model[2].weight[1, 3], 1e-6)
            norm = 0.05 if fault in ("clip", "deepspeed-1801") and rank == last else 0.1
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
    except ReplicasDisagreeError as error:
        return [step, str(error)]
    except AttributeError as error:  # FSDP2 of torch 2.6 does not train on a CPU
        assert "record_event" in str(error)
        return "not here"
    return None


def said(call, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(*arguments, **options)
        except (ReplicasDisagreeError, TypeError) as error:
            return str(error)
    found = [str(e.message) for e in caught if e.category.__name__ == "TrainingSetupWarning"]
    return "; ".join(found) or None


right = ("right", "accumulation", "norm", "frozen", "ignored", "unused", "megatron")
result = {name: run(6, name) for name in right}
result |= {name: run(5, name) for name in WRONG}
result["rare"] = run(3, "weight", every=100)

# Each rank has a part of the first layer, by plain code.
model = made()
add(model[0].weight, rank)
add(model[0].bias, rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
for parameter in model[2].parameters():
    dist.broadcast(parameter.data, 0)
    dist.broadcast(optimizer.state[parameter]["momentum_buffer"], 0)
result["sharded"] = said(torchguard.replicas_agree(model, optimizer, ignore=["0.*"]))
result["sharded, named"] = said(torchguard.replicas_agree(model, optimizer))

mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
late = made()
optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
fully_shard(late, mesh=mesh)
result["sharded after its optimizer was made"] = said(torchguard.replicas_agree, late, optimizer)
result["fsdp"] = run(5, wrap=lambda m: fully_shard(m, mesh=mesh))
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
result["hsdp"] = run(5, wrap=lambda m: fully_shard(m, mesh=both))


def broken(model):
    wrapped = fully_shard(model, mesh=both)
    if rank == 3:
        add(model[0].weight.to_local())
    return wrapped


result["hsdp broken"] = run(5, wrap=broken)
first = FullyShardedDataParallel(made(), device_id=torch.device("cpu"))
result["first fsdp"] = said(torchguard.replicas_agree, first)
parts = torch.nn.Sequential(fully_shard(torch.nn.Linear(4, 4), mesh=mesh))
for number, each in enumerate((first, parts)):
    name = f"transaction of fsdp {number + 1}"
    result[name] = said(torchguard.transaction, each, torch.optim.SGD(each.parameters()))

# What DDP ignores stays ignored where torch.compile wraps it.
model = made("ignored")
wrapped = torch.compile(DDP(model), backend="eager")
result["ignored, compiled"] = said(torchguard.replicas_agree(wrapped))
add(model[2].bias, rank)
result["broken, compiled"] = said(torchguard.replicas_agree(wrapped))

# Tensor parallel: the first weight is sharded, the last bias has a copy on each rank.
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallel = parallelize_module(made(), mesh, plan)
agree = torchguard.replicas_agree(parallel, every=1)
result["tp"] = said(agree)
parallel(torch.ones(2, 6)).sum().backward()
result["tp gradients"] = said(agree.gradients)
# A rank without the gradient of a tensor that is compared in its mesh must not leave the others.
if rank == last:
    parallel[2].bias.grad = None
    add(parallel[0].weight.to_local())
    add(parallel[2].bias.to_local())
result["tp no gradient"] = said(agree.gradients)
result["tp broken"] = said(agree)

model = made()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.param_groups[0]["betas"] = (0.9, 0.99)
optimizer.state[model[0].weight] = torch.zeros(2)
optimizer.state[model[0].bias] = {0: torch.zeros(2), "list": [torch.zeros(2)]}
agree = torchguard.replicas_agree(model, optimizer, every=1)
result["nested"] = said(agree)
if rank == last:
    add(optimizer.state[model[0].bias]["list"][0])
result["nested state"] = said(agree)
if rank == last:
    optimizer.param_groups[0]["betas"] = (0.9, 0.9)
result["nested options"] = said(agree)

model = DDP(made())
optimizer = torch.optim.AdamW(model.parameters())
agree = torchguard.replicas_agree(model, optimizer, every=1)
step = torchguard.transaction(model, optimizer, group=True)
loss_of = lambda x: model(x).square().mean()


def unequal():
    if rank == last:
        model.module[2].weight.grad.add_(1)
    agree.gradients()


for _ in range(3):
    step.run(loss_of, torch.randn(4, 6), before_step=agree.gradients)
    agree()
before = model.module[2].weight.detach().clone()
result["transaction"] = said(step.run, loss_of, torch.randn(4, 6), before_step=unequal)
result["taken back"] = None if torch.equal(before, model.module[2].weight) else "changed"

twice = torch.ones(2, 3) + rank * torch.tensor([[1], [1 - rank // last]])
for name, given, same in (
    ("of its own", [rank * 2, rank * 2 + 1], None),
    ("of all", torch.tensor([1, 2]), None),
    ("shared", [1, 2], dist.group.WORLD),
    ("not shared", [rank], dist.group.WORLD),
    ("hashed", torch.arange(6.0).view(2, 3) + 10 * rank, None),
    ("stackoverflow-67180955", twice, None),  # two workers of a loader begin alike
):
    result[f"batch {name}"] = said(agree.batch, given, same=same)
print(json.dumps(result))
'''
)


@pytest.fixture(scope="module", params=[pytest.param(4, marks=pytest.mark.slow)])
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Four, in two dimensions for HSDP."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("replicas"), request.param)


RIGHT = ["right", "accumulation", "norm", "frozen", "ignored", "unused", "megatron", "fsdp", "tp"]
RIGHT += ["hsdp", "tp gradients", "ignored, compiled", "sharded", "nested", "taken back"]
RIGHT += ["batch of its own", "batch shared", "batch hashed"]


@pytest.mark.parametrize("case", RIGHT)
def test_right_runs_raise_nothing(ranks: Any, case: str) -> None:
    if ranks[0][case] == "not here":
        pytest.skip("FSDP2 of this torch does not train on a CPU")
    assert [each[case] for each in ranks] == [None] * 4


@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_named_in_its_first_step(ranks: Any, case: str) -> None:
    step, names, agreeing = WRONG[case]
    for each in ranks:
        assert each[case] is not None
        assert each[case][0] == step
        assert f"{names} is not the same" in each[case][1]
    assert agreeing in ranks[0][case][1]


def test_the_first_hundred_steps_are_compared_whatever_every_says(ranks: Any) -> None:
    assert [each["rare"][0] for each in ranks] == [1] * 4


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("nested state", ["optimizer 0 0.bias['list'][0] is not the same"]),
        ("nested options", ["optimizer 0 param_groups[0]['betas'][1] is not the same"]),
        ("sharded, named", ["0.weight is not the same"]),
        # Along the dimension that replicates.
        ("hsdp broken", ["0.weight", "ranks 1 | 3"]),
        # The parameters of the first are parts of tensors that look like whole ones; a transaction
        # can't take back a step of either, of which a rank has a part of each parameter only.
        ("first fsdp", ["shard it with fully_shard"]),
        (
            "transaction of fsdp 1",
            ["transaction: model is sharded by FSDP. ", "load_sharded"],
        ),
        ("transaction of fsdp 2", ["transaction: 0 is sharded by FSDP. ", "load_sharded after"]),
        ("broken, compiled", ["replicas_agree: 2.bias is not the same"]),
        ("tp broken", ["2.bias is not the same", "1 of"]),
        ("tp no gradient", ["2.bias.grad is not the same"]),
        ("transaction", ["2.weight.grad"]),
        ("batch of all", ["ranks 0 and 1 both have sample 1"]),
        ("batch not shared", ["share a batch and have other samples"]),
        ("batch stackoverflow-67180955", ["twice in one batch"]),
        (
            "sharded after its optimizer was made",
            ["no optimizer has 4 trainable parameters of the model: 0.weight"],
        ),
    ],
)
def test_what_is_wrong_is_said_on_all_ranks(ranks: Any, case: str, says: list[str]) -> None:
    for each in ranks:
        if each[case] == "not here":
            pytest.skip("FSDP2 of this torch does not train on a CPU")
        said = each[case][1] if case == "hsdp broken" else each[case]
        assert [text for text in says if text not in said] == []


def test_what_is_written_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="ignore has 'head', and no parameter or buffer is called"):
        torchguard.replicas_agree(torch.nn.Linear(2, 2), ignore="head")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
)
def test_the_hash_sees_one_bit_an_exchange_and_two_signs(dtype: torch.dtype) -> None:
    values = torch.randn(70_001)
    values = values > 0 if dtype is torch.bool else values.to(dtype)
    first = _hash(values)
    assert torch.equal(first, _hash(values.clone()))
    assert torch.equal(first, _hash(torch.cat([values[:1], values])[1:]))  # another alignment
    assert torch.equal(_hash(values.conj()), _hash(values.conj().resolve_conj()))
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
