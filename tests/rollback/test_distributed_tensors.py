"""DTensors of two ranks: sharded by FSDP2, and by tensor parallelism, under every guard."""

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
import contextlib
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from torchguard import (check_consistent, guarded, install, rollback_on_error, safe_resize_)
from torchguard.rollback.consistency import is_consistent
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
SCOPES = {
    "torch": contextlib.nullcontext,
    "guarded": guarded,
    "install": install,
    "install out": lambda: install("resize", "out", only_if_needed=False),
}

def model_of(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if kind == "FSDP2":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

def trained(kind, scope):
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank if kind == "FSDP2" else 0)
    with scope():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 8, generator=generator)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        check_consistent(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [parameter.to_local().tolist() for parameter in model.parameters()]

result = {"trained": {}}
for kind in ("FSDP2", "tensor parallel"):
    try:
        trained(kind, contextlib.nullcontext)
    except AttributeError as error:  # FSDP2 of torch 2.6 asks a CPU for a stream
        result["trained"][kind] = str(error)
        continue
    found = {name: trained(kind, scope) for name, scope in SCOPES.items()}
    result["trained"][kind] = [name for name in found if found[name] != found["torch"]]

def sharded():
    return distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])

def outcome(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "passed"

result["outcomes"] = {}
for name, scope in SCOPES.items():
    tensor, other, wrong = sharded(), sharded(), torch.ones(5, 5)
    calls = {
        "add_": lambda: tensor.add_(1),
        "copy_": lambda: tensor.copy_(other),
        "foreach": lambda: torch._foreach_mul_([tensor], 2),
        "out=": lambda: torch.add(other, 1, out=tensor),
        "resize_": lambda: tensor.resize_(4, 2),
        "a plain tensor": lambda: tensor.add_(wrong),
        "a wrong shape": lambda: tensor.copy_(distribute_tensor(wrong, mesh, [Shard(0)])),
    }
    with scope():
        result["outcomes"][name] = {which: outcome(call) for which, call in calls.items()}
    result["outcomes"][name]["consistent"] = is_consistent(tensor)

# A failure in the middle: one rank's part is written, in Python, when the other raises.
tensor = sharded()
local = tensor.to_local()
before, version = local.clone(), tensor._version
with contextlib.suppress(ValueError), rollback_on_error(tensor, data=True):
    local.fill_(7)
    raise ValueError
result["rolled back"] = torch.equal(local, before)
result["safe_resize_"] = outcome(lambda: safe_resize_(tensor, 3, 3))
result["resized"] = [list(tensor.shape), is_consistent(tensor)]
print(json.dumps(result))
"""
)


def test_guards_on_distributed_tensors(tmp_path: Path) -> None:
    """AdamW ends bit for bit as on torch; operations pass or fail as there; a block is undone."""
    for result in run_ranks(WORKER, tmp_path):
        for kind, different in result["trained"].items():
            assert different == [] or (kind == "FSDP2" and isinstance(different, str))
        outcomes = result["outcomes"]
        assert list(outcomes["torch"].values()).count("passed") >= 4
        for name, found in outcomes.items():
            assert found == outcomes["torch"], name
            assert found["consistent"], name
        assert result["safe_resize_"] == outcomes["torch"]["resize_"]
        assert result["resized"] == [[4, 2], True]
        assert result["rolled back"]
