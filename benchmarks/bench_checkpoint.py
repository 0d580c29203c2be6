"""``save``, ``load_state_dict`` and sharded checkpoints against PyTorch's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torchguard
from benchmarks.harness import Comparison, measure
from benchmarks.models import resnet_sized
from benchmarks.program import Benchmark, Results, Setting

MEGABYTE = 1 << 20
SIZES = ((1, "1 MB"), (1024, "1 GB"))
CONTAINERS = 300_000


def states(*, quick: bool) -> Iterator[Comparison]:
    """Compare loading; nothing is wrong with the states."""
    modules: dict[str, Callable[[], nn.Module]] = {
        # Its tensors and bytes, spread evenly.
        "resnet-50": partial(resnet_sized, 8 if quick else 229, 3, 1000),
        "1000-parameters": lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(500))),
    }
    for name, make in modules.items():
        module, state = make(), make().state_dict()
        size = sum(value.nbytes for value in state.values())
        names = {"module": module, "state": state, "torchguard": torchguard}
        yield Comparison(
            f"load_state_dict-{name}",
            f"{len(state)} tensors, {size / MEGABYTE:.1f} MB",
            names,
            "module.load_state_dict(state)",
            "torchguard.load_state_dict(module, state)",
        )


def files(setting: Setting, folder: str) -> Iterator[Comparison]:
    """Compare saving and loading, with and without waiting for the disk."""
    for megabytes, size in SIZES[:1] if setting.quick else SIZES:
        count = megabytes * MEGABYTE // 16
        tensors = {str(i): torch.rand(count, device=setting.device) for i in range(4)}
        path = f"{folder}/{megabytes}.pt"
        names = {"torch": torch, "torchguard": torchguard, "tensors": tensors, "path": path}
        for fsync in (False, True):
            yield Comparison(
                f"save-{megabytes}MB{'-fsync' if fsync else ''}",
                f"{size} in 4 tensors" + (", waiting for the disk" if fsync else ""),
                names,
                "torch.save(tensors, path)",
                f"torchguard.save(tensors, path, fsync={fsync})",
            )
        what = f"{size} in 4 tensors, checksums compared"
        pair = "torch.load(path)", "torchguard.load(path)"
        yield Comparison(f"load-{megabytes}MB", what, names, *pair)


def containers(setting: Setting, folder: str) -> Iterator[Comparison]:
    """Compare saving many containers, none of which holds a tensor."""
    count = CONTAINERS // (100 if setting.quick else 1)
    obj = [{"list": [number], "tuple": (number,)} for number in range(count // 3)]
    names = {"torch": torch, "torchguard": torchguard, "obj": obj, "path": f"{folder}/many.pt"}
    yield Comparison(
        "save-containers",
        f"{count:,} dicts, lists and tuples",
        names,
        "torch.save(obj, path)",
        "torchguard.save(obj, path, fsync=False)",
    )


def save_sharded(state: dict[str, Any], link: str) -> None:
    """Save a step whole."""
    with torchguard.checkpoint_folder(link, group=True) as new:
        dcp_save(state, checkpoint_id=new)


def shards(folder: str, *, quick: bool) -> Iterator[Comparison]:
    """Compare saving over a checkpoint of one rank, and loading one."""
    megabytes = 1 if quick else 1024
    state = {str(i): torch.rand(megabytes << 18 >> 4) for i in range(16)}  # float32
    dcp_save(state, checkpoint_id=f"{folder}/bare")
    save_sharded(state, f"{folder}/link")
    names = {"dcp": dcp, "torchguard": torchguard, "state": state, "save_sharded": save_sharded}
    names |= {"bare": f"{folder}/bare", "link": f"{folder}/link"}
    what = f"sharded, {megabytes} MB in 16 tensors"
    plain, ours = "dcp.save(state, checkpoint_id=bare)", "save_sharded(state, link)"
    yield Comparison("save-shards", f"{what}: hashed, shown in one step", names, plain, ours)
    for name, how, path in (
        ("load-shards", "hashed, then read", "link"),
        ("load-shards-crc", "without a manifest, by the CRCs in the shards", "bare"),
    ):
        pair = f"dcp.load(state, checkpoint_id={path})", f"torchguard.load_sharded(state, {path})"
        yield Comparison(name, f"{what}: {how}", names, *pair)


def run(setting: Setting) -> Results:
    """Measure every row."""
    # Quick to measure, and with a target: more rounds than for the gigabytes.
    more = setting if setting.quick else replace(setting, rounds=8 * setting.rounds)
    rows = measure(states(quick=setting.quick), more, block_seconds=0.1)
    with tempfile.TemporaryDirectory() as folder:
        rows += measure(containers(setting, folder), setting, block_seconds=0.1)
        rows += measure(files(setting, folder), setting, block_seconds=0.05)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        rows += measure(shards(folder, quick=setting.quick), setting, block_seconds=0.05)
        dist.destroy_process_group()
    return {"rows": rows}


BENCHMARK = Benchmark(
    "checkpoint",
    "What do `save`, `load`, `load_state_dict` and sharded checkpoints cost over PyTorch's own?",
    run,
    rounds=9,
    devices=("cpu",),
)
