"""The collective of the checks: the ranks of a group learn the largest of each number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def largest_of_all_ranks(group: Any, numbers: Sequence[int]) -> list[int]:
    """Return the largest of each number over a group, True for all ranks; each has to call it."""
    import torch.distributed as dist  # noqa: PLC0415 - not every build of torch has it

    group = None if group is True else group
    # NCCL and XCCL have no collectives on the CPU, every other group takes a CPU tensor.
    devices = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in devices else devices[0]
    # Under inference mode an in-place collective would make an inference tensor.
    with torch.inference_mode(False), torch.no_grad():
        shared = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
        largest: list[int] = shared.tolist()
    return largest
