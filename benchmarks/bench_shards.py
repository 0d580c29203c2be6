"""``checkpoint_folder(group=)`` and ``load_sharded`` against bare DCP, and ``replicas_agree``.

Saved and loaded is 1 GB in one process that is a group. The copies are compared on two ranks of
gloo: ResNet-50's 161 tensors, 25.6 million elements in all, beside the all-reduce of the same
gradients that each step of DistributedDataParallel pays.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torchguard
from benchmarks.harness import Comparison, Target, compared, measure
from benchmarks.processes import in_a_process
from benchmarks.program import Benchmark, Results, Setting

TENSORS, ELEMENTS, RANKS = 161, 25_600_000, 2


def save(state: dict[str, Any], link: str) -> None:
    """Save a step whole."""
    with torchguard.checkpoint_folder(link, group=True) as new:
        dcp_save(state, checkpoint_id=new)


def files(folder: str, *, quick: bool) -> Iterator[Comparison]:
    """Compare saving over a checkpoint, and loading one."""
    megabytes = 1 if quick else 1024
    state = {str(i): torch.rand(megabytes << 18 >> 4) for i in range(16)}  # float32
    dcp_save(state, checkpoint_id=f"{folder}/bare")
    save(state, f"{folder}/link")
    names = {"dcp": dcp, "torchguard": torchguard, "state": state, "save": save}
    names |= {"bare": f"{folder}/bare", "link": f"{folder}/link"}
    what = f"{megabytes} MB in 16 tensors, one rank"
    yield Comparison(
        "save",
        f"{what}: flushed by both, hashed, shown in one step",
        names,
        "dcp.save(state, checkpoint_id=bare)",
        "save(state, link)  # dcp.save inside of checkpoint_folder",
    )
    for name, how, path in (
        ("load", "hashed, then read", "link"),
        ("load-crc", "without a manifest, by the CRCs in the shards", "bare"),
    ):
        pair = f"dcp.load(state, checkpoint_id={path})", f"torchguard.load_sharded(state, {path})"
        yield Comparison(name, f"{what}: {how}", names, *pair)


def ranked(rank: int, store: str, rounds: int, elements: int) -> list[tuple[float, float]]:
    """Return this rank's nanoseconds of the all-reduce and of the comparison, round by round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    size = elements // TENSORS
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(TENSORS)])
    for each in model:
        each.grad = torch.ones(size)
    agree = torchguard.replicas_agree(model, every=1)
    together = 25 * 1024 * 1024 // (4 * size) or 1  # DDP's bucket_cap_mb
    flat = torch.ones(elements)  # DDP's gradients are views of its buckets: nothing to copy
    buckets = flat.split(together * size)

    def reduce() -> None:
        for each in buckets:
            dist.all_reduce(each)

    def timed(call: Any) -> float:
        dist.barrier()
        begun = time.perf_counter()
        call()
        dist.barrier()
        return 1e9 * (time.perf_counter() - begun)

    pairs = []
    for number in range(rounds + 2):
        turns = (reduce, agree.gradients) if number % 2 else (agree.gradients, reduce)
        first, second = map(timed, turns)
        pairs.append((first, second) if number % 2 else (second, first))
    dist.destroy_process_group()
    return pairs[2:]


def replicas(setting: Setting) -> dict[str, Any]:
    """Measure on two processes; the figures are those of rank 0, barriers included."""
    rounds = setting.rounds if setting.quick else 4 * setting.rounds
    elements = ELEMENTS // (100 if setting.quick else 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as threads:

        def rank_of(rank: int) -> Any:
            store = f"{folder}/store"
            return in_a_process("bench_shards", "ranked", rank, store, rounds, elements)

        pairs, _ = threads.map(rank_of, range(RANKS))
    return {
        "what": f"{TENSORS} tensors of {elements:,} elements, two ranks of gloo",
        "baseline": "dist.all_reduce(each)  # of all 161 gradients, in buckets of 25 MB",
        "guarded": "agree.gradients()",
        **compared(pairs, Target(1.0)),
    }


def run(setting: Setting) -> Results:
    """Measure every row."""
    agreed = setting.collect([({"id": "replicas_agree"}, partial(replicas, setting))])
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        rows = measure(files(folder, quick=setting.quick), setting, block_seconds=0.05)
        dist.destroy_process_group()
    return {"rows": [*rows, *agreed]}


BENCHMARK = Benchmark(
    "shards",
    "What do sharded checkpoints that are whole, and replicas that are compared, cost?",
    run,
    rounds=9,
    devices=("cpu",),
)
