"""Modes that keep what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def arguments_counted(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What two calls with other tensors have in common."""
    return func, tuple(types), len(args), sorted(kwargs)


def function_alone(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    del types, args, kwargs
    return func


class _Keeps:
    """Keeps what ``kept`` returns of each call, and makes the call."""

    def __init__(self, kept: Callable[[Any, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._kept = kept

    def _keep(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen.append(self._kept(func, types, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class FunctionMode(_Keeps, TorchFunctionMode):
    """Of each call of a torch function, or of a method."""

    def __init__(self, kept: Callable[[Any, Any, Any, Any], Any] = arguments_counted) -> None:
        super().__init__(kept)

    __torch_function__ = _Keeps._keep


class DispatchMode(_Keeps, TorchDispatchMode):
    """Of each operator."""

    def __init__(self, kept: Callable[[Any, Any, Any, Any], Any] = function_alone) -> None:
        super().__init__(kept)

    __torch_dispatch__ = _Keeps._keep
