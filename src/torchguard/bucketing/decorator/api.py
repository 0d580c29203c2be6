"""bucketed(): pad to static sizes, run, cut back."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from typing_extensions import ParamSpec, Unpack

from torchguard import _torch
from torchguard.bucketing.padding import Side

# What does it is imported with the first use: it is a third of what `import torchguard` would take.
if TYPE_CHECKING:
    from torchguard.bucketing.decorator.decorated import Decorator, MaskingDecorator, Wrapped
    from torchguard.bucketing.decorator.options import (
        Keywords,
        MaskingKeywords,
        Options,
        Overflow,
        Verify,
    )
    from torchguard.bucketing.decorator.spec import Dims

__all__ = ["bucketed"]

_Arguments = ParamSpec("_Arguments")
_Module = TypeVar("_Module", bound=torch.nn.Module)
_Result = TypeVar("_Result")


# A module is a callable too, and the first that fits is meant.
@overload
def bucketed(function: _Module, /, **options: Unpack[MaskingKeywords]) -> _Module: ...
@overload
def bucketed(
    function: Callable[_Arguments, _Result], /, **options: Unpack[Keywords]
) -> Wrapped[_Arguments, _Result]: ...
@overload
def bucketed(
    function: Callable[..., _Result], /, **options: Unpack[MaskingKeywords]
) -> Wrapped[..., _Result]: ...
@overload
def bucketed(function: None = None, /, **options: Unpack[Keywords]) -> Decorator: ...
@overload
def bucketed(function: None = None, /, **options: Unpack[MaskingKeywords]) -> MaskingDecorator: ...
def bucketed(
    function: Any = None,
    /,
    *,
    dims: Dims,
    buckets: Any = None,
    fill: Mapping[str, Any] | None = None,
    lengths: Any = None,
    mask: Any = None,
    outputs: Any = None,
    side: Side = "right",
    overflow: Overflow = "error",
    verify: Verify = "first",
    compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - torch.compile's own word
    plan: str | os.PathLike[str] | None = None,
    group: Any = None,
) -> Any:
    """Pad named dims to a few static sizes, run, and cut the outputs back to size.

    Equals ``function(*args, **kwargs)`` if padding does not change the answer, which is checked
    once per bucket. What reaches ``torch.compile`` is static: with K buckets K graphs, no
    symbolic size, nothing that runs uncompiled. https://github.com/pytorch/pytorch/issues/190631

    Args:
        function: a function, a method, an ``nn.Module`` or what ``torch.compile`` made of one;
            left out, a decorator is returned. A module comes back as a module that shares
            everything with it: parameters, hooks, ``training``.
        dims: which dims vary, in the form of ``torch.export``'s ``dynamic_shapes``:
            ``{"ids": {1: "t"}, "batch": {"audio": {2: "s"}}}``. Inputs that share a name are
            equally long.
        buckets: a :class:`Buckets` or a list of sizes for every axis, ``{axis: Buckets}``, or
            ``"auto"``: powers of two as they are needed, fitted once after 32 calls.
        fill: what padding holds, by argument: a number, ``"repeat-last"``, ``"arange"`` or a
            function, as ``value`` of :func:`pad_to_bucket`; 0 where nothing is said. Say it
            where it means something (labels: -100): only what is left at 0 is varied by the check.
        lengths: the argument that takes the true size, a 0-d integer tensor; with several axes
            ``{axis: argument}``.
        mask: the argument that takes a mask (B, S), True where data is real. Made where the
            caller gives none or None, extended where he does. ``{argument: "padding"}`` for True
            where padding is, ``"additive"`` for 0 and -inf, ``(axis, kind)`` with several axes.
        outputs: sizes of the outputs, in their structure: ``{dim: axis}`` or ``{dim: lambda t:
            t // 2}``; ``{dim: (None, axis)}`` where a batch and its rows are one dim of B * t, as
            in router logits of mixture-of-experts models. Left out, they are derived from the
            function.
        side: where padding goes, ``"right"`` or ``"left"``.
        overflow: above the largest bucket: ``"error"``; ``"eager"``, without compiling;
            ``"grow"``, a new bucket of twice the size; ``"dynamic"``, one compiled function
            with symbolic sizes.
        verify: ``"first"``: once per bucket (and with gradients on and off, in training and
            not) the function runs four times without compiling: on the real inputs, padded, and
            padded with two other values; more often where these tell something apart, and again
            where padding grows (docs/bucketed.md). ``"always"``: in every call. ``"never"``.
        compile: True, or a dict of ``torch.compile``'s arguments, to compile it as well. False
            says that it runs uncompiled on purpose, also where ``torch.compile`` is around it.
        plan: a file that ``save_plan`` wrote, or ``python -m torchguard plan --json``, in
            place of ``buckets``.
        group: a group of ``torch.distributed``, or True for all ranks: every rank takes the
            bucket of the longest. Each rank has to make the same calls.

    Returns:
        A callable, or a module, with ``stats()``, ``report()``, ``warmup(*example)``,
        ``verify(*inputs)`` and ``save_plan(path)``.

    Raises:
        TypeError, ValueError: the arguments don't fit the function or each other; when called:
            a size above the largest bucket, sizes of one axis that disagree, an output whose
            size can't be told.
        PaddingLeakError: when called: padding changes the answer or a gradient.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> @bucketed(dims={"x": {0: "t"}}, buckets=Buckets([4, 8]))
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().hits
        {(4,): 1}
    """
    from torchguard.bucketing.decorator.options import Options  # noqa: PLC0415

    options = Options(
        dims=dims,
        buckets=buckets,
        fill=fill,
        lengths=lengths,
        mask=mask,
        outputs=outputs,
        side=side,
        overflow=overflow,
        verify=verify,
        compile=compile,
        plan=plan,
        group=group,
    )
    if function is None:
        return functools.partial(_wrap, options=options)
    return _wrap(function, options=options)


def _wrap(function: Any, *, options: Options) -> Any:
    from torchguard.bucketing.decorator.functions import Bucketed  # noqa: PLC0415
    from torchguard.bucketing.decorator.modules import module_around  # noqa: PLC0415

    if isinstance(function, (Bucketed, staticmethod, classmethod)):
        raise TypeError(f"bucketed: function is a {type(function).__name__}: wrap what is inside")
    reason = _refused(function)
    if reason is not None:
        raise TypeError(f"bucketed: function is {reason}")
    if isinstance(function, torch.nn.Module):
        return module_around(function, options)
    return Bucketed(function, options)


def _refused(function: Any) -> str | None:
    """Say what a function is, and what to pass instead, if its output can't be cut to size."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, type):
        return (
            f"the class {name}: pass an instance, bucketed({name}(...), ...), or decorate its "
            "forward or __call__"
        )
    if not callable(function):
        return f"a {type(function).__name__}, expected something to call"
    if isinstance(function, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return (
            f"{name}, made by torch.jit: pass the module or the function it was made from, and "
            "compile=True in place of torch.jit"
        )
    compiled = _torch.compiler_of(function)
    called = function if compiled is None else compiled[0]
    if isinstance(called, torch.nn.Module):
        called = type(called).forward
    for each in (called, getattr(type(called), "__call__", None)):  # noqa: B004 - looked into
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            return (
                f"{name}, which is async: what it returns can't be cut to size. Wrap the function "
                "that runs the model, and call that from the async one"
            )
        if inspect.isgeneratorfunction(each):
            return (
                f"{name}, which is a generator: what it yields can't be cut to size. Wrap the "
                "function that makes one item, or return a list"
            )
    return None
