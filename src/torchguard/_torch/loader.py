"""How far the loop over a DataLoader is, which its sampler can't see: workers fetch ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def batches_yielded(iterator: Any) -> Callable[[], int] | None:
    """Return what tells how many batches an iterator of a DataLoader has given to its loop.

    None if it is not such an iterator. It answers after the iterator is gone, too: a loop that
    ends drops it.
    https://github.com/pytorch/pytorch/blob/main/torch/utils/data/dataloader.py
    """
    attributes: dict[str, Any] = getattr(iterator, "__dict__", {})
    if "_num_yielded" not in attributes:
        return None
    return lambda: int(attributes["_num_yielded"])
