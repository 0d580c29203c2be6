"""install("recompute") with DDP, FSDP1, FSDP2 and the checkpoint wrappers of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.child_process import JOIN_RANKS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

WORKER = (
    JOIN_RANKS
    + """
import torchguard
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.last(self.norm(self.first(x)).tanh()))

class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 2)
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)

def train(sharding, how, reentrant):
    torch.manual_seed(0)
    runs = {
        "function": lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant),
        "lambda": lambda layer, x: checkpoint(lambda y: layer(y), x, use_reentrant=reentrant),
    }
    net = Net(runs.get(how, lambda layer, x: layer(x)))
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    layers = net.layers
    if how == "composable":
        for layer in layers:
            composable(layer)
    for i in range(3):
        if how == "wrapper inside":
            layers[i] = checkpoint_wrapper(layers[i], impl)
        if sharding == "FSDP2":
            fully_shard(layers[i], mesh=mesh)
        elif sharding != "DDP":
            layers[i] = FSDP(layers[i], use_orig_params=sharding == "FSDP1 original")
        if how == "wrapper outside":
            layers[i] = checkpoint_wrapper(layers[i], impl)
    if sharding == "DDP":
        model = DDP(net)
    elif sharding == "FSDP2":
        model = net
        fully_shard(model, mesh=mesh)
    else:
        model = FSDP(net, use_orig_params=sharding == "FSDP1 original")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step + 10 * rank)
        x = torch.randn(4, 8, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found + [buffer.double().sum().item() for buffer in model.buffers()]

def near(one, other):
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)

wrong, trained, differ_without = [], 0, 0
for sharding in ("DDP", "FSDP1", "FSDP1 original", "FSDP2"):
    try:
        expected = train(sharding, "plain", False)
    except (AttributeError, RuntimeError):
        assert sharding != "DDP"  # the others not every torch has for CPUs
        continue
    for how in ("function", "lambda", "wrapper inside", "wrapper outside", "composable"):
        for reentrant in (False, True):
            if how == "composable" and (reentrant or "FSDP1" in sharding):
                continue
            if how == "wrapper outside" and sharding == "DDP":
                continue
            trained += 1
            differ_without += not near(train(sharding, how, reentrant), expected)
            with torchguard.install("recompute"):
                try:
                    found = train(sharding, how, reentrant)
                except RuntimeError as error:
                    wrong.append([sharding, how, reentrant, str(error)])
                    break
            if not near(found, expected):
                wrong.append([sharding, how, reentrant, expected, found])
print(json.dumps({"wrong": wrong, "trained": trained, "differ_without": differ_without}))
"""
)


def test_sharded_training_computes_what_it_computes_without_checkpoint(tmp_path: Path) -> None:
    """Losses of three steps and the buffers; no false alarm where parameters are gathered anew."""
    for rank in run_ranks(WORKER, tmp_path):
        assert rank["wrong"] == []
        assert rank["trained"] in {7, 16, 23, 32}
        assert rank["differ_without"] == rank["trained"]  # each: BatchNorm counts twice
