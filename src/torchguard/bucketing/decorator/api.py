"""bucketed(): pad to static sizes, run, slice the output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
from typing_extensions import Unpack

from torchguard._public import public
from torchguard.bucketing.decorator.bucketed import Bucketed, BucketedModule, module_around
from torchguard.bucketing.decorator.spec import BucketedOptions, CheckPadding, Dims, check_options
from torchguard.bucketing.padding import Side

_Result = TypeVar("_Result")

if TYPE_CHECKING:

    class _Decorator(Protocol):
        """What ``bucketed(...)`` is before it gets something to wrap."""

        # A module is a callable too, and the first of the two that fits is meant.
        @overload
        def __call__(self, function: torch.nn.Module, /) -> BucketedModule: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(self, function: Callable[..., _Result], /) -> Bucketed[_Result]: ...
        def __call__(self, function: Any, /) -> Any: ...


@overload
def bucketed(  # type: ignore[overload-overlap]  # a module is callable, and the first that fits
    function: torch.nn.Module, /, **options: Unpack[BucketedOptions]
) -> BucketedModule: ...
@overload
def bucketed(
    function: Callable[..., _Result], /, **options: Unpack[BucketedOptions]
) -> Bucketed[_Result]: ...
@overload
def bucketed(function: None = None, /, **options: Unpack[BucketedOptions]) -> _Decorator: ...
@public
def bucketed(  # noqa: D417 - options are named; nothing else comes by position
    function: Any = None,
    /,
    *positional: Any,
    dims: Dims | None = None,
    buckets: Any = None,
    fill: Mapping[str, Any] | None = None,
    lengths: Any = None,
    mask: Any = None,
    outputs: Any = None,
    side: Side = "right",
    check_padding: CheckPadding = "first",
    compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - as torch names it
) -> Any:
    """Pad named dims to a few static sizes, run, and slice the outputs back to size.

    Equals ``function(*args, **kwargs)`` if padding does not change the answer, which is checked
    once per bucket. With ``compile=``, K buckets are K graphs of static sizes.
    https://github.com/pytorch/pytorch/issues/190631

    Args:
        function: a function, a method, an ``nn.Module`` or what ``torch.compile`` made of one;
            left out, a decorator is returned. A module gives a module that shares
            everything with it: parameters, hooks, ``training``.
        dims: which dims vary, in the form of ``torch.export``'s ``dynamic_shapes``, with
            ``{dim: name}`` for each tensor: ``{"ids": {1: "t"}, "batch": {"audio": {2: "s"}}}``.
            Inputs that share a name are equally long.
        buckets: a :class:`Buckets` or a list of sizes, or ``{axis: Buckets}``. Left out, they are
            powers of two as they are needed.
        fill: what padding holds, by argument: a number or ``"repeat-last"``, as ``value`` of
            :func:`pad_to_bucket`; 0 for all others. Say it if the
            function may rely on it (labels: -100; a sum: 0): the check varies what is not named.
        lengths: the argument that takes the true size, a 0-d integer tensor, made if the caller
            gives none; with several axes ``{axis: argument}``. If he gives it, 0-d or (B,), it
            says how much of a call that arrives padded is real.
        mask: the argument that takes a mask (B, S), True where data is real. Made if the caller
            gives none or None, extended if he does; then it says how much of a call that arrives
            padded is real. ``{argument: "padding"}`` for True where padding is, and
            ``(axis, kind)`` with several axes.
        outputs: sizes of the outputs, in their structure: ``{dim: axis}`` or ``{dim: lambda t:
            t // 2}``. Left out, they are derived from the function.
        side: where padding goes, ``"right"`` or ``"left"``.
        check_padding: ``"first"``: once per bucket (and with gradients on and off, in training and
            not) the function runs without compiling on the real inputs, padded, and padded with
            values above and below all data: outputs, gradients and buffers have to agree.
            ``"always"``: in every call. ``"never"``.
        compile: True, or a dict of ``torch.compile``'s arguments, to compile it as well. False
            says that it runs uncompiled on purpose, also if ``torch.compile`` is around it.

    Returns:
        A callable, or a module, with ``stats()``, ``warmup(*example)`` and ``verify(*inputs)``.

    Raises:
        TypeError, ValueError: the options don't fit the function or each other; when called:
            a size above the largest bucket, sizes of one axis that disagree, an output whose
            size can't be derived, a function that writes to a padded input (the check finds it).
        KeyError, IndexError: when called: an argument lacks a part or a dim that ``dims`` names.
        PaddingLeakError: when called: padding changes the answer or a gradient.

    Cost:
        The padding, one graph to compile for each bucket, and for each bucket a check that runs the
        function several times.

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
    if positional:
        shown = ", ".join(type(each).__name__ for each in positional)
        raise TypeError(
            f"bucketed: got {shown} by position, expected options by name: "
            "bucketed(function, dims={'x': {1: 't'}}, buckets=[64, 128])"
        )
    options: Any = {
        "dims": dims,
        "buckets": buckets,
        "fill": fill,
        "lengths": lengths,
        "mask": mask,
        "outputs": outputs,
        "side": side,
        "check_padding": check_padding,
        "compile": compile,
    }
    check_options(options)
    if function is None:
        return functools.partial(_wrap, options=options)
    return _wrap(function, options)


def _wrap(function: Any, options: BucketedOptions) -> Any:
    refused = (type, Bucketed, BucketedModule, torch.jit.ScriptModule)
    if isinstance(function, refused) or not callable(function):
        raise TypeError(
            f"bucketed: function is {function!r}, expected a function, a method or an instance of "
            "nn.Module, neither scripted nor bucketed yet"
        )
    if isinstance(function, torch.nn.Module):
        return module_around(function, options)
    return Bucketed(function, options)
