"""One call that writes to tensors: what to remember before it, what to undo if it fails."""

from __future__ import annotations

from typing import Any

import torch

from torchguard.internals import without_torch_function
from torchguard.rollback import Saved, roll_back, save
from torchguard.shared_memory import cannot_grow, is_shared, stand_in_for
from torchguard.writes import Writes, out_tensors, written_tensors

__all__ = ["Attempt"]


class Attempt:
    """What one call writes to.

    Use: call torch with ``attempt.out`` in place of ``out``; on success return
    ``attempt.finish(result)``, on an exception call ``attempt.undo(error)``.
    """

    __slots__ = ("_stand_ins", "_written", "out")

    def __init__(
        self,
        writes: Writes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        *,
        data: bool,
    ) -> None:
        self.out = out
        self._stand_ins: list[tuple[torch.Tensor, Saved]] = []
        # Each with whether the call, failing, can have overwritten elements.
        self._written: list[tuple[Saved, bool]] = []
        if writes is not None:
            for tensor, in_list in written_tensors(writes, args, kwargs):
                elements = writes.elements and not _is_guarded_leaf(tensor)
                # A list is written element by element (_foreach_add_): no shape
                # changes, and reading all of an optimizer's would be slow.
                saved = Saved(tensor, None, None) if in_list else None
                if saved is None or data:
                    saved = save(tensor, data=data)
                self._written.append((saved, elements))
        if out is not None:
            self._begin_out(args, kwargs, data=data)

    def _begin_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, data: bool) -> None:
        stand_ins: dict[int, torch.Tensor] = {}
        for tensor in out_tensors(self.out):
            saved = save(tensor, data=data)
            holds_elements = saved.metadata is None or 0 not in saved.metadata.size
            self._written.append((saved, holds_elements and not _refuses_out(tensor)))
            metadata = saved.metadata
            if (
                metadata is not None
                and is_shared(metadata.storage)
                and not _shares_storage(metadata.storage, (*args, *kwargs.values()))
            ):
                stand_ins[id(tensor)] = stand_in_for(tensor, metadata)
                self._stand_ins.append((stand_ins[id(tensor)], saved))
        if stand_ins:
            if isinstance(self.out, torch.Tensor):
                self.out = stand_ins[id(self.out)]
            else:
                self.out = type(self.out)(stand_ins.get(id(item), item) for item in self.out)

    def finish(self, result: Any) -> Any:
        """Turn the result of a call with stand-ins into that of a call without."""
        if not self._stand_ins:
            return result
        for stand_in, (tensor, metadata, _) in self._stand_ins:
            assert metadata is not None
            with without_torch_function(), torch.no_grad():
                if stand_in.shape != metadata.size or stand_in.stride() != metadata.stride:
                    offset = stand_in.storage_offset()
                    tensor.set_(metadata.storage, offset, stand_in.shape, stand_in.stride())
            torch.autograd.graph.increment_version(tensor)
        real = {id(stand_in): saved.tensor for stand_in, saved in self._stand_ins}
        if isinstance(result, torch.Tensor):
            return real.get(id(result), result)
        if isinstance(result, (tuple, list)):
            return type(result)(real.get(id(item), item) for item in result)
        return result

    def undo(self, error: BaseException) -> None:
        """Put everything back; what may be half-written and has no copy gets a new version."""
        # torch raises TypeError while it reads the arguments, before it does anything.
        nothing_ran = isinstance(error, TypeError)
        for saved, elements in reversed(self._written):
            wrote = elements and not nothing_ran
            if saved.metadata is not None or saved.data is not None:
                roll_back(saved, wrote=wrote)
            elif wrote:
                torch.autograd.graph.increment_version(saved.tensor)
        for stand_in, (tensor, metadata, _) in self._stand_ins:
            assert metadata is not None
            if stand_in.shape != metadata.size and stand_in.numel() > tensor.numel():
                raise cannot_grow("out=", metadata.size, metadata.storage) from error


def _is_guarded_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd refuses any in-place operation on it before it starts."""
    with without_torch_function():
        return torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf


def _refuses_out(tensor: torch.Tensor) -> bool:
    with without_torch_function():
        return torch.is_grad_enabled() and tensor.requires_grad


def _shares_storage(storage: torch.UntypedStorage, values: tuple[Any, ...]) -> bool:
    """Whether an input lies in the same storage; torch then has to see that it does."""
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                with without_torch_function():
                    if value.untyped_storage() is storage:
                        return True
            except RuntimeError:  # NotImplementedError included: a layout without storage
                continue
        elif isinstance(value, (list, tuple)) and _shares_storage(storage, tuple(value)):
            return True
    return False
