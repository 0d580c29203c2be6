"""All ranks of a group take the bucket of the longest rank.

Otherwise one compiles alone while the others wait for it in a collective, and times out. What one
rank finds wrong stops the others too, for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["agree"]


def agree(group: Any, numbers: list[int]) -> list[int]:
    """Return the largest of each number over all ranks; every rank has to call it.

    Args:
        group: of ``torch.distributed``, or True for all ranks.
        numbers: as many on every rank.
    """
    import torch.distributed as dist  # noqa: PLC0415 - not every build of torch has it

    group = None if group is True else group
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad():
        shared = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
        largest: list[int] = shared.tolist()
    return largest
