"""What is put on torch.optim for transactions and ``install("optimizer")``: hooks and patches."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchguard._torch import has_own_dispatch, is_recorded, patch
from torchguard._torch.fused import known_contiguous
from torchguard._torch.optimizers import (
    call_unseen,
    call_while_tracing,
    copy_all,
    fused_sgd_skips_half,
    unwrap_steps,
    wrap_step,
)
from torchguard.state.interrupts import DeferredSignals
from torchguard.transactions.copies import forget_states, state_tensors
from torchguard.transactions.optimizer_step import OptimizerStep, add_note, steps_in_one_call

if TYPE_CHECKING:
    from torchguard.transactions.step import Transaction

# --- transactions ----------------------------------------------------------------------------

opened: list[Transaction] = []
_alive: list[weakref.ref[Transaction]] = []
_watching: list[Any] = []


def watch(step: Transaction) -> None:
    """Let optimizers call a transaction, and fused CPU steps be right, as long as it lives."""
    with patch.lock:  # other threads make transactions too, or collect their last one
        _alive.append(weakref.ref(step, _forget))
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_step))
            _watching.append(register_optimizer_step_post_hook(_after_step))
            patch.apply(fused_replacements().items())


def _forget(_: object) -> None:
    # Python drops what a finalizer raises and does not call it again, so an interrupt in the middle
    # would leave hooks or patches for good. One before it leaves a dead reference, for the next.
    signals = DeferredSignals()
    try:
        with patch.lock:
            _alive[:] = [each for each in _alive if each() is not None]
            if not _alive and _watching:
                while _watching:
                    _watching.pop().remove()
                patch.undo(fused_replacements(), leave_conflicts=True)
                forget_states()
    finally:
        signals.restore_handlers()


_compiled = False


def step_is_compiled() -> bool:
    """Whether a compiled function has an optimizer's step in it."""
    return _compiled


def _note_compiled() -> int:
    """Note that Dynamo traces a step: it will run without the hooks.

    Called while tracing, so before the step: what it writes is copied now, and from the next block
    on when the block begins.
    """
    global _compiled
    _compiled = True
    for step in tuple(opened):
        for block in step.saved:
            block.snapshot.copy_parameters()
    return 0


call_while_tracing(_note_compiled)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling():
        _note_compiled()
        return None
    for step in tuple(opened):
        args, kwargs = step.before_step(optimizer, args, kwargs)
    return args, kwargs


# torch calls this where the step has gone through; it has no hook for a step that raises.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L500
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for step in tuple(opened):
        step.after_step(optimizer)


# --- install("optimizer") --------------------------------------------------------------------

MAX_BYTES = "TORCHGUARD_OPTIMIZER_COPY_BYTES"
"""Environment variable: the largest copy that is made of parameters and state for one step.

Without it a copy may take half of the memory that is free where the parameters are.
"""

_SCALER = "torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker"
_handles: list[Any] = []
_may_copy: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Whether there was room for copies when an optimizer stepped first."""


def replacements() -> Mapping[str, patch.Make]:
    """Return what ``install("optimizer")`` patches; optimizers are reached through their hooks."""
    return {_SCALER: _guard_lazy_init, **fused_replacements()}


def not_needed() -> str | None:
    """Return None: no release so far undoes a step, and to try one imports Dynamo."""
    return None


def changed() -> None:
    """Register the hook that every ``step()`` calls, or take it and its traces away."""
    if patch.patched(_SCALER):
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_guard_step))
    else:
        while _handles:
            _handles.pop().remove()
        unwrap_steps()
        _may_copy.clear()
        forget_states()


def _guard_lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def lazy_init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(scaler, *args, **kwargs)
        except BaseException:
            # The scale without the tracker: every later call would raise.
            scaler._scale = scaler._growth_tracker = None
            raise

    return lazy_init


def _guard_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        wrap_step(optimizer, _guarded)


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        if (
            torch.compiler.is_compiling()
            or is_recorded()
            or any(each is optimizer for transaction in opened for each in transaction.optimizers)
        ):
            return step(*args, **kwargs)
        prepared = _prepare(optimizer, with_closure=len(args) > 1 or bool(kwargs))
        if prepared is None:
            return step(*args, **kwargs)
        try:
            result = step(*args, **kwargs)
        except BaseException as error:
            if prepared.fail(error):
                add_note(error, "torchguard: this optimizer step was finished, so it counts")
            raise
        prepared.succeed()
        return result

    return guarded_step


def _prepare(optimizer: Optimizer, *, with_closure: bool) -> OptimizerStep | None:
    if steps_in_one_call(optimizer) and not with_closure:
        return OptimizerStep(optimizer, copies=False, in_one_call=True)
    if optimizer not in _may_copy:
        _may_copy[optimizer] = _there_is_room(optimizer)
    if not _may_copy[optimizer]:
        return None
    return OptimizerStep(optimizer, copies=True, in_one_call=False)


def _there_is_room(optimizer: Optimizer) -> bool:
    parameters: list[Tensor] = [
        each for group in optimizer.param_groups for each in group["params"]
    ]
    tensors = [*parameters, *state_tensors(optimizer)]
    # Before the first step the state is not there yet; Adam's is twice the parameters, that of
    # LBFGS once more for each vector that it remembers.
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    times = 3 + 2 * optimizer.param_groups[0]["history_size"] if is_lbfgs else 3
    needed = sum(each.nbytes for each in parameters) * times
    needed = max(sum(each.nbytes for each in tensors), needed)
    limit = os.environ.get(MAX_BYTES)
    room = int(limit) if limit else _free_bytes(parameters) // 2
    if needed <= room:
        return True
    warnings.warn(
        f"torchguard: {type(optimizer).__name__}.step() is not undone if it raises: a copy of its "
        f"parameters and state takes {needed >> 20} MiB, the limit is {room >> 20} MiB; set "
        f"{MAX_BYTES}, or use fused=True, which needs no copy",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _free_bytes(parameters: list[Tensor]) -> int:
    if parameters and parameters[0].is_cuda:
        return torch.cuda.mem_get_info(parameters[0].device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 1 << 62


# --- fused steps on the CPU ------------------------------------------------------------------
#
# A fused CPU kernel walks over as many elements as the parameter has, from the first address of
# parameter, gradient and state, and looks at no strides: it makes a contiguous gradient, and then
# reads the other one. A transposed gradient gives a wrong update, an expanded one (the gradient of
# a sum, from ``torch.autograd.grad``) is read beyond its memory. Kernels on a GPU refuse them.
# https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/FusedSGDKernel.cpp
# https://github.com/pytorch/pytorch/issues/106951

# What SGD.step() and its like call with fused=True. Only older releases have one for AdamW.
_FUSED_PATHS = (
    "torch.optim.adagrad._fused_adagrad",
    "torch.optim.adam._fused_adam",
    "torch.optim.adamw._fused_adamw",
    "torch.optim.sgd._fused_sgd",
)
_HALF = (torch.bfloat16, torch.float16)

_Lists = list[list[Any]]
"""Parameters, gradients and each kind of state, which may be empty or hold None."""

_Fitted = tuple[int, int, Tensor, Tensor]
"""Which of the lists, the place in it, the tensor there and the copy that the kernel is given."""


def fused_replacements() -> Mapping[str, patch.Make]:
    """Return what is patched so that fused steps on the CPU are right, by path."""
    return {path: _guard_kernel for path in _FUSED_PATHS if patch.exists(path)}


def _guard_kernel(original: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)
    # Step counters are one number each: their layout is not the parameter's.
    counters = names.index("state_steps") if "state_steps" in names else None
    is_sgd = "momentum_buffer_list" in names

    @functools.wraps(original)
    def call_with_fitting_tensors(*args: Any, **options: Any) -> None:
        lists = [each for place, each in enumerate(args) if place != counters]
        if not any(each.is_cpu for each in lists[0]):  # a GPU's kernel refuses what it can't read
            original(*args, **options)
            return
        has_half = is_sgd and any(each.dtype in _HALF and each.is_cpu for each in lists[0])
        in_float = has_half and fused_sgd_skips_half()
        # Asked at every fused step, unless what has prepared the step knows it.
        fits = any(each is lists[0] for each in known_contiguous) or all(
            map(Tensor.is_contiguous, [t for tensors in lists for t in tensors if t is not None])
        )
        if options.get("has_sparse_grad") or (fits and not in_float):
            original(*args, **options)
            return
        fitted = call_unseen(_fit, lists, in_float)
        try:
            original(*args, **options)
        finally:
            # Also if it has raised: whether a kernel has run is seen in what it has written.
            unscaled = options.get("grad_scale") is not None
            call_unseen(_give_back, lists, fitted, unscaled)
        if in_float:
            call_unseen(_keep_dtype, lists[0], lists[2])

    return call_with_fitting_tensors


def _fit(lists: _Lists, in_float: bool) -> list[_Fitted]:
    """Put copies that a fused CPU kernel reads and writes rightly in place of other tensors."""
    fitted = []
    for place, parameter in enumerate(lists[0]):
        if not parameter.is_cpu or has_own_dispatch(parameter):  # a fake tensor has no memory
            continue
        dtype = torch.float32 if in_float and parameter.dtype in _HALF else None
        # empty_like() keeps the strides of what lies without gaps or sharing; on a CPU it fills its
        # memory if torch.utils.deterministic says so.
        dense = _order(torch.empty_like(parameter, device="meta"))
        all_of_it = dtype is not None or dense != _order(parameter)
        for number, tensors in enumerate(lists):
            tensor = tensors[place] if place < len(tensors) else None
            if tensor is None or tensor.shape != parameter.shape:
                continue
            if all_of_it:
                copy = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
            elif _order(tensor) != _order(parameter):
                copy = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            else:
                continue
            fitted.append((number, place, tensor, copy))
    for number, place, _, copy in fitted:
        lists[number][place] = copy
    return fitted


def _give_back(lists: _Lists, fitted: list[_Fitted], unscaled: bool) -> None:
    """Copy back what the kernel has written, and put the tensors themselves back in the lists.

    With ``unscaled`` the kernel has divided the gradients by the scale.
    """
    targets, sources = [], []
    for number, place, tensor, copy in fitted:
        lists[number][place] = tensor
        if number != 1:  # no gradient
            targets.append(tensor)
            sources.append(copy)
        elif unscaled:
            # An expanded gradient can't be written: one of each of its repeated elements can.
            once = tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())
            targets.append(tensor[once])
            sources.append(copy[once])
    copy_all(targets, sources)


def _keep_dtype(parameters: list[Tensor], buffers: list[Any]) -> None:
    """Give momentum buffers that ``_fused_sgd`` has just made the dtype of their parameters.

    Without momentum there are none. SGD keeps what it finds in the list after the call.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    for place, (parameter, buffer) in enumerate(zip(parameters, buffers, strict=False)):
        if buffer is not None and buffer.dtype != parameter.dtype:
            buffers[place] = torch.empty_like(parameter).copy_(buffer)


def _order(tensor: Tensor) -> list[int]:
    """Return the strides that say where elements lie: those of dims that have more than one."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
