"""What PyTorch keeps private of tensors, modes, modules, optimizers and loaders in eager code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function,
    has_torch_function_unary,
)
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

from torchguard._torch.replacement import original_of
from torchguard._torch.schemas import private

# ---- one tensor ----


def is_note_of_dynamo(attribute: str) -> bool:
    """Whether Dynamo notes in this attribute of a parameter how it compiles."""
    return attribute.startswith("_dynamo")


def open_archive(file: Any) -> None:
    """Open a zip archive with the reader of ``torch.load``, which is stricter than ``zipfile``."""
    torch._C.PyTorchFileReader(file)


def version_of(tensor: torch.Tensor) -> int | None:
    """``tensor._version``, or None for an inference tensor, which has no version counter."""
    try:
        return tensor._version
    # Also for one that was made to view an inference tensor (x.data = y), or without the name.
    except (RuntimeError, AttributeError):
        return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter, so that autograd does not see a write."""
    # Its C function takes a tensor and a number on 2.6, and tuples of both on later releases.
    keeper: Any = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    keeper.prev_version, keeper.prev_versions = version, (version,)
    keeper.__exit__(None, None, None)


def set_lazy_bits(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Mark the tensor in place as conjugate or negative, as ``like`` is."""
    torch._C._set_conj(tensor, like.is_conj())
    torch._C._set_neg(tensor, like.is_neg())


def with_lazy_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of it that is conjugate or negative as ``like`` is."""
    if tensor.is_conj() != like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() != like.is_neg() else tensor


base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Return the tensor of which autograd tracks this one as a view, or None."""


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values; the public ones refuse a tensor that is not coalesced."""
    return tensor._indices(), tensor._values()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether the tensor has hooks, which see its gradient."""
    return bool(tensor._backward_hooks)


def _saved_tensors_hooks_cannot_be_disabled() -> bool:
    # torch 2.6 can't be asked, but it refuses to switch hooks off where there are some:
    # https://github.com/pytorch/pytorch/blob/v2.6.0/aten/src/ATen/SavedTensorHooks.cpp
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    try:
        autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
    return False


_top_hooks = private("_C._autograd._top_saved_tensors_default_hooks", None)
# True: those that tracing sees too.
has_saved_tensors_hooks: Callable[[], object] = (
    functools.partial(_top_hooks, True) if _top_hooks else _saved_tensors_hooks_cannot_be_disabled
)
"""Return something true where ``saved_tensors_hooks`` are on, which see what autograd saves."""


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor run Python code of its class (fake, DTensor, jagged)."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors a traceable wrapper subclass holds, each with the attribute's name."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    # DTensor's names its device mesh too since torch 2.13, others attributes that are None.
    names, _ = tensor.__tensor_flatten__()
    held = ((name, getattr(tensor, name, None)) for name in names)
    return [(name, value) for name, value in held if isinstance(value, torch.Tensor)]


def untyped_storage_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage inside; the public ``untyped()`` warns."""
    return storage._untyped_storage


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for every alias of a storage, as long as it lives."""
    return int(storage._cdata)


# ---- who sees a call: subclasses, modes, transforms ----


TorchDispatchMode = _python_dispatch.TorchDispatchMode


class SeesEveryOperator(TorchDispatchMode):
    """A mode that higher-order operators accept too; up to 2.8 each asks for a rule for it."""

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            for each in private("_ops._higher_order_ops", {}).values():
                if type(self) not in each.python_key_table:
                    each.py_impl(type(self))(functools.partial(_hand_to_mode, each))
        return super().__enter__()  # type: ignore[no-untyped-call]


def _hand_to_mode(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


_Scope = Callable[[], contextlib.AbstractContextManager[None]]

without_torch_function: _Scope = torch._C.DisableTorchFunction
"""A scope in which neither subclasses nor modes see a call; there is no public spelling."""

without_torch_dispatch: _Scope = private("_C._DisableTorchDispatch", contextlib.nullcontext)


def without_dispatch_modes(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Run operators on a tensor unseen by dispatch modes, unless its own class needs them."""
    return contextlib.nullcontext() if has_own_dispatch(tensor) else without_torch_dispatch()


# The context managers behind torch.no_grad and torch.inference_mode, written in C: those
# written in Python can be interrupted on the way out, and the thread's mode stays changed.
_set_grad_enabled: Callable[[bool], Any] = private("_C._set_grad_enabled", torch.set_grad_enabled)
_inference_mode: Callable[[bool], Any] = private("_C._InferenceMode", torch.inference_mode)


def call_unrecorded(tensor: torch.Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` so that it may write to ``tensor`` and autograd records nothing."""
    if tensor.is_inference():
        with _inference_mode(True):  # an inference tensor takes writes in no other
            return function(*args)
    return call_with_grad(False, function, *args)


def call_with_grad(mode: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` under ``torch.set_grad_enabled(mode)``."""
    before = torch.is_grad_enabled()
    try:
        _set_grad_enabled(mode)
        return function(*args)
    finally:
        _set_grad_enabled(before)


def overriding(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those values whose ``__torch_function__`` torch would call."""
    # A class that does not want to be asked sets the disabled one; nn.Parameter does:
    # https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor
    return tuple(
        value
        for value in values
        if type(value) is not torch.Tensor
        and getattr(type(value), "__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
    )


innermost_transform: Callable[[], Any] = private(
    "_C._functorch.peek_interpreter_stack", lambda: None
)
"""Returns the transform of ``torch.func`` this runs inside of, None outside of any."""


def inside_transform() -> bool:
    """Whether this runs inside a transform such as ``torch.func.vmap``."""
    return innermost_transform() is not None


autocast_is_on: Callable[[], bool] = private(
    "_C._is_any_autocast_enabled", torch.is_autocast_enabled
)
"""Whether autocast is on for any device; the public function is asked for one at a time."""


def is_recorded() -> bool:
    """Whether ``make_fx`` or ``torch.export`` writes down what is called here."""
    recorder = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = getattr(recorder, "get_proxy_mode", None)
    return mode is not None and mode() is not None


def shown_for(name: str) -> Any:
    """Return what a subclass is shown for a method: for ``__iadd__`` that is ``add_``."""
    method = original_of(getattr(torch.Tensor, name))
    if not name.startswith("__") or name.endswith("item__"):
        return method
    seen: list[Any] = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *_: Any) -> Any:
            seen.append(func)
            return NotImplemented

    with contextlib.suppress(TypeError):
        method(torch.ones(1, device="cpu").as_subclass(Asked), 1)
    return original_of(seen[0]) if seen else method


def show_overriding(
    shown: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_operator: bool
) -> Callable[..., Any]:
    """Return what calls ``__torch_function__`` as torch does."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat += value if isinstance(value, (tuple, list)) else (value,)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return handle_torch_function(shown, overriding(tuple(flat)), *args, **kwargs)
        except TypeError:
            if is_operator:  # the other operand may know what to do
                return NotImplemented
            raise

    return call


def values_can_be_read(value: torch.Tensor) -> bool:
    """Whether a plain strided tensor has values, and looking at them is recorded nowhere."""
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and not is_wrapped(value)
        and torch._C._get_tracing_state() is None
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)

is_wrapped: Callable[[torch.Tensor], bool] = private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda _: inside_transform()
)
"""Whether a tensor stands for another one inside a transform of ``torch.func``."""


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that others of ``torch.func`` are wrapped around; itself outside of any."""
    while can_unwrap and is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


_get_unwrapped: Any = private("_C._functorch.get_unwrapped", None)
can_unwrap = _get_unwrapped is not None
"""Whether :func:`unwrapped` can look inside of a transform on this torch."""


def computing_unseen(values: tuple[Any, ...] = ()) -> contextlib.AbstractContextManager[object]:
    """Look at these values, and compute, so that no mode and no subclass among them sees it."""
    # Most calls are made where there is none, and the scopes cost more than what is computed.
    modes = torch._C._len_torch_function_stack() or _count_dispatch_modes()
    return _unseen() if modes or has_torch_function(values) else _SEEN_BY_NONE


_SEEN_BY_NONE = contextlib.nullcontext()
_count_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with without_torch_function(), without_torch_dispatch():
        yield


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread, and this is part of it."""
    return _node_of_backward() is not None


_node_of_backward: Callable[[], Any] = private("_C._current_autograd_node", lambda: None)


# ---- many tensors ----


def versions_of(tensors: list[Any]) -> list[int | None]:
    """Return ``tensor._version`` of each; None for an inference tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # there is an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


def layouts_of(tensors: list[Any]) -> Callable[[], bool]:
    """Return what tells whether tensors have the dtypes, devices, sizes and strides of now.

    And, where grad mode is on, the ``requires_grad``.
    """
    if _sees_layouts():
        guards = _guards_of(tensors)
        return lambda: bool(guards.check(*tensors))
    read = functools.partial(_read_layouts, tensors)
    before = read()
    return lambda: read() == before


def _read_layouts(tensors: list[Any]) -> list[Any]:
    grad = torch.is_grad_enabled()
    return [(t.dtype, t.device, t.shape, t.stride(), grad and t.requires_grad) for t in tensors]


_TensorGuards: Any = private("_C._dynamo.guards.TensorGuards", None)


def _guards_of(tensors: list[Any]) -> Any:
    """Return Dynamo's comparison of tensors, in C++: it takes a fifth of the time of a loop."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/dynamo/guards.cpp
    sizes, strides = [list(each.shape) for each in tensors], [list(t.stride()) for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


@functools.cache
def _sees_layouts() -> bool:
    """Whether Dynamo's comparison sees another dtype, size, stride or ``requires_grad``."""
    with contextlib.suppress(Exception), without_torch_function(), without_torch_dispatch():
        for change in (torch.Tensor.t, torch.Tensor.double, lambda tensor: tensor[:1], None):
            tensor = torch.zeros(2, 2, device="cpu", dtype=torch.float32)
            guards = _guards_of([tensor])
            unchanged = guards.check(tensor)
            if change is None:
                tensor.requires_grad_()
            else:
                tensor.data = change(tensor.data)
            if not unchanged or call_with_grad(True, guards.check, tensor):
                return False
        return True
    return False


LISTED = frozenset(
    (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
        torch.int64,
    )
)  # fmt: skip
"""The dtypes of which CUDA copies a list at once; of others (float8, uint16) it refuses one.

https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/ForeachBinaryOpList.cu
"""


def call_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` so that no mode sees it and autograd records nothing."""
    with without_torch_function(), without_torch_dispatch():
        return call_with_grad(False, function, *args)


# autograd's kernel asks each tensor whether to record, which makes the copy half as slow again.
below_autograd: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "_C._AutoDispatchBelowAutograd", torch.no_grad
)


_cat = original_of(torch.cat)  # install("out") replaces it


def concatenated(lists: list[list[Any]], memory: list[Any] | None = None) -> list[torch.Tensor]:
    """Concatenate each list by one call, unseen by modes and autograd; into ``memory`` if any."""
    with without_torch_function(), without_torch_dispatch(), below_autograd():
        if memory is None:
            return list(map(_cat, lists))
        for tensors, out in zip(lists, memory, strict=True):
            if tensors[0].device == out.device:
                _cat(tensors, out=out)
            else:  # to the host, whose caller waits
                copies = list(out.split(list(map(torch.Tensor.numel, tensors))))
                torch._foreach_copy_(copies, tensors, non_blocking=True)
        return memory


def write_back(lists: list[list[Any]], copies: list[Any]) -> None:
    """Write what :func:`concatenated` returned into the tensors."""
    with without_torch_function(), without_torch_dispatch(), below_autograd():
        for tensors, copied in zip(lists, copies, strict=True):
            sources = list(copied.split(list(map(torch.Tensor.numel, tensors))))
            torch._foreach_copy_(tensors, sources, non_blocking=not tensors[0].is_cpu)


class _NotTheSame(Exception):  # noqa: N818  an answer
    """Two tensors were compared, so they are two."""


class _RefuseToCompare(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise _NotTheSame


_refuse_to_compare = _RefuseToCompare()
_probe = torch.empty(0)
_with_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "_C._EnableTorchFunction", contextlib.nullcontext
)


def same_tensors(now: Any, before: Any) -> bool:
    """Whether two lists, of tensors or of lists or dicts of tensors, hold the very same tensors."""
    # == of lists and dicts looks at identity first, in C, at a fiftieth of what a loop takes, and
    # calls Tensor.__eq__ for those that differ; a mode keeps torch from comparing elements.
    with _with_torch_function():
        try:
            torch._C._push_on_torch_function_stack(_refuse_to_compare)
            if has_torch_function_unary(_probe):
                return bool(now == before)
        except _NotTheSame:
            return False
        finally:
            torch._C._pop_torch_function_stack()
    return same_one_by_one(now, before)  # inside of torch._C.DisableTorchFunction


def same_one_by_one(now: Any, before: Any) -> bool:
    """Whether two lists, of any objects or of lists or dicts of them, hold the very same ones."""
    return len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects, or two lists or dicts of objects, are the same."""
    if one is other:  # first: a dict may contain itself
        return True
    if isinstance(one, dict):
        return same_one_by_one(list(one.values()), list(other.values()))
    return isinstance(one, list) and same_one_by_one(one, other)


# ---- modules ----


MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The dicts in which a module holds hooks; ids of hooks are their keys."""


def members_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the dicts in which a module holds its parameters, its buffers and its children."""
    return module._parameters, module._buffers, module._modules


def not_saved(module: torch.nn.Module) -> set[str]:
    """Return the set of names of those buffers that are not in a module's state dict."""
    return module._non_persistent_buffers_set


def hooks_registered() -> int:
    """Return how many hooks torch has registered in this process: ids of hooks count up."""
    return int(RemovableHandle.next_id)


def remove_hooks_since(registered: int, tensor: torch.Tensor) -> None:
    """Take away the hooks of a tensor that came since :func:`hooks_registered` said a number."""
    kinds: list[Any] = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
    for hooks in kinds:
        for number in [each for each in hooks or () if each >= registered]:
            del hooks[number]


def tensors_loaded_by_copies(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]] | None:
    """Return what ``module.load_state_dict(state)`` copies to, by name, if it does nothing else.

    None where a submodule has a hook, a loader or extra state of its own, or where torch is
    told to swap tensors (``torch.__future__.set_swap_module_params_on_conversion``).
    """
    found: list[tuple[str, torch.Tensor]] = []
    waiting = [("", module)]
    while waiting:
        prefix, each = waiting.pop()
        if (
            not _has_torchs_loader(type(each))  # type: ignore[arg-type]  # a class can be hashed
            # https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
            or each._load_state_dict_pre_hooks
            or each._load_state_dict_post_hooks
        ):
            return None
        # Names of buffers; a parameter may have one of them, and is loaded all the same.
        unsaved = each._non_persistent_buffers_set
        buffers = [item for item in each._buffers.items() if item[0] not in unsaved]
        held = [*each._parameters.items(), *buffers]
        found += [(prefix + name, tensor) for name, tensor in held if tensor is not None]
        children = each._modules.items()
        waiting += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return None if torch.__future__.get_swap_module_params_on_conversion() else found


def without_assign_marks(state: Mapping[str, Any], *, assign: bool) -> Mapping[str, Any]:
    """Return a state that says nothing of ``assign=``, and into which torch may write it.

    ``load_state_dict(assign=True)`` leaves "assign_to_params_buffers" in the ``_metadata`` of the
    caller's state, and torch reads it in each later load of that state, of a copy or a file of it.
    https://github.com/pytorch/pytorch/issues/188166
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return state
    if not assign and not any(_ASSIGN_MARK in entry for entry in metadata.values()):
        return state
    copied = OrderedDict(state)  # as torch does
    copied._metadata = {  # type: ignore[attr-defined]
        name: {key: value for key, value in entry.items() if key != _ASSIGN_MARK}
        for name, entry in metadata.items()
    }
    return copied


_ASSIGN_MARK = "assign_to_params_buffers"


@functools.lru_cache(maxsize=4096)
def _has_torchs_loader(kind: type[torch.nn.Module]) -> bool:
    """Whether ``load_state_dict`` of a class runs nothing but PyTorch's code."""
    # By the class that defines it, not by the function, which may be a guard's: the answer is
    # cached. BatchNorm has a loader too, which adds a key that older checkpoints lack.
    return (
        _definer(kind, "_load_from_state_dict").__module__.startswith("torch.nn.")
        and _definer(kind, "load_state_dict") is torch.nn.Module
        and _definer(kind, "set_extra_state") is torch.nn.Module
    )


def _definer(kind: type, name: str) -> type:
    """Return the class that defines a method."""
    return next(each for each in kind.__mro__ if name in vars(each))


# ---- optimizers and GradScaler ----


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` calls the hooks of :func:`register_optimizer_step_pre_hook`."""
    # Optimizer.__init__ puts them around the step of the class, and marks it `hooked`.
    step: Any = type(optimizer).step
    code = getattr(step, "__code__", None)
    return getattr(step, "hooked", False) or (code is not None and code is _around_step)


# The code of what stands around every step: one object for all classes.
_around_step = getattr(
    private("optim.Optimizer.profile_hook_step", lambda f: f)(lambda *_: None), "__code__", None
)


def steps_read_global_hooks() -> bool:
    """Whether what stands around every step reads the tables of global hooks, by its names."""
    names = {f"_global_optimizer_{when}_hooks" for when in ("pre", "post")}
    return _around_step is not None and names <= set(_around_step.co_names)


def steps_on_stack(optimizer: torch.optim.Optimizer) -> int:
    """Return how many calls of ``step()`` go on; ``super().step()`` inside of one is another."""
    count = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _around_step and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


def call_while_tracing(function: Callable[..., int]) -> None:
    """Let Dynamo call a function while it traces a call of it; its result is a constant then.

    As ``torch.compiler.assume_constant_result`` does, which imports Dynamo first.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def can_make_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`make_state` knows how this optimizer makes its state."""
    return hasattr(type(optimizer), "_init_group")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of all parameters that have a gradient, as ``step()`` does."""
    make: Any = getattr(type(optimizer), "_init_group")  # noqa: B009
    names = _names_of_arguments(make)
    for group in optimizer.param_groups:
        # Lists that it fills, but for AdamW's on 2.6, which takes the option amsgrad as well. SGD
        # names the list that it fills "params", as the group names its parameters.
        # https://github.com/pytorch/pytorch/blob/v2.6.0/torch/optim/adamw.py#L132
        make(optimizer, group, *([] if n == "params" else group.get(n, []) for n in names))


@functools.cache
def _names_of_arguments(make: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(make).parameters)[2:]  # after self and group


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer steps over the parameter as soon as its gradient is there."""
    return hasattr(parameter, "_in_backward_optimizers")


def has_communication_hook(model: torch.nn.Module) -> bool:
    """Whether a hook of a DistributedDataParallel sends its gradients."""
    return bool(getattr(model, "_comm_hooks", ()))


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook changes the state that ``load_state_dict`` is given."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def scale_version(scaler: Any) -> int:
    """Return a number that ``update()`` of a GradScaler moves on."""
    scale = getattr(scaler, "_scale", None)  # None before it has a scale, whose number is 0
    return (version_of(scale) or 0) if isinstance(scale, torch.Tensor) else 0


def has_scaled(scaler: Any) -> bool:
    """Whether a GradScaler has ever scaled a loss: it makes its scale then."""
    return getattr(scaler, "_scale", scaler) is not None


def per_optimizer_states(scaler: Any) -> dict[int, dict[str, Any]] | None:
    """Return what a GradScaler notes of each optimizer between two calls of ``update()``."""
    # https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py
    found = getattr(scaler, "_per_optimizer_states", None)
    return found if isinstance(found, dict) else None


# ---- checkpointing and loaders ----


def close_checkpoints(exception: BaseException | None) -> None:
    """Leave the scopes that ``checkpoint`` has opened and, up to torch 2.11, not closed."""
    # They belong to a generator that is suspended while the checkpointed function runs. Its hooks
    # on saved tensors would stay until the exception goes, and reach a retry.
    # https://github.com/pytorch/pytorch/blob/v2.9.0/torch/utils/checkpoint.py#L490
    module: Any = sys.modules.get("torch.utils.checkpoint")
    code = None if module is None else getattr(inspect.unwrap(module.checkpoint), "__code__", None)
    while code is not None and exception is not None:
        frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
        for frame in reversed(frames):  # the innermost was opened last
            if frame.f_code is code and inspect.isgenerator(frame.f_locals.get("gen")):
                frame.f_locals["gen"].close()
        exception = exception.__context__


def batches_yielded(iterator: Any) -> Callable[[], int] | None:
    """Return what tells how many batches an iterator of a DataLoader has given to its loop.

    None if it is not such an iterator. It answers after the iterator is gone, too: a loop that
    ends drops it.
    https://github.com/pytorch/pytorch/blob/main/torch/utils/data/dataloader.py
    """
    attributes: dict[str, Any] = getattr(iterator, "__dict__", {})
    if "_num_yielded" not in attributes:
        return None
    return lambda: int(attributes["_num_yielded"])


def items_of_loader(iterator: Any) -> int | None:
    """Return how long the dataset of an iterator of a DataLoader is; None if it does not say."""
    dataset = getattr(iterator, "__dict__", {}).get("_dataset")
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
