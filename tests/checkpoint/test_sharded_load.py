"""load_sharded(): all ranks load, or none has touched a tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchguard
from support.child_process import JOIN_RANKS, run_ranks
from torchguard._files import temporary_name

pytestmark = pytest.mark.slow

PROGRAM = (
    JOIN_RANKS
    + '''
import pickle, shutil
from pathlib import Path
import torchguard
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder = Path(sys.argv[0]).parent
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


class Counter:
    """Stateful."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def model(fill):
    made = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    for each in made.parameters():
        torch.nn.init.constant_(each, fill)
    fully_shard(made, mesh=mesh)
    return made


def state(fill, **more):
    return {
        "model": model(fill).state_dict(),
        "plain": torch.full((5,), fill),
        "counter": Counter(fill),
        "step": int(fill),
        **more,
    }


def values(of):
    """The one value that all tensors hold, or None for a mix."""
    found = set(of["plain"].tolist())
    for each in of["model"].values():
        found |= set(each.to_local().flatten().tolist())
    return found.pop() if len(found) == 1 else None


def attempt(target, path, **options):
    try:
        torchguard.load_sharded(target, path, **options)
        error = None
    except BaseException as raised:
        error = raised
    return {
        "raised": None if error is None else type(error).__name__,
        "text": str(error or ""),
        "holds": values(target),
        "step": int(target["step"]),
        "count": target["counter"].count,
    }


def tried(name, target, path, **options):
    result[name] = attempt(target(), path, **options)
    dist.barrier()


result = {}
with torchguard.checkpoint_folder(folder / "link", group=True) as new:
    dcp.save(state(1.0), checkpoint_id=new)
with torchguard.checkpoint_folder(folder / "step-10", group=True) as new:
    dcp.save(state(3.0), checkpoint_id=new)
dcp.save(state(1.0), checkpoint_id=folder / "foreign")

usual = lambda: state(2.0)
tried("whole", usual, folder / "link")
tried("foreign", usual, folder / "foreign")


def damaged(name, source, change):
    path = folder / name
    if rank == 0:
        shutil.copytree(folder / source, path)
        change(path)
    dist.barrier()
    return path


def flip(path):
    shard = path / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    place = data.find(torch.full((3,), 1.0).numpy().tobytes())
    data[place + 6] ^= 1
    shard.write_bytes(data)


tried("flip", usual, damaged("flipped", "link", flip))
tried("flip, no manifest", usual, damaged("flipped2", "foreign", flip))
swap = lambda path: shutil.copy(folder / "step-10" / "__1_0.distcp", path / "__1_0.distcp")
tried("other shard", usual, damaged("swapped", "link", swap))
unlink = lambda path: (path / "__1_0.distcp").unlink()
tried("missing shard", usual, damaged("less", "link", unlink))


def gap(path):
    """Forget the first chunk of a tensor."""
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    entry = metadata.state_dict_metadata["model.0.weight"]
    del entry.chunks[0]
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


tried("gap", usual, damaged("gaps", "foreign", gap))


def half():
    made = state(2.0)
    made["plain"] = made["plain"].bfloat16()
    return made


tried("dtype", half, folder / "link")
tried("cast", half, folder / "link", cast=True)


def reshaped():
    made = state(2.0)
    if rank == 1:
        made["plain"] = torch.full((6,), 2.0)
    return made


tried("shape on one rank", reshaped, folder / "link")


def more():
    made = state(2.0)
    if rank == 1:
        made["new"] = torch.zeros(2)
    return made


tried("name on one rank", more, folder / "link")
tried("partial", more, folder / "link", partial=True)


def fewer():
    made = state(2.0)
    del made["model"]["0.weight"]
    return made


tried("fewer names", fewer, folder / "link")
tried("extra", fewer, folder / "link", extra=True)
tried("kind", lambda: state(2.0, step=torch.full((1,), 2.0)), folder / "link")
tried("nowhere", usual, folder / "nowhere")
if rank != 1:
    shutil.copytree(folder / "link", folder / str(rank) / "copy")
tried("unseen", usual, folder / str(rank) / "copy")


class NoStateError(Exception):
    def __init__(self, what, why):  # pickle calls it with one argument
        super().__init__(f"{what}: {why}")


class Bad(Counter):
    def state_dict(self):
        if rank == 1:
            raise NoStateError("no state", "here")
        return super().state_dict()


class Late(Counter):
    def load_state_dict(self, state):
        if rank == 1:
            raise NoStateError("no load", "here")


for name, kind in (("object", Bad), ("late", Late)):
    target = state(2.0, counter=kind(2.0))
    result[name] = attempt(target, folder / "link")

# Rank 0 follows the link just before the next save, the others after it.
for fill in (1.0, 3.0):
    with torchguard.checkpoint_folder(folder / "moves", keep=2, group=True) as new:
        dcp.save(state(fill), checkpoint_id=new)
followed = os.path.realpath
if rank == 0:
    os.path.realpath = lambda path, **_: followed(path).replace("moves.2", "moves.1")
result["moved"] = attempt(state(2.0), folder / "moves")
os.path.realpath = followed

# FSDP1's sharded tensors.
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards


def sharded(fill):
    place = ShardMetadata([3 * rank, 0], [3, 2], f"rank:{rank}/cpu")
    shard = Shard(torch.full((3, 2), fill), place)
    return {"a": init_from_local_shards([shard], [3 * world_size, 2])}


dcp.save(sharded(1.0), checkpoint_id=folder / "sharded")
target = sharded(2.0)
torchguard.load_sharded(target, folder / "sharded")
result["sharded"] = target["a"].local_shards()[0].tensor.flatten().tolist()
print(json.dumps(result))
'''
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("sharded")
    return run_ranks(PROGRAM, folder, 3), folder


@pytest.mark.parametrize("case", ["whole", "foreign", "cast", "partial", "extra"])
def test_right_loads_load(ranks: Any, case: str) -> None:
    for each in ranks[0]:
        ours = each[case]
        assert (ours["raised"], ours["holds"], ours["count"]) == (None, 1.0, 1.0), ours["text"]
        assert ours["step"] == 1


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("flip", "__1_0.distcp does not hold what was written"),
        ("flip, no manifest", "__1_0.distcp does not hold what was written at"),
        ("other shard", "__1_0.distcp"),
        ("missing shard", "__1_0.distcp is missing"),
        ("dtype", "plain is torch.bfloat16, saved was torch.float32"),
        ("shape on one rank", "rank 1: plain has shape (6,), saved was (5,)"),
        ("name on one rank", "rank 1: new is not in the checkpoint"),
        ("fewer names", "model.0.weight is only in the checkpoint"),
        ("gap", "rank 0: model.0.weight has"),
        ("kind", "step is a tensor here and was saved as another object"),
        ("object", "rank 1: NoStateError: no state: here"),
        ("nowhere", "rank 0: there is no .metadata"),
        ("unseen", "rank 1: there is no .metadata"),
    ],
)
def test_a_difference_is_raised_on_all_ranks_and_nothing_has_changed(
    ranks: Any, case: str, says: str
) -> None:
    texts = set()
    for each in ranks[0]:
        ours = each[case]
        assert ours["raised"] == "ShardedCheckpointError"
        assert (ours["holds"], ours["count"], ours["step"]) == (2.0, 2.0, 2)
        assert says in ours["text"]
        texts.add(ours["text"].partition("\n")[2])  # after the path, which a rank may see elsewhere
    assert len(texts) == 1


def test_an_object_that_does_not_load_a_link_that_moves_and_sharded_tensors(ranks: Any) -> None:
    """An object that raises on one rank raises on all, and all ranks load one step."""
    for each in ranks[0]:
        assert each["late"]["raised"] == "ShardedCheckpointError"
        assert "rank 1: NoStateError: no load: here" in each["late"]["text"]
        assert each["late"]["step"] == 1  # what is no object is set before an object loads
        assert (each["moved"]["raised"], each["moved"]["holds"]) == (None, 1.0)
        assert each["sharded"] == [1.0] * 6


def test_one_process_without_a_group_loads_what_ranks_have_saved(ranks: Any) -> None:
    _, folder = ranks
    state: dict[str, Any] = {
        "model": {"0.weight": torch.zeros(6, 8), "0.bias": torch.zeros(6)},
        "plain": torch.zeros(5),
        "step": 0,
    }
    torchguard.load_sharded(state, folder / "link", extra=True)
    assert (state["model"]["0.weight"] == 1).all()
    assert state["step"] == 1
    converted = folder / "converted.pt"
    dcp_to_torch_save(str(folder / "link"), str(converted))
    assert torch.equal(torch.load(converted)["plain"], torch.ones(5))
    assert torchguard.verify_checkpoint(folder / "link")
    assert torchguard.verify_checkpoint(folder / "foreign")
    found = torchguard.verify_checkpoint(folder / "flipped")
    assert not found
    assert "__1_0.distcp" in found.faults[0]
    assert "model." in found.faults[0]
    assert not torchguard.verify_checkpoint(folder / "less")
    assert not torchguard.verify_checkpoint(folder / "flipped2")


def test_checkpoints_below_a_folder_are_compared_with_their_manifests(ranks: Any) -> None:
    """Not with the CRCs, which fit a shard of another checkpoint; what is being written is not."""
    _, folder = ranks
    writing = folder / temporary_name()
    writing.mkdir(exist_ok=True)
    shutil.copy(folder / "link" / "__0_0.distcp", writing)
    faults = torchguard.verify_checkpoint(folder).faults
    assert any(f"{folder}/swapped/__1_0.distcp" in fault for fault in faults)
    assert any(f"{folder}/flipped2/__1_0.distcp" in fault for fault in faults)
    assert not any("step-10" in fault or writing.name in fault for fault in faults)
