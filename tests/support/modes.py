"""Modes that keep what they see."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Keeps:
    """Makes each call, and keeps of it what two calls with other tensors have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _keep(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, tuple(types), len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


class FunctionMode(_Keeps, TorchFunctionMode):
    """Of each call of a torch function, or of a method."""

    __torch_function__ = _Keeps._keep


class DispatchMode(_Keeps, TorchDispatchMode):
    """Of each operator."""

    __torch_dispatch__ = _Keeps._keep
