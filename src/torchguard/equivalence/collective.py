"""Ranks that train one model take the same step of the ladder."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["lowest_and_highest"]


def lowest_and_highest(position: int, group: Any) -> tuple[int, int]:
    """Return the lowest and the highest position of all ranks; each of them has to ask."""
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    both = torch.tensor([-position, position], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    lowest, highest = both.tolist()
    return -int(lowest), int(highest)
