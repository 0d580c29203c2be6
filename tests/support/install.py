"""What the tests of install() share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def snapshot() -> list[dict[str, Any]]:
    namespaces = (torch.Tensor, torch, torch.linalg, torch.special, torch.fft, torch.nn.functional)
    return [dict(vars(namespace)) for namespace in namespaces]


def same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    return all(
        one.keys() == other.keys() and all(one[name] is other[name] for name in one)
        for one, other in zip(before, after, strict=True)
    )


def locked(*values: float) -> torch.Tensor:
    """A tensor whose storage can't grow."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def resize_is_safe() -> bool:
    tensor = locked(1, 2)
    with pytest.raises(RuntimeError):
        tensor.resize_(50)
    safe = tuple(tensor.shape) == (2,)
    torch.Tensor.set_(tensor, torch.empty(0))  # type: ignore[call-overload]
    return safe


def out_is_safe() -> bool:
    out = locked()
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(5), 1, out=out)
    safe = tuple(out.shape) == (0,)
    torch.Tensor.set_(out, torch.empty(0))  # type: ignore[call-overload]
    return safe
