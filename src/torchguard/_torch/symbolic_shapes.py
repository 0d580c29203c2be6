"""Run a function uncompiled, or on fake tensors whose sizes are symbols.

The symbols tell how the sizes of outputs depend on the sizes of inputs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
_stances: list[Any] = []
_stances_lock = threading.Lock()


@contextlib.contextmanager
def stance(name: str) -> Iterator[None]:
    """Equals ``with torch.compiler.set_stance(name):``, for scopes of several threads."""
    # The stance is the process's, and each scope of torch restores what it found. Where two threads
    # leave in the order in which they came, the last would leave the stance of the first:
    # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/decorators.py
    with _stances_lock:
        own: Any = torch.compiler.set_stance(name)  # sets it, and keeps what was there
        _stances.append(own)
    try:
        yield
    finally:
        with _stances_lock:
            place = _stances.index(own)
            del _stances[place]
            if place < len(_stances):
                _stances[place].prev = own.prev  # a later scope goes on, and restores this
            else:
                own.__exit__(None, None, None)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions inside eagerly; the stance is that of the whole process."""
    if "torch._dynamo" not in sys.modules:
        yield  # nothing is compiled yet, and set_stance() would import Dynamo: seconds
        return
    with stance("force_eager"):
        yield


class SymbolicSizes:
    """A scope in which tensors have no data and sizes are symbols."""

    def __init__(self, hints: dict[str, int]) -> None:
        """``hints``: for each name an example of its size, 2 or more."""
        shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        source: Any = importlib.import_module("torch._dynamo.source")
        environment: Any = shapes.ShapeEnv()
        self._shapes: Any = environment if hints else None
        self._mode = fake.FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbols: dict[str, Any] = {}
        self._sizes: dict[str, Any] = {}
        # What FakeTensorMode.from_tensor does for a dynamic size, without the tensor:
        # https://github.com/pytorch/pytorch/blob/main/torch/fx/experimental/symbolic_shapes.py
        for name, hint in hints.items():
            where = source.ConstantSource(f"size_of_{len(self._symbols)}")
            symbol = environment.create_symbol(
                hint, source=where, dynamic_dim=shapes.DimDynamic.DYNAMIC, constraint_dim=None
            )
            self._symbols[name] = symbol
            self._sizes[name] = environment.create_symintnode(symbol, hint=hint, source=where)

    def __enter__(self) -> Self:
        self._mode.__enter__()
        # torch logs pages about an operation that fails on tensors without data.
        this_thread = threading.get_ident()
        self._filter = lambda record: record.thread != this_thread
        _LOGGER.addFilter(self._filter)
        return self

    def __exit__(self, *failure: object) -> None:
        _LOGGER.removeFilter(self._filter)
        self._mode.__exit__(*failure)

    def empty(
        self, shape: Iterable[int], like: torch.Tensor, axes: Iterable[tuple[int, str]] = ()
    ) -> torch.Tensor:
        """Return a tensor without data; each dim of ``axes`` has the symbol of its name, if any."""
        sizes: list[Any] = list(shape)
        for dim, name in axes:
            sizes[dim] = self._sizes.get(name, sizes[dim])
        return torch.empty(
            sizes, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    def formula(self, leaves: Iterable[Any], paths: list[tuple[Any, ...]]) -> ShapeFormula:
        """Return how the sizes of these leaves of an output, computed here, depend on the names."""
        # What was assumed about the symbols on the way.
        guards = () if self._shapes is None else self._shapes.guards
        conditions = tuple(guard.expr for guard in guards)
        return ShapeFormula(self._symbols, tuple(map(_expression, leaves)), conditions, paths)


class SymbolicInputs:
    """Tensors without data whose sizes are symbols, for which something is compiled."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have one like each of these."""
        shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        source: Any = importlib.import_module("torch._dynamo.source")
        # Else two sizes that are equal now are one symbol.
        self._shapes: Any = shapes.ShapeEnv(duck_shape=False)
        mode = fake.FakeTensorMode(shape_env=self._shapes)
        self.fakes = [
            mode.from_tensor(
                tensor,
                source=source.ConstantSource(f"input_{place}"),
                symbolic_context=shapes.StatelessSymbolicContext(
                    dynamic_sizes=[shapes.DimDynamic.DYNAMIC] * tensor.dim()
                ),
            )
            for place, tensor in enumerate(tensors)
        ]

    def fit(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether what was compiled holds for these tensors."""
        sizes: dict[Any, int] = {}
        pairs: list[tuple[Any, int]] = []
        for fake, tensor in zip(self.fakes, tensors, strict=True):
            expressions = [_expression(each) for each in (*fake.shape, *fake.stride())]
            pairs += zip(expressions, (*tensor.shape, *tensor.stride()), strict=True)
            sizes.update(
                (expression, size)
                for expression, size in zip(expressions, tensor.shape, strict=False)
                if getattr(expression, "is_symbol", False)
            )
        return all(_value(expression, sizes) == size for expression, size in pairs) and all(
            _value(guard.expr, sizes) is True for guard in self._shapes.guards
        )


def _expression(leaf: Any) -> Any:
    """Return the expressions for a tensor's sizes, that of an integer, or None."""
    if isinstance(leaf, torch.Tensor):
        return tuple(map(_expression, leaf.shape))
    if isinstance(leaf, torch.SymInt):
        return leaf.node.expr
    return leaf if isinstance(leaf, int) and not isinstance(leaf, bool) else None


@dataclass(frozen=True)
class ShapeFormula:
    """How the sizes of every leaf of an output depend on named sizes."""

    symbols: Mapping[str, Any]
    """By name."""
    sizes: tuple[Any, ...]
    """For each leaf: expressions for its dims, or for an integer; None for anything else."""
    conditions: tuple[Any, ...]
    """Where they hold, the sizes do."""
    paths: list[tuple[Any, ...]]
    """Of each leaf."""

    def at(self, *sizes: Mapping[str, int]) -> list[list[Any]] | None:
        """Return for each set of sizes those of every leaf; None where they do not hold."""
        found: list[list[Any]] = []
        for each in sizes:
            values = {self.symbols[name]: size for name, size in each.items()}
            if any(_value(c, values) is not True for c in self.conditions):
                return None
            leaves = [_value(expressions, values) for expressions in self.sizes]
            if any(isinstance(leaf, tuple) and None in leaf for leaf in leaves):
                return None
            found.append(leaves)
        return found


def _value(expression: Any, sizes: dict[Any, int]) -> Any:
    """Put sizes in; None if something else is in the expression too."""
    if isinstance(expression, tuple):
        return tuple(_value(each, sizes) for each in expression)
    if expression is None or isinstance(expression, int):
        return expression
    result = expression.subs(sizes)
    if result.free_symbols:
        return None
    return bool(result) if result.is_Boolean else int(result)
