"""An ``out=`` operator that fails leaves its output unchanged.

PyTorch resizes the output first and computes afterwards, so on storage that can't grow, and
whenever the computation itself fails, ``out`` keeps a shape that is not its own
(https://github.com/pytorch/pytorch/issues/170298).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchguard._events import record
from torchguard._pytree import flatten, unflatten
from torchguard._torch import computing_unseen, original_of, patch, without_torch_function
from torchguard.errors import NonResizableStorageError
from torchguard.state.process import roll_back
from torchguard.state.tensors import Snapshot, capture, lacks_allocator

SWITCH = patch.Switch()
"""Whether the guard "out" is on."""


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``original``, a builtin with ``out=``, exception-safe if it is given one."""
    tensor_type, switch = torch.Tensor, SWITCH

    def guarded(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if not switch.on:
            return original(*args, out=out, **kwargs)
        # The common case has no loop.
        saved = [capture(out)] if type(out) is tensor_type else list(map(capture, tensors_in(out)))
        for each in saved:
            if each.storage is not None and lacks_allocator(each.storage) and not each.parts:
                _refuse_to_grow(original, args, kwargs, out)
                break
        try:
            return original(*args, out=out, **kwargs)
        except BaseException as error:
            try:
                roll_back(_undo, saved, error)
            except BaseException:  # a signal came during the call
                roll_back(_undo, saved, error)
                raise
            name = getattr(original, "__name__", "an operator")  # what other code put here has none
            record("rolled_back", "out", f"{name}(out=) failed")
            raise

    return guarded


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those of a list or tuple."""
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _undo(saved: list[Snapshot], error: BaseException) -> None:
    """Restore the outputs; of one that may be half written the version counter moves on."""
    # torch raises TypeError while it reads the arguments; one with a frame below ours is another.
    below = error.__traceback__ and error.__traceback__.tb_next
    ran = not isinstance(error, TypeError) or below is not None
    for each in reversed(saved):
        with without_torch_function():
            refused = torch.is_grad_enabled() and each.tensor.requires_grad
        empty = each.storage is not None and 0 in each.size
        wrote = ran and not empty and not refused
        each.restore(each.version_after_write() if wrote else None)


# ---- storage in shared memory ----


def cannot_grow(
    operation: str, size: torch.Size, storage: torch.UntypedStorage, needed: int
) -> NonResizableStorageError:
    """Make the error to raise where torch would kill the process."""
    return NonResizableStorageError(
        f"{operation}: the tensor of shape {tuple(size)} would need {needed} bytes, but its "
        f"storage lies in shared memory, holds {storage.nbytes()} bytes and can't grow (torch "
        "would kill the process); for a larger one write "
        "torch.empty(new_size, dtype=tensor.dtype).share_memory_()"
    )


def _refuse_to_grow(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Raise if the call would have to grow an output in shared memory."""
    outputs = list(tensors_in(out))
    with computing_unseen((*args, *kwargs.values(), *outputs)), torch.no_grad():
        sizes = _sizes_of_results(original_of(original), args, kwargs, out)
        for tensor, size in zip(outputs, sizes, strict=True):
            storage = tensor.untyped_storage()
            if size != tensor.shape and size.numel() and lacks_allocator(storage):
                needed = (int(tensor.storage_offset()) + size.numel()) * tensor.itemsize
                if needed > storage.nbytes():
                    raise cannot_grow("out=", tensor.shape, storage, needed)


def _sizes_of_results(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any
) -> list[torch.Size]:
    """Ask the meta device how large the outputs will be; what it can't say is computed once."""

    def sizes_after(device: str, args: Any, kwargs: Any) -> list[torch.Size]:
        outputs = [torch.empty(0, dtype=each.dtype, device=device) for each in tensors_in(out)]
        given: Any = outputs if isinstance(out, (list, tuple)) else outputs[0]
        try:
            function(*args, out=tuple(given) if isinstance(out, tuple) else given, **kwargs)
        except Exception:  # the call itself will raise it, with outputs of these sizes
            if device == "meta":
                raise
        return [each.shape for each in outputs]

    meta: dict[str, Any] = _on_meta(kwargs)
    if "device" in meta:
        meta["device"] = "meta"
    meta.pop("generator", None)
    try:
        return sizes_after("meta", _on_meta(args), meta)
    except Exception:  # noqa: BLE001  sizes that depend on values, or a call that will raise
        return sizes_after("cpu", args, kwargs)


def _on_meta(tree: Any) -> Any:
    """Return the arguments of a call with tensors that have no elements in place of its own."""
    leaves, _ = flatten(tree)
    empty = [
        torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return unflatten(empty, tree)
