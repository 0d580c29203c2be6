"""step.state_dict() on two ranks: each with its own random numbers, sharded tensors as shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.child_process import JOIN_RANKS, run_ranks

pytestmark = pytest.mark.slow

BEGIN = (
    JOIN_RANKS
    + """
from pathlib import Path
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import torchguard

root = Path(sys.argv[0]).parent

def sharded(tree):
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    found = [p for value in values for p in sharded(value)]
    return found + [list(tree.to_local().shape)] if isinstance(tree, DTensor) else found

def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed + 1 + rank)
    return model, optimizer, transaction_of(model, optimizer)

def resumed(save, load):
    model, optimizer, step = make(0)
    train(model, optimizer, step, 2)
    state = step.state_dict()
    with torchguard.checkpoint_folder(root / "checkpoint", group=True) as new:
        save(state, new)
    kept = sharded(state)
    expected = train(model, optimizer, step, 3)
    model, optimizer, step = make(7)
    train(model, optimizer, step, 1)  # DCP loads into a state that is there
    state = load(step.state_dict())
    step.load_state_dict(state)
    return {"kept": kept, "loaded": sharded(state), "expected": expected,
            "found": train(model, optimizer, step, 3)}

def by_rank(state, new):
    torchguard.save(state, new / f"rank-{rank}.pt")

def of_rank(_):
    return torchguard.load(root / "checkpoint" / f"rank-{rank}.pt")
"""
)

COPIES = (
    BEGIN
    + """
wrap = DistributedDataParallel

def transaction_of(model, optimizer):
    return torchguard.transaction(model, optimizer, group=True)

def train(model, optimizer, step, steps):
    loss_of = lambda x: model(x).square().mean()
    return [step.run(loss_of, torch.randn(4, 4), parts=2).item() for _ in range(steps)]

result = resumed(by_rank, of_rank)
print(json.dumps(result))
"""
)


def test_copies_are_saved_on_all_ranks_each_with_its_random_numbers(tmp_path: Path) -> None:
    ranks = run_ranks(COPIES, tmp_path)
    for each in ranks:
        assert each["found"] == each["expected"]
    assert ranks[0]["expected"] != ranks[1]["expected"]  # other samples, other dropout


SHARDS = (
    BEGIN
    + """
mesh = init_device_mesh("cpu", (world_size,))

def wrap(net):
    fully_shard(net, mesh=mesh)
    return net

def transaction_of(model, optimizer):  # of its state alone: it refuses to guard steps of FSDP
    return torchguard.transaction([], optimizer, also=model)

def train(model, optimizer, step, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def by_dcp(state, new):
    torchguard.save(state["random"], new / f"random-{rank}.pt")
    dcp.save({key: value for key, value in state.items() if key != "random"}, checkpoint_id=new)

def of_dcp(state):
    random = torchguard.load(root / "checkpoint" / f"random-{rank}.pt")
    state = {key: value for key, value in state.items() if key != "random"}
    torchguard.load_sharded(state, root / "checkpoint")
    return {**state, "random": random}

result = {}
model, optimizer, step = make(0)
try:
    with step:
        pass
except TypeError as error:
    result["refused"] = str(error)
try:
    model(torch.randn(4, 4)).sum().backward()
except AttributeError as error:  # that of torch 2.6 does not train on a CPU
    assert "record_event" in str(error)
else:
    result |= {"rank": resumed(by_rank, of_rank), "dcp": resumed(by_dcp, of_dcp)}
print(json.dumps(result))
"""
)


def test_shards_stay_shards_in_a_file_of_each_rank_and_through_dcp(tmp_path: Path) -> None:
    ranks = run_ranks(SHARDS, tmp_path)
    for each in ranks:  # a rank that is rolled back alone can't train any more
        assert each["refused"].startswith("transaction: model is sharded by FSDP")
    if "dcp" not in ranks[0]:
        pytest.skip("FSDP of this torch does not train on a CPU")
    halves = [[4, 4], [4], [1, 8], [1]]  # of the parameters
    for each in ranks:
        for way in ("rank", "dcp"):
            expected = [*(half for half in halves for _ in "ab"), *halves]  # both moments of each
            assert each[way]["kept"] == each[way]["loaded"] == expected
            assert each[way]["found"] == each[way]["expected"]
