"""Sizes as symbols: how the sizes of outputs depend on those of inputs."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import Self

__all__ = ["SymbolicSizes", "without_fake_tensor_logs"]


class SymbolicSizes:
    """A scope in which tensors have no data and sizes are symbols.

    What is computed in it tells how sizes of outputs depend on sizes of inputs. Nothing
    public does that without tracing a whole graph.

    Args:
        hints: for each name an example of its size, 2 or more; none for sizes that are numbers.
    """

    def __init__(self, hints: dict[str, int]) -> None:
        shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        source: Any = importlib.import_module("torch._dynamo.source")
        environment: Any = shapes.ShapeEnv()
        self._shapes: Any = environment if hints else None
        self._mode = fake.FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbols: dict[str, Any] = {}
        self._sizes: dict[str, Any] = {}
        for name, hint in hints.items():
            where = source.ConstantSource(f"size_of_{len(self._symbols)}")
            symbol = environment.create_symbol(
                hint, source=where, dynamic_dim=shapes.DimDynamic.DYNAMIC, constraint_dim=None
            )
            self._symbols[name] = symbol
            self._sizes[name] = environment.create_symintnode(symbol, hint=hint, source=where)

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._mode.__exit__(*failure)

    def empty(self, shape: tuple[int | str, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data; a name in ``shape`` stands for its symbol."""
        sizes = [self._sizes[size] if isinstance(size, str) else size for size in shape]
        return torch.empty(
            sizes, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    def conditions(self) -> list[Any]:
        """Return what was assumed about the symbols on the way."""
        return [] if self._shapes is None else [guard.expr for guard in self._shapes.guards]

    def expression(self, size: Any) -> Any:
        """Return the expression behind a size; a plain number is its own."""
        if isinstance(size, torch.SymInt):
            return size.node.expr
        return size

    def value(self, expression: Any, sizes: dict[str, int]) -> int | bool | None:
        """Put sizes in; None if something else is in the expression too."""
        if isinstance(expression, int):
            return expression
        result = expression.subs({self._symbols[name]: size for name, size in sizes.items()})
        if result.free_symbols:
            return None
        return bool(result) if result.is_Boolean else int(result)


@contextlib.contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Keep torch from logging pages about an operation that fails on tensors without data."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
