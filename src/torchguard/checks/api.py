"""checked(): a scope in which values out of range raise, and what it puts over torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args, overload

import torch

from torchguard._public import public
from torchguard._torch import (
    CALL_USER_COMPILER,
    CALLBACK_OF_CALL,
    DYNAMO,
    compiling_as,
    on_import,
    patch,
    show_overriding,
)
from torchguard._torch.overlays import AttributeOverlay, overlays_by_owner
from torchguard.checks.check import (
    Report,
    Scope,
    check_process,
    current,
    enter,
    guard_call,
    guard_indexing,
    is_on_cpu,
    process_scope,
)
from torchguard.checks.graph import checks_in_graph, paths_of
from torchguard.checks.table import ROWS
from torchguard.errors import IndexOutOfRangeError

_Function = TypeVar("_Function", bound=Callable[..., Any])

INSTALLED = "torch.embedding_renorm_"
"""The path that ``install("checks")`` patches; the others it shares with other guards."""


# ---- what stands over torch while something is checked ----


def _makes() -> dict[str, patch.Make]:
    """Return every path that is checked, with what makes the replacement."""
    found: dict[str, patch.Make] = {}
    for row in ROWS:
        for name in row.names:
            for path in paths_of(name):
                if inspect.isbuiltin(patch.original(path)):
                    found[path] = functools.partial(guard_call, row, name.rpartition(".")[2])
            for method in (name, f"{name}_") if "." not in name else ():
                if patch.exists(f"torch.Tensor.{method}"):
                    found[f"torch.Tensor.{method}"] = functools.partial(guard_call, row, name)
    for path in ("Tensor.__getitem__", "Tensor.__setitem__", "Tensor.index_put",
                 "Tensor.index_put_", "index_put", "index_put_"):  # fmt: skip
        found[f"torch.{path}"] = functools.partial(guard_indexing, path.rpartition(".")[2])
    for name in ("csr", "csc", "bsr", "bsc", "compressed"):
        found[f"torch.sparse_{name}_tensor"] = _check_invariants
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        found[f"torch.Tensor.{name}"] = _read_first
    return found


def _check_invariants(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch check the indices, as it does on request: its kernels do not."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if current() is None or kwargs.get("check_invariants") is not None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs, check_invariants=True)
        except RuntimeError as error:
            text = f"{original.__name__}: the indices are no valid ones of this layout: {error}"
            raise IndexOutOfRangeError(text) from error

    return function


def _read_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the flags of a device before a value leaves it."""

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is not None and args and not is_on_cpu(args[0]):
            scope.flags.read()
        return original(*args, **kwargs)

    return function


def _named(path: str, make: patch.Make) -> patch.Make:
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        return show_overriding(make(original), original, path)

    return made


@functools.cache
def _overlays() -> list[AttributeOverlay]:
    with patch.originals_in_place():
        makes = {path: _named(path, make) for path, make in _makes().items()}
        return overlays_by_owner(makes)


@functools.cache
def _overlays_of_dynamo() -> list[AttributeOverlay]:
    found: list[AttributeOverlay] = []
    for each in ({CALLBACK_OF_CALL: _other_key}, {CALL_USER_COMPILER: _with_checks}):
        with contextlib.suppress(AttributeError):  # a Dynamo that is built differently
            found += overlays_by_owner(each)
    return found


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


_users = 0
_applied: list[AttributeOverlay] = []


def _begin() -> None:
    global _users
    with patch.lock:
        _users += 1
        on_import(DYNAMO, _apply)
        _apply()


def _apply(_: object = None) -> None:
    with patch.lock:
        if _users:
            wanted = list(_overlays())
            if hasattr(sys.modules.get(DYNAMO), "optimize"):  # else it is being imported
                wanted += _overlays_of_dynamo()
            new = [each for each in wanted if each not in _applied]
            patch.overlay(new)
            _applied.extend(new)


def _end() -> None:
    global _users
    with patch.lock:
        _users -= 1
        if not _users:
            patch.remove_overlay(_applied)
            _applied.clear()


# ---- the scope ----


class Checked(contextlib.ContextDecorator):
    """What :func:`checked` returns: a context manager and a decorator, usable again and again."""

    def __init__(self, report: Report) -> None:
        self._report: Report = report
        self._entered: list[tuple[Scope, Scope | None]] = []

    def __enter__(self) -> None:
        _begin()
        scope = Scope(self._report, reads_at_once=is_on_cpu)
        self._entered.append((scope, enter(scope)))

    def __exit__(self, *failure: object) -> None:
        scope, before = self._entered.pop()
        try:
            # After an exception nothing leaves the scope that was computed from a clamped value.
            if failure[0] is None:
                scope.flags.read()
        finally:
            enter(before)
            scope.flags.close()
            _end()

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in a scope of its own."""
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"checked: function is {function!r}, expected a function or a method")
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
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

    Equals the same code without it where all values are in range: same results, same graphs.
    Where one is not, torch raises in eager code on a CPU, computes something in compiled code,
    and on CUDA ends with "device-side assert triggered", after which every CUDA call of the
    process fails. In the scope each of them raises one of the errors below, with the function,
    the argument, what is allowed and what was seen, and the process goes on. It is a context
    manager and a decorator.

    On a CPU the values are read before the call, and nothing is written. On other devices they
    are clamped, so that no kernel's assert fires, and their extremes are kept on the device. They
    are read, and the error is raised, when a value is about to leave the device (``item()``,
    ``tolist()``, ``cpu()``), before ``optimizer.step()``, and at the end of the scope: nothing
    that was computed from a clamped value leaves the scope without an exception. In compiled code
    the checks are part of the graph, and are read after each call of it; what the graph writes to
    its inputs is written then.

    It sees embedding, embedding_bag, one_hot, index_select, gather, take, take_along_dim,
    ``x[index]`` and ``x[index] = v``, index_add, index_copy, index_fill, index_reduce, index_put,
    put, the scatter family, nll_loss, cross_entropy, ctc_loss, binary_cross_entropy, multinomial,
    bincount, repeat_interleave, division of integers, and the indices of sparse CSR, CSC, BSR and
    BSC tensors. It does not see custom kernels, nor what C++ calls.

    Args:
        report: when values on devices are read. ``"step"``: as above. ``"call"``: after each
            call, which waits for the device, so that the traceback shows the call.

    Raises:
        IndexOutOfRangeError: an index, a label or a count; an ``IndexError`` and a
            ``RuntimeError``, as torch raises one or the other.
        ValueOutOfRangeError: a probability; a ``ValueError`` and a ``RuntimeError``.
        ZeroDivisorError: an integer divided by zero; a ``ZeroDivisionError`` and a
            ``RuntimeError``.

    Upstream: https://github.com/pytorch/pytorch/issues/197554,
    https://github.com/pytorch/pytorch/issues/17425,
    https://github.com/pytorch/pytorch/issues/193794
    """
    if report not in get_args(Report):
        raise ValueError(f"checked: report is {report!r}, expected 'step' or 'call'")
    return Checked(report)


# ---- install("checks") ----


def replacements() -> Mapping[str, patch.Make]:
    """Return what ``install("checks")`` patches by itself; :func:`changed` does the rest."""
    return {INSTALLED: _makes()[INSTALLED]}


def changed() -> None:
    """Check the whole process, or stop with it."""
    installed = patch.patched(INSTALLED)
    scope = process_scope()
    if installed and scope is None:
        check_process(Scope("step", reads_at_once=is_on_cpu))
        _begin()
    elif not installed and scope is not None:
        check_process(None)
        scope.flags.close()
        _end()


def not_needed() -> str | None:
    """Try the defect: ``ctc_loss`` with a label that is no class."""
    ctc_loss = patch.original("torch.ctc_loss")
    log_probs = torch.zeros((2, 1, 2), device="cpu")
    lengths = torch.tensor([2], device="cpu"), torch.tensor([1], device="cpu")
    try:
        ctc_loss(log_probs, torch.tensor([[2]], device="cpu"), *lengths, zero_infinity=True)
    except (RuntimeError, IndexError):
        return "ctc_loss checks its targets on this torch"
    return None
