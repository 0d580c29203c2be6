"""Compile with sizes between two bounds as symbols, and what torch does wrong with them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "autotunes",
    "bounds_of_padding_are_wrong",
    "call_around_backward",
    "compile_failures",
    "marked_dynamic",
]


@contextlib.contextmanager
def marked_dynamic(marks: Iterable[tuple[torch.Tensor, int, int, int | None]]) -> Iterator[None]:
    """Let ``torch.compile`` make these sizes symbols, between two bounds, in this scope.

    ``torch._dynamo.mark_dynamic`` is documented, and writes attributes on the tensor that stay:
    whatever else compiled the tensor later would find them. So they are taken off again, and
    marks of the caller's own come back. What was compiled in the scope runs for tensors without
    marks too: Dynamo's guard asks that a tensor has no other marks than the graph was made for.
    https://pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html

    Args:
        marks: (tensor, dim, smallest, largest); None for a largest that is not known.
    """
    dynamo: Any = importlib.import_module("torch._dynamo")
    before: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
    log, quiet = logging.getLogger("torch._guards"), _QuietInThisThread()
    # It logs a page for sizes that can't be symbols, before it raises what the caller handles.
    log.addFilter(quiet)
    try:
        for tensor, dim, smallest, largest in marks:
            if id(tensor) not in before:
                # Copied: mark_dynamic() adds to the sets and dicts that are there.
                kept = {name: copy.copy(value) for name, value in _marks_of(tensor).items()}
                before[id(tensor)] = (tensor, kept)
            # With one bound it wants the other too.
            above = sys.maxsize - 1 if largest is None else largest
            dynamo.mark_dynamic(tensor, dim, min=smallest, max=above)
        yield
    finally:
        log.removeFilter(quiet)
        for tensor, kept in before.values():
            for name in _marks_of(tensor):
                if name not in kept:
                    delattr(tensor, name)
            vars(tensor).update(kept)


class _QuietInThisThread(logging.Filter):
    """Let through only what other threads log."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_has_dynamo_dim_marking",
    "_specialize_on",
)
"""What ``mark_dynamic`` writes, on one release or another."""


def _marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    attributes = vars(tensor)
    return {name: attributes[name] for name in _MARKS if name in attributes}


def compile_failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that ``torch.compile`` raises where it can't compile.

    ``ConstraintViolationError`` says that a graph would hold for fewer sizes than were marked.
    """
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    dynamo: Any = importlib.import_module("torch._dynamo.exc")
    named = [
        getattr(shapes, "ConstraintViolationError", None),
        getattr(shapes, "GuardOnDataDependentSymNode", None),
        getattr(dynamo, "TorchDynamoException", None),
    ]
    return tuple(each for each in named if each is not None)


def bounds_of_padding_are_wrong() -> bool:
    """Whether torch bounds ``-n % 16`` by [-15, 0], so that padded sizes seem no larger than n.

    Inductor relies on it where a size is a symbol, and writes behind the end of a buffer. True
    where it can't be told. https://github.com/pytorch/pytorch/issues/169760
    """
    try:
        ranges: Any = importlib.import_module("torch.utils._sympy.value_ranges")
        functions: Any = importlib.import_module("torch.utils._sympy.functions")
        sympy: Any = importlib.import_module("sympy")
        size = sympy.Symbol("n", integer=True, positive=True)
        bound = ranges.bound_sympy(
            functions.PythonMod(-size, 16), {size: ranges.ValueRanges(2, 64)}
        )
        return int(bound.upper) < 15  # noqa: PLR2004 - of -n % 16
    except Exception:  # noqa: BLE001 - built differently
        return True


def autotunes(compiled: Callable[..., Any]) -> bool:
    """Whether a compiled function tries several kernels and keeps the fastest (max-autotune)."""
    config: Any = getattr(compiled, "get_compiler_config", lambda: None)()
    if isinstance(config, dict) and "max_autotune" in config:
        return bool(config["max_autotune"])
    settings: Any = importlib.import_module("torch._inductor.config")
    return bool(getattr(settings, "max_autotune", False))


def call_around_backward(
    outputs: Iterable[torch.Tensor], begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Call ``begin`` when the first gradient of these reaches them, ``end`` after that backward.

    Both are called once. Where the engine does not take callbacks neither is called.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        return
    begun = False

    def notice(_: Any) -> None:
        nonlocal begun
        if not begun:
            begun = True
            begin()
            engine.queue_callback(end)

    nodes = {id(each.grad_fn): each.grad_fn for each in outputs if each.grad_fn is not None}
    for node in nodes.values():
        node.register_prehook(notice)
