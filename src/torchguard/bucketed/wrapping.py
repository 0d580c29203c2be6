"""bucketed() around a function, a method, a module or something compiled already."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar, overload

import torch

from torchguard import internals
from torchguard.bucketed.calling import Caller
from torchguard.bucketed.declaration import Declaration, Dims, axis_names
from torchguard.bucketed.ladders import ladders_of, read_plan, write_plan
from torchguard.bucketed.masks_and_lengths import lengths_of, masks_of
from torchguard.bucketed.options import Options, Overflow, Verify
from torchguard.bucketed.plans import Planner
from torchguard.bucketed.statistics import Report, Statistics, report_of, statistics_of
from torchguard.bucketed.variants import Source, compiler_for, separated
from torchguard.bucketed.warming import warm_up
from torchguard.padding import Side

__all__ = ["Bucketed", "bucketed"]

_T = TypeVar("_T", bound=Callable[..., Any])


@overload
def bucketed(
    function: _T,
    /,
    *,
    dims: Dims,
    buckets: Any = ...,
    fill: Mapping[str, Any] | None = ...,
    lengths: Any = ...,
    mask: Any = ...,
    outputs: Any = ...,
    side: Side = ...,
    overflow: Overflow = ...,
    verify: Verify = ...,
    compile: bool | Mapping[str, Any] | None = ...,
    plan: str | os.PathLike[str] | None = ...,
    group: Any = ...,
) -> Any: ...
@overload
def bucketed(
    function: None = None,
    /,
    *,
    dims: Dims,
    buckets: Any = ...,
    fill: Mapping[str, Any] | None = ...,
    lengths: Any = ...,
    mask: Any = ...,
    outputs: Any = ...,
    side: Side = ...,
    overflow: Overflow = ...,
    verify: Verify = ...,
    compile: bool | Mapping[str, Any] | None = ...,
    plan: str | os.PathLike[str] | None = ...,
    group: Any = ...,
) -> Callable[[Any], Any]: ...
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
        buckets: a :class:`Buckets` for every axis, ``{axis: Buckets}``, or ``"auto"``: powers
            of two as they are needed, fitted once after 32 calls.
        fill: what padding holds, by argument: a number, ``"repeat-last"``, ``"arange"`` or a
            function, as ``value`` of :func:`pad_to_bucket`; 0 where nothing is said. Say it
            where it means something (labels: -100): only what is left at 0 is varied by the check.
        lengths: the argument that takes the true size, a 0-d integer tensor; with several axes
            ``{axis: argument}``.
        mask: the argument that takes a mask (B, S), True where data is real. Made where the
            caller gives none or None, extended where he does. ``{argument: "padding"}`` for True
            where padding is, ``"additive"`` for 0 and -inf, ``(axis, kind)`` with several axes.
        outputs: sizes of the outputs, in their structure: ``{dim: axis}`` or ``{dim: lambda t:
            t // 2}``. Left out, they are derived from the function.
        side: where padding goes, ``"right"`` or ``"left"``.
        overflow: above the largest bucket: ``"error"``; ``"eager"``, without compiling;
            ``"grow"``, a new bucket of twice the size; ``"dynamic"``, one compiled function
            with symbolic sizes.
        verify: ``"first"``: once per bucket (and with gradients on and off, in training and
            not) the function runs three times without compiling: on the real inputs, padded,
            and padded with something else. ``"always"``: in every call. ``"never"``.
        compile: True, or a dict of ``torch.compile``'s arguments, to compile it as well.
        plan: a file that ``save_plan`` wrote, in place of ``buckets``.
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
    from torchguard.bucketed.modules import module_around  # noqa: PLC0415 - it needs this file

    if not callable(function):
        raise TypeError(
            f"bucketed: function is a {type(function).__name__}, expected something to call"
        )
    if isinstance(function, (Bucketed, staticmethod, classmethod)):
        raise TypeError(f"bucketed: function is a {type(function).__name__}: wrap what is inside")
    if isinstance(function, torch.nn.Module):
        return module_around(function, options)
    return Bucketed(function, options)


class Core:
    """A function with everything it needs to run in buckets; one set of ladders.

    Args:
        given: what the user wraps, or a module's own forward.
        compiler: what compiles it, as :func:`compiler_for` returns.
        options: what the user asked for.
        bound: whether it is given something of ours first, ``self``.
        name: for messages.
    """

    def __init__(
        self, function: Any, static: Any, dynamic: Any, options: Options, *, bound: bool, name: str
    ) -> None:
        axes = tuple(dict.fromkeys(axis_names(options.dims)))
        growing = options.overflow == "grow"
        plan = None if options.plan is None else read_plan(options.plan)
        self.ladders = ladders_of(axes, options.buckets, plan, growing=growing)
        declaration = Declaration.of(function, options.dims, options.fill, bound=bound)
        masks = masks_of(options.mask, axes)
        lengths = lengths_of(options.lengths, axes)
        declaration.check_arguments([*(mask.argument for mask in masks), *lengths.values()])
        self._planner = Planner(declaration, self.ladders, options, masks, lengths)
        self._function = function
        self._static, self._dynamic = static, dynamic
        self._name = name

    def caller(self) -> Caller:
        """Return a caller with statistics and compiled variants of its own."""
        function = self._function
        dynamic = function
        if self._dynamic is not None:
            dynamic = self._dynamic(separated(function, "beyond_buckets"))
        return Caller(Source(function, self._static, dynamic), self._planner, self._name)


class Bucketed:
    """What :func:`bucketed` returns for a function; in a class, a method."""

    def __init__(self, function: Any, options: Options) -> None:
        functools.update_wrapper(self, function)
        self._given = function
        self._options = options
        self._original, self._static, self._dynamic = compiler_for(function, options.compile)
        if isinstance(self._original, torch.nn.Module):
            raise TypeError("bucketed: wrap the module, not its compiled call")
        self._unbound: tuple[Core, Caller] | None = None
        self._in_class: Core | None = None
        self._of_instances: dict[int, tuple[Any, Caller]] = {}
        self._lock = threading.RLock()
        self._is_method = False
        if not _seems_a_method(self._original):
            self._alone()

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True

    def _core(self, *, bound: bool) -> Core:
        name = getattr(self._original, "__qualname__", type(self._original).__name__) + "()"
        return Core(
            self._original, self._static, self._dynamic, self._options, bound=bound, name=name
        )

    def _alone(self) -> tuple[Core, Caller]:
        with self._lock:
            if self._unbound is None:
                core = self._core(bound=False)
                self._unbound = (core, core.caller())
            return self._unbound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run, cut."""
        if internals.inside_compiled():
            return _outside(self._alone()[1], (), args, kwargs)
        unbound = self._unbound or self._alone()
        return unbound[1]((), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return BoundMethod(self, instance, *self._for_instance(instance))

    def _for_instance(self, instance: Any) -> tuple[Core, Caller]:
        """Every instance has graphs of its own: its attributes are part of them."""
        key = id(instance)
        found = self._of_instances.get(key)
        core = self._in_class
        if found is not None and core is not None and found[0]() is instance:
            return core, found[1]
        with self._lock:
            if self._in_class is None:
                self._in_class = self._core(bound=True)
            caller = self._in_class.caller()
            instances = self._of_instances
            try:
                reference: Any = weakref.ref(instance, lambda _: instances.pop(key, None))
            except TypeError:  # __slots__ without __weakref__: shared by all of the class
                key, reference = 0, lambda: None
                if 0 in instances:
                    return self._in_class, instances[0][1]
            instances[key] = (reference, caller)
            return self._in_class, caller

    def stats(self) -> Statistics:
        """Return what has run so far: calls, buckets, waste, compile time, graphs."""
        core, caller = self._alone()
        return statistics_of(caller, core.ladders)

    def report(self, path: str | os.PathLike[str] | None = None) -> Report:
        """Return what other buckets would change; with ``path``, draw it (extra ``plot``)."""
        core, caller = self._alone()
        return report_of(caller, core.ladders, path)

    def warmup(self, *example: Any, progress: bool | None = None, **keywords: Any) -> None:
        """Compile every bucket, with the example cut or padded to its size.

        Parameters, buffers, gradients and random state stay as they are. With gradients on,
        the backward is compiled too.

        Args:
            example: arguments as in a call.
            progress: whether to show a bar; by default on a terminal.
            keywords: likewise.
        """
        core, caller = self._alone()
        warm_up(caller, core.ladders, (), example, keywords, progress=progress)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Check these inputs now: raise unless padding leaves answer and gradients as they are.

        Raises:
            PaddingLeakError: it does not.
        """
        self._alone()[1].verify((), inputs, keywords)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the buckets, and the sizes seen, to a file for ``plan=``."""
        core, caller = self._alone()
        write_plan(path, core.ladders, caller.seen)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds a decorated function under its name; it is this object itself.
        name = getattr(self, "__qualname__", "")
        module = getattr(self, "__module__", None)
        if module is not None and _lookup(module, name) is self:
            return name
        return _wrapped_again, (self._given, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucketed:
        # As a function, which is the same after a deepcopy.
        return self

    def __repr__(self) -> str:
        return f"<bucketed {getattr(self, '__qualname__', self._original)!s}>"


class BoundMethod:
    """A bucketed method of one instance."""

    def __init__(self, of: Bucketed, instance: Any, core: Core, caller: Caller) -> None:
        self.__self__ = instance
        self.__func__ = of
        self._core = core
        self._caller = caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run, cut."""
        if internals.inside_compiled():
            return _outside(self._caller, (self.__self__,), args, kwargs)
        return self._caller((self.__self__,), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__wrapped__":
            return getattr(self.__dict__["__func__"], name)
        raise AttributeError(name)

    def stats(self) -> Statistics:
        """As :meth:`Bucketed.stats`, of this instance."""
        return statistics_of(self._caller, self._core.ladders)

    def report(self, path: str | os.PathLike[str] | None = None) -> Report:
        """As :meth:`Bucketed.report`, of this instance."""
        return report_of(self._caller, self._core.ladders, path)

    def warmup(self, *example: Any, progress: bool | None = None, **keywords: Any) -> None:
        """As :meth:`Bucketed.warmup`, for this instance."""
        ladders = self._core.ladders
        warm_up(self._caller, ladders, (self.__self__,), example, keywords, progress=progress)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """As :meth:`Bucketed.verify`, for this instance."""
        self._caller.verify((self.__self__,), inputs, keywords)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """As :meth:`Bucketed.save_plan`."""
        write_plan(path, self._core.ladders, self._caller.seen)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.__dict__["__name__"])


def _outside(caller: Caller, owner: Any, args: Any, kwargs: Any) -> Any:
    """Call from a compiled function, which must not compile what is here."""
    return torch.compiler.disable(caller)(owner, args, kwargs)


def _seems_a_method(function: Any) -> bool:
    """Whether it was defined in a class body, so its first parameter may be ``self``."""
    if not isinstance(function, FunctionType):
        return False
    outer, _, _ = function.__qualname__.rpartition(".")
    return bool(outer) and not outer.endswith("<locals>")


def _lookup(module: str, name: str) -> Any:
    import sys  # noqa: PLC0415

    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _wrapped_again(function: Any, options: Options) -> Any:
    return Bucketed(function, options)


for _function in (Bucketed.__call__, BoundMethod.__call__):
    internals.mark_untraced(_function)
