"""What bucketed() returns around a function, a method and an ``nn.Module``."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from typing_extensions import ParamSpec, Self

from torchguard import _torch
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.compiled import compiler_for
from torchguard.bucketing.decorator.options import Spec
from torchguard.bucketing.decorator.stats import BucketedStats, stats_of
from torchguard.bucketing.decorator.warmup import WarmupReport, warm_up

_Arguments = ParamSpec("_Arguments")
_Result_co = TypeVar("_Result_co", covariant=True)
_Settings = Callable[[Any, Any], dict[str, Any]]


class _Methods:
    """What a function, a method and a module have besides their call."""

    __slots__ = ()

    def _bucketed_caller(self) -> tuple[Caller, tuple[Any, ...]]:
        """Return what calls, and what it is given before the caller's arguments."""
        raise NotImplementedError

    def stats(self) -> BucketedStats:
        """Return what has run so far: calls, buckets, waste, compile time, graphs, sizes seen."""
        return stats_of(self._bucketed_caller()[0])

    def warmup(self, *example: Any, **keywords: Any) -> WarmupReport:
        """Compile and check every bucket, the largest first, so that no call waits for it.

        The example is cut or padded to the size of the bucket, which is compiled (with gradients
        on, the backward too), and to the smallest size that enters it, with which padding is
        checked and sizes of outputs are derived. Parameters, buffers, gradients and RNG state
        stay as they are; an argument that the function writes does not. A bucket that runs out of
        memory is left out, with a warning. Padding that changes the answer is a warning, too.

        Args:
            example: arguments as in a call.
            keywords: those by name.

        Returns:
            A :class:`WarmupReport`: the seconds of a call in each bucket, the better of two.

        Raises:
            torch.OutOfMemoryError, RuntimeError: no bucket fits into memory.
            ValueError: ``buckets`` was left out, and no call has made one yet.
        """
        caller, owner = self._bucketed_caller()
        return warm_up(caller, owner, example, keywords)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Check these inputs now: raise unless padding leaves answer and gradients as they are.

        Raises:
            PaddingLeakError: padding changes the answer or a gradient.
            ValueError: the inputs are above the largest bucket, or nothing of them is padding.
        """
        caller, owner = self._bucketed_caller()
        caller.verify(owner, inputs, keywords)


# ---- a function ----


class Bucketed(_Methods, Generic[_Arguments, _Result_co]):
    """What :func:`bucketed` returns for a function; in a class, a method."""

    __name__: str

    def __init__(self, function: Callable[_Arguments, _Result_co], options: MaskingOptions) -> None:
        functools.update_wrapper(self, function)
        vars(self).pop("stats", None)  # what verified() has put on a function
        self._given = function
        self._options = options
        self._original, self._compiler = compiler_for(function, options["compile"])
        if isinstance(self._original, torch.nn.Module):
            raise TypeError("bucketed: wrap the module, not its compiled call")
        self._caller: Caller | None = None
        self._in_class: Spec | None = None
        self._of_instances: dict[int, tuple[Any, Caller]] = {}
        self._lock = threading.RLock()
        if not _seems_a_method(self._original):
            self._alone()

    def _alone(self) -> Caller:
        with self._lock:
            if self._caller is None:
                self._caller = self._new_caller(Spec.of(self._original, self._options, bound=False))
            return self._caller

    def _new_caller(self, spec: Spec) -> Caller:
        name = getattr(self._original, "__qualname__", type(self._original).__name__) + "()"
        return Caller(self._original, self._compiler, spec, name)

    def _bucketed_caller(self) -> tuple[Caller, tuple[Any, ...]]:
        return self._alone(), ()

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result_co:
        """Pad, run, slice."""
        caller = self._caller or self._alone()
        if _torch.frame_callback() not in _NOT_TRACING:
            return caller.called_from_compiled_code((), args, kwargs)  # type: ignore[no-any-return]
        return caller((), args, kwargs)  # type: ignore[no-any-return]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> BoundMethod[_Result_co]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return BoundMethod(self, instance, self._for_instance(instance))

    def _for_instance(self, instance: Any) -> Caller:
        """Every instance has graphs of its own: its attributes are part of them."""
        key = id(instance)
        found = self._of_instances.get(key)
        # The id of an object that is gone may be that of another one now.
        if found is not None and found[0]() is instance:
            return found[1]
        with self._lock:
            found = self._of_instances.get(key)  # another thread may have been first
            if found is not None and found[0]() is instance:
                return found[1]
            if self._in_class is None:
                self._in_class = Spec.of(self._original, self._options, bound=True)
            caller = self._new_caller(self._in_class)
            instances = self._of_instances
            try:
                reference: Any = weakref.ref(instance, lambda _: instances.pop(key, None))
            except TypeError:  # __slots__ without __weakref__: shared by all of the class
                key, reference = 0, lambda: None
                if 0 in instances:
                    return instances[0][1]
            instances[key] = (reference, caller)
            return caller

    def __torchguard_compile__(self, settings: _Settings) -> Bucketed[_Arguments, _Result_co]:
        """Return the same with other settings for ``torch.compile``."""
        compile_ = settings(self._given, self._options["compile"])
        return Bucketed(self._original, {**self._options, "compile": compile_})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds a decorated function under its name; it is this object itself.
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Bucketed, (self._given, self._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # As a function, which is the same after a deepcopy.
        return self

    def __repr__(self) -> str:
        return f"<bucketed {getattr(self, '__qualname__', self._original)!s}>"


class BoundMethod(_Methods, Generic[_Result_co]):
    """A bucketed method of one instance."""

    def __init__(self, of: Bucketed[..., _Result_co], instance: Any, caller: Caller) -> None:
        self.__self__ = instance
        self.__func__ = of
        self._caller = caller

    def _bucketed_caller(self) -> tuple[Caller, tuple[Any, ...]]:
        return self._caller, (self.__self__,)

    def __call__(self, *args: Any, **kwargs: Any) -> _Result_co:
        """Pad, run, slice."""
        if _torch.frame_callback() not in _NOT_TRACING:
            return self._caller.called_from_compiled_code((self.__self__,), args, kwargs)  # type: ignore[no-any-return]
        return self._caller((self.__self__,), args, kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":  # the function's own begins with self
            return inspect.signature(MethodType(self.__func__, self.__self__))
        # Name and docstring; not the function itself.
        if name.startswith("__") and name != "__wrapped__":
            return getattr(self.__dict__["__func__"], name)
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        # As Python pickles a bound method: by its instance and its name.
        return getattr, (self.__self__, self.__func__.__dict__["__name__"])


# None: Dynamo is off. False: it runs what is compiled, and compiles nothing.
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/eval_frame.c
_NOT_TRACING = frozenset({None, False})
"""What Dynamo's frame callback is outside of a compiled function."""


def _seems_a_method(function: Any) -> bool:
    """Whether it was defined in a class body, so its first parameter may be ``self``."""
    if not isinstance(function, FunctionType):
        return False
    outer, _, _ = function.__qualname__.rpartition(".")
    return bool(outer) and not outer.endswith("<locals>")


# ---- a module ----


if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import MaskingOptions

    class _AnyModule(torch.nn.Module):
        """To type checkers a bucketed module has every attribute: it is one of its class."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _AnyModule = object


class BucketedModule(_Methods, _AnyModule):
    """What a bucketed module adds to its own class.

    It shares the ``__dict__`` of the module it was made from, so parameters, buffers, hooks,
    ``training`` and every attribute are the same for both. Hooks see real inputs and outputs.
    """

    __slots__ = ()

    # transformers evaluates the annotations of each class of a model, so these have to be there.
    _bucketed: tuple[torch.nn.Module, Any, Any, Caller]
    """The module, the options, what was given (compiled or not), and what calls."""

    def __init_subclass__(cls) -> None:
        """Skip the user's own __init_subclass__: this wrapper is no new class to register."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run the module's own forward, slice."""
        module, _, _, caller = self._bucketed
        if _torch.frame_callback() not in _NOT_TRACING:
            return caller.called_from_compiled_code((module,), args, kwargs)
        return caller((module,), args, kwargs)

    def _bucketed_caller(self) -> tuple[Caller, tuple[Any, ...]]:
        return self._bucketed[3], (self._bucketed[0],)

    def __torchguard_compile__(self, settings: _Settings) -> Any:
        """Return this module itself, from now on with other settings for ``torch.compile``."""
        module, options, given, _ = self._bucketed
        compile_ = settings(given, options["compile"])
        changed: Any = {**options, "compile": compile_}
        object.__setattr__(self, "_bucketed", _parts(module, changed))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, options, given, _ = self._bucketed
        if given is not module:
            raise TypeError(
                "bucketed: a module that was compiled before can't be pickled: wrap the module "
                "itself and pass compile={...}"
            )
        return module_around, (module, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module, options, given, _ = self._bucketed
        copied = copy.deepcopy(module, memo)
        if given is module:
            return module_around(copied, options)
        settings = _torch.compiler_of(given)
        assert settings is not None
        return module_around(settings[1](copied), options)


def module_around(given: torch.nn.Module, options: MaskingOptions) -> BucketedModule:
    """Return a bucketed module that shares everything with the one given."""
    parts = _parts(given, options)
    module = parts[0]
    # Not by its constructor, which would make parameters of its own.
    own: Any = type(module)
    made: BucketedModule = object.__new__(_class_around(own))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_bucketed", parts)
    _torch.forget_compiled_in_place(made)
    return made


def _parts(
    given: torch.nn.Module, options: MaskingOptions
) -> tuple[torch.nn.Module, MaskingOptions, Any, Caller]:
    in_place = _torch.compiled_in_place(given)
    found = _torch.compiler_of(in_place)
    if found is None:
        module, compiler = compiler_for(given, options["compile"])
    else:
        module, (_, compiler) = given, compiler_for(in_place, options["compile"])
    if isinstance(module, (BucketedModule, torch.jit.ScriptModule)):
        raise TypeError(
            f"bucketed: function is of type {type(module).__name__}: wrap the module inside"
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"bucketed: function is a {type(given).__name__} around an object of type "
            f"{type(module).__name__}, expected one around an nn.Module"
        )
    own = type(module)
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        raise TypeError(
            f"bucketed: this {own.__name__} changes its class when it first runs: call it once "
            "before, or wrap a module that holds it"
        )
    name = f"{own.__qualname__}.forward()"
    if "forward" in module.__dict__:
        raise TypeError(
            f"bucketed: this {own.__name__} has a forward of its own, set on the object: wrap that "
            "function"
        )
    spec = Spec.of(own.forward, options, bound=True)
    return module, options, given, Caller(own.forward, compiler, spec, name)


@functools.cache
def _class_around(own: type[Any]) -> Any:
    names = {
        # Slots win over the __dict__ that is shared: what module.compile() has put there would be
        # called instead of us.
        "__slots__": ("_bucketed", _torch.COMPILED_IN_PLACE),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "forward": _forward_like(own.forward),
        # Over what verified() has put into the __dict__, too.
        "stats": property(lambda self: functools.partial(BucketedModule.stats, self)),
    }
    metaclass: Any = type(own)
    return metaclass(own.__name__, (BucketedModule, own), names)


def _forward_like(forward: Any) -> Any:
    """Return our forward with the signature of another: Hugging Face's Trainer reads it."""
    ours = BucketedModule.forward
    # A copy, so that each class has a signature of its own on it.
    copied = FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
    functools.update_wrapper(copied, forward, assigned=("__doc__", "__annotations__"), updated=())
    _torch.mark_untraced(copied)
    return copied


for _function in (Bucketed.__call__, BoundMethod.__call__):
    _torch.mark_untraced(_function)
