"""Sizes as symbols: what Dynamo assumes of them, how outputs depend on them, how to mark them."""

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
from typing_extensions import Self

__all__ = [
    "SavedSizes",
    "SymbolicSizes",
    "autotunes",
    "bounds_of_padding_are_wrong",
    "call_around_backward",
    "compile_failures",
    "fake_inputs",
    "marked_dynamic",
    "shape_guards",
    "symbols_in",
    "symbols_of",
    "tracing_again",
    "tracing_context",
]


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


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
        # torch logs pages about an operation that fails on tensors without data; who runs a
        # function here expects that it may.
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.CRITICAL + 1)
        return self

    def __exit__(self, *failure: object) -> None:
        _LOGGER.setLevel(self._level)
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
        return _value(expression, {self._symbols[name]: size for name, size in sizes.items()})

    def spell(self, expression: Any) -> Any:
        """Return an expression as lists, numbers and names, for :class:`SavedSizes`.

        Raises:
            ValueError: there is something else in it.
        """
        return _spelled(expression, {symbol: name for name, symbol in self._symbols.items()})


class SavedSizes:
    """Expressions of sizes that :meth:`SymbolicSizes.spell` has spelled, in another process.

    Args:
        names: what the symbols stand for.
    """

    def __init__(self, names: Iterable[str]) -> None:
        sympy: Any = importlib.import_module("sympy")
        self._symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in names}

    def value(self, expression: Any, sizes: dict[str, int]) -> int | bool | None:
        """Put sizes in; None if something else is in the expression too."""
        return _value(expression, {self._symbols[name]: size for name, size in sizes.items()})

    def read(self, spelled: Any) -> Any:
        """Return the expression.

        Raises:
            ValueError: it is none, or this torch has no such function of sizes.
        """
        if type(spelled) is int or type(spelled) is bool:
            return _sympified(spelled)
        if isinstance(spelled, str) and spelled in self._symbols:
            return self._symbols[spelled]
        if isinstance(spelled, list) and spelled and isinstance(spelled[0], str):
            return _function_of_sizes(spelled[0])(*map(self.read, spelled[1:]))
        raise ValueError(f"{spelled!r} is no expression of sizes")


def _value(expression: Any, sizes: dict[Any, int]) -> int | bool | None:
    if isinstance(expression, int):
        return expression
    result = expression.subs(sizes)
    if result.free_symbols:
        return None
    return bool(result) if result.is_Boolean else int(result)


def _spelled(expression: Any, names: dict[Any, str]) -> Any:
    if isinstance(expression, int):
        return expression
    if expression in names:
        return names[expression]
    if getattr(expression, "is_Integer", False):
        return int(expression)
    if getattr(expression, "is_Rational", False):
        return ["Rational", int(expression.p), int(expression.q)]
    if expression == _sympified(True) or expression == _sympified(False):
        return bool(expression)
    kind = type(expression).__name__
    if not expression.args or _function_of_sizes(kind) is not type(expression):
        raise ValueError(f"{expression} can't be spelled")
    return [kind, *(_spelled(each, names) for each in expression.args)]


def _sympified(value: int | bool) -> Any:
    return importlib.import_module("sympy").sympify(value)


def _function_of_sizes(name: str) -> Any:
    """Return the class of sympy's, or of torch's own, that makes expressions."""
    for home in ("torch.utils._sympy.functions", "sympy"):
        found = getattr(importlib.import_module(home), name, None)
        if isinstance(found, type) and issubclass(found, importlib.import_module("sympy").Basic):
            return found
    raise ValueError(f"there is no {name!r} of sizes")


# ---- the graph that Dynamo is compiling ----


def tracing_context() -> Any:
    """Return what Dynamo knows of the graph it is compiling: its symbols, its fake tensors."""
    return torch._guards.TracingContext.try_get()


def symbols_of(context: Any, value: object) -> Any:
    """Return what Dynamo has decided about an input's sizes, which are dynamic; None if nothing.

    Ask while Dynamo compiles: for a backend that is registered, under a name of its own,
    2.13 forgets it as soon as the graph is compiled.
    """
    known: Any = getattr(context, "tensor_to_context", {})
    return known.get(value) if isinstance(value, torch.Tensor) else None


def symbols_in(values: Iterable[object]) -> set[Any]:
    """Return the symbols in the sizes, strides and offsets of tensors, and in integers."""
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    found: set[Any] = set()
    for value in values:
        parts = (value,)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            parts = (*value.size(), *value.stride(), value.storage_offset())
        for part in parts:
            if isinstance(part, torch.SymInt):
                found |= shapes.free_symbols(part)
    return found


def fake_inputs(context: Any, inputs: Iterable[Any], symbols: Iterable[Any]) -> list[Any] | None:
    """Return the inputs that Dynamo compiles with as AOTAutograd sees them: without values.

    With them the graph can be compiled again later, when other sizes are at hand. None where
    there is no such mode, or a tensor about which Dynamo has decided nothing.
    """
    mode: Any = getattr(context, "fake_mode", None)
    try:
        return [
            mode.from_tensor(
                value, symbolic_context=decided, source=decided.tensor_source, trace=False
            )
            if isinstance(value, torch.Tensor)
            else value
            for value, decided in zip(inputs, symbols, strict=True)
        ]
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def tracing_again(context: Any, symbols: Iterable[tuple[object, Any]] = ()) -> Iterator[None]:
    """Compile once more for a graph whose context was kept from when Dynamo traced it.

    Each input comes with what :func:`symbols_of` said of it; without that AOTAutograd takes
    all its sizes for dynamic ones, that no guard knows. No other thread compiles meanwhile.
    """
    frames = importlib.import_module("torch._dynamo.convert_frame")
    told = [(value, decided) for value, decided in symbols if decided is not None]
    # A thread that calls compiled code while another one traces with torch.fx is told by 2.13 that
    # it traces itself, unless this says that torch.compile does. 2.15 asks the thread alone.
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    lock = getattr(frames, "compile_lock", contextlib.nullcontext())
    with lock, session(), torch._guards.tracing(context):
        for value, decided in told:
            context.tensor_to_context[value] = decided
        try:
            yield
        finally:
            # What stays here would keep torch.utils.swap_tensors from its work.
            for value, _ in told:
                context.tensor_to_context.pop(value, None)


def shape_guards(context: Any) -> int | None:
    """Count the guards on symbolic sizes so far; None where torch does not say.

    AOTAutograd's cache adds that a size is no larger than 64 bits can say, which it never is.
    """
    environment = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if environment is None:
        return None
    return sum(not _names_the_largest_integer(guard) for guard in environment.guards)


def _names_the_largest_integer(guard: Any) -> bool:
    numbers = [atom for atom in guard.expr.atoms() if atom.is_Integer]
    return any(abs(int(number)) >= 2**63 - 2 for number in numbers)


# ---- sizes between two bounds, and what torch does wrong with them ----


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


# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/decorators.py
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
    where torch is built differently. https://github.com/pytorch/pytorch/issues/169760
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
