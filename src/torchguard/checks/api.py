"""checked(): a scope in which values out of range raise, and what it puts over torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchguard._public import public
from torchguard._torch import (
    C_NAMESPACE,
    CALL_USER_COMPILER,
    CALLBACK_OF_CALL,
    DYNAMO,
    compiling_as,
    computing_unseen,
    follow_in_dynamo,
    on_import,
    patch,
    shown_for,
    values_can_be_read,
)
from torchguard._torch.overlays import (
    AttributeOverlay,
    ModuleOverlay,
    Standing,
    overlays_by_owner,
)
from torchguard.checks import check
from torchguard.checks.check import Report, Scope, current, enter, guard_call, guard_indexing
from torchguard.checks.graph import checks_in_graph
from torchguard.checks.table import ROWS

_Function = TypeVar("_Function", bound=Callable[..., Any])

INSTALLED = "torch.embedding_renorm_"
"""The path that ``install("checks")`` patches; the others it shares with other guards."""

_RENORM = next(row for row in ROWS if "embedding_renorm_" in row.names)
_INDEXING = ("__getitem__", "__setitem__", "index_put", "index_put_")
_READING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")
_SPARSE = ("csr", "csc", "bsr", "bsc", "compressed")


# ---- what stands over torch while something is checked ----


@functools.cache
def _overlays() -> tuple[patch.Overlay, ...]:
    """Make everything that stands over torch; once per process."""
    modules: dict[Any, dict[str, patch.Make]] = {torch: {}, C_NAMESPACE: {}}
    modules[torch.nn.functional] = {}  # one_hot is a builtin there
    methods: dict[str, patch.Make] = {}
    patch.skip_own_frames()
    with patch.originals_in_place():
        for row in ROWS:
            for each in row.names:
                kind, _, name = each.rpartition(".")
                make = functools.partial(guard_call, row, name, None)
                for module in (torch,) if not kind else (C_NAMESPACE, torch.nn.functional):
                    if inspect.isbuiltin(vars(module).get(name)):
                        modules[module][name] = _named(make)
                for method in (name, f"{name}_") if not kind else ():
                    if hasattr(torch.Tensor, method):
                        shown = shown_for(method)
                        methods[method] = _named(functools.partial(guard_call, row, method, shown))
        for name in _INDEXING:
            if name in vars(torch):
                modules[torch][name] = _named(functools.partial(guard_indexing, name, None))
            methods[name] = _named(functools.partial(guard_indexing, name, shown_for(name)))
        for name in _SPARSE:
            modules[torch][f"sparse_{name}_tensor"] = _named(_check_indices)
        methods |= {name: _named(functools.partial(_read_first, name)) for name in _READING}
        return (
            *(ModuleOverlay(module, makes, current) for module, makes in modules.items()),
            ModuleOverlay(torch.jit, {"script": _named(_outside)}, current),
            AttributeOverlay(torch.Tensor, methods, inert=True),
        )


@functools.cache
def _overlays_of_dynamo() -> tuple[patch.Overlay, ...]:
    makes = {CALLBACK_OF_CALL: _other_key, CALL_USER_COMPILER: _with_checks}
    with contextlib.suppress(AttributeError):  # a Dynamo that is built differently
        return tuple(overlays_by_owner(makes))
    return ()


def _wanted() -> Iterator[patch.Overlay]:
    yield from _overlays()
    if hasattr(sys.modules.get(DYNAMO), "optimize"):  # else it is being imported
        yield from _overlays_of_dynamo()


def _named(make: patch.Make) -> patch.Make:
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        function: Any = make(original)
        function.__name__, function.__doc__ = original.__name__, original.__doc__
        function.__qualname__ = original.__qualname__
        function.__module__ = getattr(original, "__module__", None) or "torch"
        follow_in_dynamo(function, original)
        return function  # type: ignore[no-any-return]

    return made


def _check_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse sparse tensors with indices out of range, which torch's kernels trust."""

    def function(*args: Any, **kwargs: Any) -> Any:
        scope, result = current(), original(*args, **kwargs)
        if scope is not None:
            with computing_unseen((result,)):
                _check_compressed(scope, original.__name__, result)
        return result

    return function


def _check_compressed(scope: Scope, function: str, result: torch.Tensor) -> None:
    rows = result.layout in {torch.sparse_csr, torch.sparse_bsr}
    name, dim = ("col_indices", 1) if rows else ("row_indices", 0)
    plain = result.col_indices() if rows else result.row_indices()
    pointers = result.crow_indices() if rows else result.ccol_indices()
    if not values_can_be_read(plain):
        return
    size = result.size(plain.dim() - 1 + dim)  # the dims of a batch come first
    if result.layout in {torch.sparse_bsr, torch.sparse_bsc}:
        size //= result.values().size(plain.dim() + dim)
    for argument, values, high in (
        (name, plain, size - 1),
        ("pointers", pointers, plain.size(-1)),
        ("steps of the pointers", pointers.diff(), plain.size(-1)),
    ):
        site = check.Site(function, argument, "index", 0, high)
        check.checked_value(scope, site, values.cpu())


def _read_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the flags of a device before a value leaves it."""
    shown = shown_for(name)

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is not None and args:
            with computing_unseen(args):
                if not check.is_on_cpu(args[0]):
                    scope.flags.read()
        return check.call_outside(original, shown, args, kwargs)

    return function


def _outside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let TorchScript find torch's own functions: it knows them by identity."""

    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        before = enter(False)
        try:
            # It looks up names in the frame of its caller.
            return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)
        finally:
            enter(before)

    return script


def _other_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for a scope apart from what is compiled outside: the backend is part of the key."""

    def _callback_from_stance(callback: Any) -> Any:
        found = original(callback)
        return found if current() is None or not callable(found) else compiling_as(found, "checks")

    return _callback_from_stance


def _with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None or getattr(self, "export", False):
            return original(self, gm, *args, **kwargs)
        return checks_in_graph(lambda graph: original(self, graph, *args, **kwargs), gm)

    return call_user_compiler


_standing = Standing(_wanted)
_hooks: list[Any] = []


def _begin() -> None:
    on_import(DYNAMO, _standing.apply)
    with patch.lock:
        _standing.begin()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _end() -> None:
    with patch.lock:
        if _standing.end():
            _hooks.pop().remove()


def _before_step(*_: object) -> None:
    scope = current()
    if scope is not None:
        scope.flags.read()


# ---- the scope ----


class Checked(contextlib.ContextDecorator):
    """What :func:`checked` returns: a context manager and a decorator, usable again and again."""

    def __init__(self, report: Report) -> None:
        self._report: Report = report
        self._entered: list[Scope] = []

    def __enter__(self) -> None:
        _begin()
        scope = Scope(self._report)
        scope.around = enter(scope)
        self._entered.append(scope)

    def __exit__(self, *failure: object) -> None:
        # Elsewhere than where it was entered, if a generator is closed by another task.
        scope = check.innermost_of(self._entered) or self._entered[-1]
        self._entered.remove(scope)
        try:
            # After an exception nothing leaves the scope that was computed from a clamped value.
            if failure[0] is None:
                scope.flags.read()
        finally:
            check.leave(scope)
            _end()

    def __call__(self, function: _Function) -> _Function:
        """Run each call in its own scope; TypeError for a class, a generator or a coroutine."""
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"checked: function is {function!r}, expected a function or a method")
        asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if asynchronous or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"checked: {function.__qualname__} does not run when it is called; write "
                "`with torchguard.checked():` around what it does"
            )

        def inside(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            with Checked(self._report):
                return function(*args, **kwargs)

        inside.__code__ = inside.__code__.replace()  # Dynamo keeps its decisions with the code
        return functools.wraps(function)(inside)  # type: ignore[return-value]


@public
def checked(*, report: Report = "step") -> Checked:
    """Raise where a value is out of range: an index, a label, a divisor, a probability.

    Equals the same code without it where all values are in range: same results, same number of
    graphs. Where one is not, torch raises in eager code on a CPU, mostly; computes something in
    compiled code; and on CUDA ends with "device-side assert triggered", after which every CUDA
    call of the process fails. In the scope each of them raises one of the errors below, with the
    function, the argument, what is allowed and what was seen, and the process goes on. It is a
    context manager and a decorator, for one thread or asyncio task.

    On a CPU the values are read before the call, and nothing is written. On other devices they
    are clamped, so that no kernel's assert fires, and their extremes are kept on the device. They
    are read, and the error is raised, when a value is about to leave the device (``item()``,
    ``tolist()``, ``cpu()``), before ``optimizer.step()``, and at the end of the scope: nothing
    that was computed from a clamped value leaves the scope without an exception. In compiled code
    the checks are part of the graph. On a CPU they are read after each call of it: what the graph
    writes to its inputs is written then.

    It sees embedding, embedding_bag, one_hot, index_select, gather, take, take_along_dim,
    ``x[index]`` and ``x[index] = v``, index_add, index_copy, index_fill, index_reduce, index_put,
    put, the scatter family, nll_loss, cross_entropy, ctc_loss, binary_cross_entropy, multinomial,
    bincount, repeat_interleave, division of integers, and the indices of sparse CSR, CSC, BSR and
    BSC tensors, whose constructors wait for the device. It does not see custom kernels, what C++
    calls, ``torch.ops``, subclasses, or values inside ``torch.func`` transforms and the bodies of
    higher-order operators in compiled code. Inside a compiled function the scope does nothing:
    open it around the call.

    Args:
        report: when values on devices are read. ``"step"``: as above. ``"call"``: after each
            call, which waits for the device, so that the traceback shows the call.

    Raises:
        IndexOutOfRangeError: an index, a label or a count; an ``IndexError`` and a
            ``RuntimeError``, as torch raises one or the other.
        ValueOutOfRangeError: a probability; a ``ValueError`` and a ``RuntimeError``.
        ZeroDivisorError: an integer divided by zero; a ``ZeroDivisionError`` and a
            ``RuntimeError``.
        ValueError: ``report`` is none of these.

    Upstream: https://github.com/pytorch/pytorch/issues/197554,
    https://github.com/pytorch/pytorch/issues/17425,
    https://github.com/pytorch/pytorch/issues/193794
    """
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()  # type: ignore[return-value]
    if report not in get_args(Report):
        raise ValueError(f"checked: report is {report!r}, expected 'step' or 'call'")
    return Checked(report)


# ---- install("checks") ----


def replacements() -> Mapping[str, patch.Make]:
    """Return what ``install("checks")`` patches by itself; :func:`changed` does the rest."""
    return {INSTALLED: functools.partial(guard_call, _RENORM, "embedding_renorm_", None)}


def changed() -> None:
    """Check the whole process, or stop with it."""
    installed = patch.patched(INSTALLED)
    if installed and not check.of_process:
        check.of_process.append(Scope("step"))
        _begin()
    elif check.of_process and not installed:
        try:
            check.of_process[0].flags.read()
        finally:
            check.of_process.clear()
            _end()


def not_needed() -> str | None:
    """Try the defect: ``ctc_loss`` with a label that is no class."""
    log_probs = torch.zeros((2, 1, 4), device="cpu")[..., :2]  # what is read beyond is ours
    numbers = torch.tensor([2, 1], device="cpu")
    try:
        patch.original("torch.ctc_loss")(
            log_probs, numbers[:1, None], numbers[:1], numbers[1:], zero_infinity=True
        )
    except (RuntimeError, IndexError):
        return "ctc_loss checks its targets on this torch"
    return None
