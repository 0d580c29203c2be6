"""What bucketed() returns for a function, and for an ``nn.Module``, with which it shares all."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.graphs import compiler_for
from torchguard.bucketing.decorator.routes import Runner
from torchguard.bucketing.decorator.spec import BucketedOptions
from torchguard.bucketing.decorator.stats import BucketedStats
from torchguard.bucketing.decorator.warmup import warm_up

Settings: TypeAlias = Callable[[Any, Any], dict[str, Any]]
"""Makes the settings for ``torch.compile`` of the function and of what ``compile=`` says."""
_Result_co = TypeVar("_Result_co", covariant=True)

# None: Dynamo is off. False: it runs what is compiled, and compiles nothing.
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/eval_frame.c
_NOT_TRACING = frozenset({None, False})
"""What Dynamo's frame callback is outside of a compiled function."""

if TYPE_CHECKING:

    class _AnyModule(torch.nn.Module):
        """To type checkers a bucketed module has every attribute: it is one of its class."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _AnyModule = object


class Methods:
    """What a bucketed function and a bucketed module have besides their call."""

    __slots__ = ()

    def _bucketed_runner(self) -> Runner:
        raise NotImplementedError

    def stats(self) -> BucketedStats:
        """Return what has run so far: calls, buckets, waste, compile time, graphs, sizes seen."""
        return self._bucketed_runner().stats()

    def warmup(self, *example: Any, **keywords: Any) -> None:
        """Compile and check every bucket, the largest first, so that no call waits for it.

        The example is cut or padded to the size of the bucket, which is compiled (with gradients
        on, the backward too), and to the smallest size that enters it, with which padding is
        checked and sizes of outputs are derived. Parameters, buffers, gradients and RNG state
        stay as they are; an argument that the function writes does not. Padding that changes the
        answer is a warning.

        Args:
            example: arguments as in a call.
            keywords: those by name.

        Raises:
            torch.OutOfMemoryError, RuntimeError: a bucket does not fit into memory.
            ValueError: ``buckets`` was left out, and no call has made one yet.
        """
        warm_up(self._bucketed_runner(), example, keywords)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Check these inputs now: raise unless padding leaves answer and gradients as they are.

        Raises:
            PaddingLeakError: padding changes the answer or a gradient.
            ValueError: nothing of the inputs is padding.
        """
        self._bucketed_runner().verify(inputs, keywords)


class Bucketed(Methods, Generic[_Result_co]):
    """What :func:`bucketed` returns for a function.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> double = bucketed(lambda x: 2 * x, dims=({0: "t"},), buckets=Buckets([4, 8]))
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().hits
        {(4,): 1}
    """

    __name__: str

    def __init__(self, function: Callable[..., _Result_co], options: BucketedOptions) -> None:
        functools.update_wrapper(self, function)
        vars(self).pop("stats", None)  # what verified() has put on a function
        self._given = function
        self._options = options
        original, compiler = compiler_for(function, options["compile"])
        self._caller = Runner(original, compiler, options)

    def _bucketed_runner(self) -> Runner:
        return self._caller

    def __call__(self, *args: Any, **kwargs: Any) -> _Result_co:
        """Pad, run, slice."""
        caller = self._caller
        if _torch.frame_callback() not in _NOT_TRACING:
            return caller.called_from_compiled_code(args, kwargs)  # type: ignore[no-any-return]
        return caller(args, kwargs)  # type: ignore[no-any-return]

    def __set_name__(self, owner: type, name: str) -> None:
        raise TypeError(
            f"bucketed: {owner.__name__}.{name} is wrapped in the body of its class, but each "
            f"instance needs graphs of its own: wrap the instance, bucketed({owner.__name__}(...), "
            f"...), or its method, self.{name} = bucketed(self.{name}, ...) in __init__"
        )

    def __torchguard_compile__(self, settings: Settings) -> Bucketed[_Result_co]:
        """Return the same with other settings for ``torch.compile``."""
        compile_ = settings(self._given, self._options["compile"])
        return Bucketed(self._caller.function, {**self._options, "compile": compile_})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds a decorated function under its name; it is this object itself.
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Bucketed, (self._given, self._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As what it wraps: a function is the same after a deepcopy, a bound method is another.
        given = copy.deepcopy(self._given, memo)
        return self if given is self._given else Bucketed(given, self._options)

    def __repr__(self) -> str:
        return f"<bucketed {getattr(self, '__qualname__', self._given)!s}>"


_torch.mark_untraced(Bucketed.__call__)


# ---- a module ----


class BucketedModule(Methods, _AnyModule):
    """What a bucketed module adds to its own class.

    It shares the ``__dict__`` of its module: parameters, buffers, hooks, ``training`` and every
    attribute are the same for both. Hooks see real inputs and outputs.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> model = bucketed(torch.nn.ReLU(), dims=({0: "t"},), buckets=Buckets([4, 8]))
        >>> model(torch.ones(3))
        tensor([1., 1., 1.])
        >>> isinstance(model, torch.nn.ReLU), model.stats().calls
        (True, 1)
    """

    __slots__ = ()

    # transformers evaluates the annotations of each class of a model, so these have to be there.
    _bucketed: tuple[torch.nn.Module, Any, Any, Runner]
    """The module, the options, what was given (compiled or not), and what calls."""

    def __init_subclass__(cls) -> None:
        """Skip the user's own __init_subclass__: this wrapper is not a class to register."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run the module's own forward, slice."""
        caller = self._bucketed[3]
        if _torch.frame_callback() not in _NOT_TRACING:
            return caller.called_from_compiled_code(args, kwargs)
        return caller(args, kwargs)

    def _bucketed_runner(self) -> Runner:
        return self._bucketed[3]

    def __torchguard_compile__(self, settings: Settings) -> Any:
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


def module_around(given: torch.nn.Module, options: BucketedOptions) -> BucketedModule:
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
    given: torch.nn.Module, options: BucketedOptions
) -> tuple[torch.nn.Module, BucketedOptions, Any, Runner]:
    in_place = _torch.compiled_in_place(given)
    found = _torch.compiler_of(in_place)
    if found is None:
        module, compiler = compiler_for(given, options["compile"])
    else:
        module, (_, compiler) = given, compiler_for(in_place, options["compile"])
    if not isinstance(module, torch.nn.Module) or isinstance(module, BucketedModule):
        raise TypeError(
            f"bucketed: function is a {type(given).__name__} around an object of type "
            f"{type(module).__name__}, expected one around an nn.Module that is not bucketed yet"
        )
    own = type(module)
    if "forward" in module.__dict__:
        raise TypeError(
            f"bucketed: this {own.__name__} has a forward of its own, set on the object: wrap that "
            "function"
        )
    return module, options, given, Runner(own.forward, compiler, options, (module,))


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
