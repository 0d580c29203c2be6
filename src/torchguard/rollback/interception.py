"""The guarded() scopes that are open, and what they put in front of functions that write tensors.

Nothing here is a mode of torch: code that asks ``has_torch_function`` for its way (the fast path of
``nn.TransformerEncoder``, for one) goes the way it goes outside.

The everyday operations that write elements never change a shape, failing or not (addbmm_ does), so
nothing is read before them: if one fails, it is enough to move the version counter on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import has_torch_function

from torchguard._torch import (
    C_NAMESPACE,
    OPERATOR_CLASSES,
    PYTHON_NAMESPACE,
    fill_tables,
    follow_in_dynamo,
    has_out,
    is_recorded,
    patch,
    show_overriding,
    shown_for,
)
from torchguard._torch.mutation import (
    DUNDERS,
    KEEP_SHAPE,
    Writes,
    writes_of,
    writes_statistics,
    written_tensors,
)
from torchguard._torch.overlays import AttributeOverlay, ModuleOverlay
from torchguard.equivalence.operands import PLAIN
from torchguard.rollback.operation import Operation, lacks_allocator, undo_out, undo_write
from torchguard.rollback.overlap import LISTS, cloned
from torchguard.rollback.resize import begin_resize_, begin_resize_as_, begin_set_
from torchguard.state.tensors import capture

NAMESPACES = (torch, torch.linalg, torch.special, torch.fft, torch.sparse, torch.nn.functional)
# They raise where the call would kill the process.
_REFUSALS: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], object]] = {
    "resize_": begin_resize_, "resize_as_": begin_resize_as_, "set_": begin_set_,
}  # fmt: skip
# For x += y a subclass is shown add_, which torch would look up.
_OPERATORS = DUNDERS | {"__idiv__"}
_STRIDED = torch.strided
_BEHIND_PYTHON = (
    *("norm", "frobenius_norm", "nuclear_norm", "tensordot", "chain_matmul"),
    *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
    *("threshold_", "rrelu_", "celu_", "selu_", "relu_", "embedding_renorm_"),
)
_LISTS_OF_TENSORS = (tuple, list)


# ---- which scopes are open ----


class Scope:
    """One ``with guarded():`` that has been entered; copied contexts (tasks) take it along."""

    __slots__ = ("around", "data", "open", "overlap", "owner", "plain")

    def __init__(self, *, data: bool, overlap: bool, owner: object, around: Scope | None) -> None:
        self.data, self.overlap = data, overlap
        self.owner, self.around = owner, around
        self.open = True
        self.plain: bool = not (data or overlap) and (around is None or around.plain)
        """Open, and no scope around it asks for copies: the common case, in one attribute."""

    def copies(self) -> bool | None:
        """Whether elements are copied first; None if this scope and all around it are closed."""
        found: bool | None = None
        scope: Scope | None = self
        while scope is not None:
            if scope.open:
                if scope.data:
                    return True
                found = False
            scope = scope.around
        return found

    def copies_operands(self) -> bool:
        """Whether operands that overlap what is written are copied first, here or around it."""
        scope: Scope | None = self
        while scope is not None and not (scope.open and scope.overlap):
            scope = scope.around
        return scope is not None


_innermost: ContextVar[Scope | None] = ContextVar("torchguard.rollback", default=None)

current = _innermost.get
"""The innermost scope of this thread, task or context, which may be closed already, or None."""


def innermost_open(owner: object = None) -> Scope | None:
    """Return the innermost scope of this context that is open, or that this owner has opened."""
    scope = _innermost.get()
    while scope is not None and not (scope.open and (owner is None or scope.owner is owner)):
        scope = scope.around
    return scope


def enter(*, data: bool, owner: object, overlap: bool = False) -> Scope:
    """Open a scope in this context."""
    scope = Scope(data=data, overlap=overlap, owner=owner, around=innermost_open())
    _innermost.set(scope)
    return scope


def leave(scope: Scope) -> None:
    """Close a scope, in whatever order scopes are left: those of generators overlap."""
    scope.open = scope.plain = False
    inner = _innermost.get()
    while inner is not None:
        if inner.around is scope:
            inner.around = scope.around
        inner.plain = inner.open and inner.copies() is False and not inner.copies_operands()
        inner = inner.around
    _innermost.set(innermost_open())


def hold(scope: Scope | None) -> Scope | None:
    """Let this scope be the innermost one, None for no scope at all; returns the one before."""
    before = _innermost.get()
    _innermost.set(scope)
    return before


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Run something as if no scope were open."""
    before = hold(None)
    try:
        yield
    finally:
        hold(before)


# ---- what a scope puts over torch ----


@functools.cache
def overlays() -> tuple[patch.Overlay, ...]:
    """Make everything that stands over torch while a scope is open; once per process."""
    # What install() has put there is no builtin: it would not be known as one that writes.
    with patch.originals_in_place():
        fill_tables()
        modules = (*NAMESPACES, C_NAMESPACE, PYTHON_NAMESPACE)
        functions = {module: dict(_functions(module)) for module in modules}
        functions[torch.jit] = {"script": _script_outside}
        classes: dict[type, dict[str, patch.Make]] = {torch.Tensor: dict(_methods())}
        classes |= {each: {"__call__": _guard_operators} for each in OPERATOR_CLASSES}
        return (
            *(ModuleOverlay(each, makes, current) for each, makes in functions.items() if makes),
            *(AttributeOverlay(each, makes, inert=True) for each, makes in classes.items()),
        )


def _methods() -> Iterator[tuple[str, patch.Make]]:
    for name in dir(torch.Tensor):
        if name in _OPERATORS or (name.endswith("_") and not name.endswith("__")):
            # torch shows this one method to no subclass and no mode.
            shown = None if name == "set_" else shown_for(name)
            yield name, functools.partial(_guard_method, name, shown)


def _functions(module: ModuleType) -> Iterator[tuple[str, patch.Make]]:
    names = _BEHIND_PYTHON if module is PYTHON_NAMESPACE else vars(module)
    for name in sorted(names):
        function = getattr(module, name, None)
        if not isinstance(function, BuiltinFunctionType):
            continue
        writes = writes_statistics(name) or writes_of(function)
        if writes is not None:
            yield name, functools.partial(_guard_writing, writes)
        elif module is not C_NAMESPACE and not name.startswith("__") and has_out(function):
            yield name, _guard_out


def _guard_method(  # noqa: C901  what is made is one frame, so that a traceback gains one line
    name: str, shown: Any, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Guard a method of ``torch.Tensor``; a subclass and a mode see ``shown``."""
    writes = writes_of(original) or Writes((), elements=False)
    refuse = _REFUSALS.get(name)
    short = writes.only_first and name in KEEP_SHAPE
    resizes_sparse = name == "copy_"
    is_operator = name in _OPERATORS and name != "__setitem__"
    takes_index = name in {"__setitem__", "index_put_"}

    def method(*args: Any, **kwargs: Any) -> Any:  # noqa: C901, PLR0912  in one frame: see above
        call = original
        if (
            has_torch_function(args)
            or (kwargs and has_torch_function(tuple(kwargs.values())))
            or (
                takes_index
                and len(args) > 1
                and type(args[1]) in _LISTS_OF_TENSORS
                and has_torch_function(args[1])
            )
        ) and shown is not None:
            call = show_overriding(shown, args, kwargs, is_operator=is_operator)
        scope = current()
        if scope is None or not args:
            return call(*args, **kwargs)
        if not scope.plain and scope.copies_operands():
            args, kwargs = cloned(original, args, kwargs)
        saved = None
        if not (
            short
            and scope.plain
            and type(args[0]) in PLAIN
            # A layout takes torch 40 ns to say, so it is asked for by the one method of these that
            # changes the shape of a sparse tensor.
            and not (resizes_sparse and args[0].layout is not _STRIDED)
        ):
            data = scope.copies() if isinstance(args[0], torch.Tensor) else None
            if data is None:
                return call(*args, **kwargs)
            if refuse is not None:
                refuse(args, kwargs)
            if data or not writes.only_first:
                operation = Operation(writes, args, kwargs, data=data and not is_recorded())
                try:
                    try:
                        hold(None)  # for what torch calls meanwhile, a subclass's own code
                        return operation.finish(call(*operation.args, **operation.kwargs))
                    except BaseException as error:
                        operation.undo(error)
                        raise
                    finally:
                        hold(scope)
                except BaseException as error:  # an interrupt in the clause above
                    operation.undo(error)
                    operation.explain(error)
                    raise
                finally:  # once more, for the same reason
                    hold(scope)
            saved = capture(args[0])
        try:
            try:
                # ``**kwargs`` builds a dict even of nothing, 40 ns.
                return call(*args, **kwargs) if kwargs else call(*args)
            except BaseException as error:
                undo_write(args[0], saved, error, elements=writes.elements)
                raise
        except BaseException as error:  # an interrupt in the clause above: see interrupts.py
            undo_write(args[0], saved, error, elements=writes.elements)
            raise

    return _named(method, original, module="torch", name=f"Tensor.{name}")


class _Elements(NamedTuple):
    """A call that writes and changes no shape: unlike :class:`Operation`, it reads nothing."""

    writes: Writes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def finish(self, result: Any) -> Any:
        return result

    def undo(self, error: BaseException) -> None:
        for tensor, _ in written_tensors(self.writes, self.args, self.kwargs):
            undo_write(tensor, None, error)

    def explain(self, error: BaseException) -> None:
        pass


_Undoable = Operation | _Elements
_Begin = Callable[[Scope, tuple[Any, ...], dict[str, Any]], _Undoable | None]


def _guard_writing(writes: Writes, original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a function that writes to arguments, and may have ``out=`` as well."""
    name = original.__name__
    refuse = _REFUSALS.get(name)
    keeps_shape = name in KEEP_SHAPE or name.startswith(LISTS) or writes.only_if is not None

    def begin(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Undoable | None:
        data = False if scope.plain else scope.copies()
        if data is None:
            return None
        if refuse is not None:
            refuse(args, kwargs)
        if data or not keeps_shape or kwargs.get("out") is not None:
            return Operation(writes, args, kwargs, data=data and not is_recorded())
        return _Elements(writes, args, kwargs)

    return _named(_undoing(original, begin), original)


def _guard_operators(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the call of what ``torch.ops`` holds, which is the first argument."""

    def begin(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Undoable | None:
        operator, *rest = args
        writes = _operator_writes(operator)
        data = scope.copies() if writes is not None or "out" in kwargs else None
        if data is None:
            return None
        refuse = _REFUSALS.get(operator.__name__.partition(".")[0])
        if refuse is not None:
            refuse(tuple(rest), kwargs)
        operation = Operation(writes, tuple(rest), kwargs, data=data and not is_recorded())
        operation.args = (operator, *operation.args)
        return operation

    call = _undoing(original, begin)
    return _named(call, original, name=original.__qualname__)


def _undoing(original: Callable[..., Any], begin: _Begin) -> Callable[..., Any]:
    """Make a function that undoes a failed call; ``begin`` returns None if it writes nothing."""

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is not None and not scope.plain and scope.copies_operands():
            args, kwargs = cloned(original, args, kwargs)
        operation = None if scope is None else begin(scope, args, kwargs)
        if operation is None:
            return original(*args, **kwargs)
        try:
            try:
                hold(None)  # for what torch calls meanwhile, a subclass's own code
                return operation.finish(original(*operation.args, **operation.kwargs))
            except BaseException as error:
                operation.undo(error)
                raise
            finally:
                hold(scope)
        except BaseException as error:  # an interrupt in the clause above: see interrupts.py
            operation.undo(error)
            operation.explain(error)
            raise
        finally:  # once more, for the same reason
            hold(scope)

    return function


def _guard_out(original: Callable[..., Any]) -> Callable[..., Any]:  # noqa: C901  in one frame
    """Guard a function that writes to ``out=``, and to nothing else."""

    def function(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        scope = current()
        if scope is not None and scope.plain and type(out) is torch.Tensor:
            saved = capture(out)
            if saved.storage is not None and not lacks_allocator(saved.storage):
                try:
                    try:
                        return original(*args, out=out, **kwargs)
                    except BaseException as error:
                        undo_out(saved, error)
                        raise
                except BaseException as error:  # an interrupt in the clause above
                    undo_out(saved, error)
                    raise
        data = None if scope is None else scope.copies()
        if data is None:
            return original(*args, out=out, **kwargs)
        if scope is not None and scope.copies_operands():
            args, kwargs = cloned(original, args, {**kwargs, "out": out})
            del kwargs["out"]
        operation = Operation(None, args, {**kwargs, "out": out}, data=data and not is_recorded())
        try:
            try:
                hold(None)  # for what torch calls meanwhile, a subclass's own code
                return operation.finish(original(*operation.args, **operation.kwargs))
            except BaseException as error:
                operation.undo(error)
                raise
            finally:
                hold(scope)
        except BaseException as error:  # an interrupt in the clause above: see interrupts.py
            operation.undo(error)
            operation.explain(error)
            raise
        finally:  # once more, for the same reason
            hold(scope)

    return _named(function, original)


def _script_outside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let TorchScript find torch's own functions: it knows them by identity."""

    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        with outside():
            # It looks up names in the frame of its caller.
            return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)

    return _named(script, original, module="torch.jit")


_operator_writes = functools.lru_cache(maxsize=4096)(writes_of)


def _named(
    function: Any, original: Callable[..., Any], *, module: str | None = None, name: str = ""
) -> Callable[..., Any]:
    name = name or original.__name__
    function.__name__, function.__qualname__ = name.rpartition(".")[2], name
    function.__module__ = module or getattr(original, "__module__", None) or "torch"
    function.__doc__ = original.__doc__
    follow_in_dynamo(function, original)
    named: Callable[..., Any] = function
    return named
