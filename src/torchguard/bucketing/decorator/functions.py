"""bucketed() around a function or a method."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.auto import write_plan
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.compile import compiler_for
from torchguard.bucketing.decorator.core import Core
from torchguard.bucketing.decorator.options import Options
from torchguard.bucketing.decorator.stats import Report, Statistics, report_of, statistics_of
from torchguard.bucketing.decorator.warming import warm_up

__all__ = ["Bucketed", "outside"]


class Bucketed:
    """What :func:`bucketed` returns for a function; in a class, a method."""

    def __init__(self, function: Any, options: Options) -> None:
        functools.update_wrapper(self, function)
        vars(self).pop("stats", None)  # what verified() has put on a function
        self._given = function
        self._options = options
        self._original, self._static, self._dynamic = compiler_for(function, options.compile)
        if isinstance(self._original, torch.nn.Module):
            raise TypeError("bucketed: wrap the module, not its compiled call")
        self._unbound: tuple[Core, Caller] | None = None
        self._in_class: Core | None = None
        self._of_instances: dict[int, tuple[Any, Caller]] = {}
        self._lock = threading.RLock()
        if not _seems_a_method(self._original):
            self._alone()

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
        if _torch.inside_compiled():
            return outside(self._alone()[1], (), args, kwargs)
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

    def compiled(self, settings: Callable[[Any, Any], dict[str, Any]]) -> Bucketed:
        """Return the same with other settings for ``torch.compile``.

        Args:
            settings: makes them from what was wrapped and from ``compile=``.
        """
        compile_ = settings(self._given, self._options.compile)
        return Bucketed(self._original, replace(self._options, compile=compile_))

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
        if _torch.inside_compiled():
            return outside(self._caller, (self.__self__,), args, kwargs)
        return self._caller((self.__self__,), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Name and docstring; not the function itself, whose signature begins with self.
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


def outside(caller: Caller, owner: Any, args: Any, kwargs: Any) -> Any:
    """Call from a compiled function, which must not compile what is here."""
    return torch.compiler.disable(_warned_and_called)(caller, owner, args, kwargs)


def _warned_and_called(caller: Caller, owner: Any, args: Any, kwargs: Any) -> Any:
    caller.warn_of_compiling_around()
    return caller(owner, args, kwargs)


def _seems_a_method(function: Any) -> bool:
    """Whether it was defined in a class body, so its first parameter may be ``self``."""
    if not isinstance(function, FunctionType):
        return False
    outer, _, _ = function.__qualname__.rpartition(".")
    return bool(outer) and not outer.endswith("<locals>")


def _lookup(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _wrapped_again(function: Any, options: Options) -> Any:
    return Bucketed(function, options)


for _function in (Bucketed.__call__, BoundMethod.__call__):
    _torch.mark_untraced(_function)
