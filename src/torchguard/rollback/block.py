"""rollback_on_error(): a block of code that fails leaves tensors as they were."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from torchguard._public import public
from torchguard._torch import version_of, without_torch_function
from torchguard.rollback.consistency import require_container, tensors_in
from torchguard.rollback.interrupts import finish
from torchguard.rollback.snapshot import Snapshot, capture


class _Leave(partial[None]):
    """What a ``with`` statement calls at its end, and drops.

    An interrupt can come between that call and the first line of the function called. The
    statement then drops this object and with it a suspended generator, which takes that without
    running signal handlers. (The traceback of the interrupt keeps whatever the function sees, so
    the function must not see this object.)
    """

    undo_if_dropped: Generator[None, None, None]


class UndoOnExit:
    """The ``__exit__`` of a block that can be undone.

    The block has ``saved``, one item for each block that is open, and the methods ``leave`` and
    ``undo_if_dropped``.
    """

    def __get__(self, block: Any, owner: object) -> Callable[..., None]:
        if block is None:
            return _leave  # contextlib.ExitStack asks the class
        undo_if_dropped = block.undo_if_dropped(len(block.saved))
        next(undo_if_dropped)
        leave = _Leave(block.leave, weakref.ref(undo_if_dropped))
        leave.undo_if_dropped = undo_if_dropped
        return leave


def _leave(block: Rollback, *raised: Any) -> None:
    block.leave(lambda: None, *raised)


_Gradients = list[tuple[torch.Tensor, torch.Tensor | None]]


class Rollback:
    """The context manager that :func:`rollback_on_error` returns."""

    def __init__(self, objects: tuple[Any, ...], *, data: bool) -> None:
        self._objects = objects
        self._data = data
        self.saved: list[tuple[list[Snapshot], _Gradients]] = []

    def __enter__(self) -> None:
        with without_torch_function():
            tensors, gradients = self._tensors()
        snapshots = [capture(t, self._data, autograd=True) for t in tensors]
        self.saved.append((snapshots, gradients))

    __exit__ = UndoOnExit()

    def leave(
        self,
        undo_if_dropped: Callable[[], Generator[None, None, None] | None],
        exception_type: type[BaseException] | None,
        *_: object,
    ) -> None:
        """End the block; undo it if it has raised."""
        if exception_type is not None:
            finish(self._undo, {})
        self.saved.pop()
        not_needed = undo_if_dropped()
        if not_needed is not None:
            next(not_needed, None)

    def undo_if_dropped(self, depth: int) -> Generator[None, None, None]:
        """Undo the block if this is dropped before :meth:`leave` has gone through."""
        try:
            yield
        except GeneratorExit:
            if len(self.saved) > depth:
                finish(self._undo, {})
                self.saved.pop()

    def _undo(self, versions: dict[int, int | None]) -> None:
        """Restore each tensor; ``versions`` keeps what was read if this is called again."""
        for saved in self.saved[-1][0]:
            # Without a copy of the elements the counter stays where the block's writes moved it.
            if not self._data and id(saved.tensor) not in versions:
                with without_torch_function():
                    versions[id(saved.tensor)] = version_of(saved.tensor)
            saved.restore(versions.get(id(saved.tensor)))
        with without_torch_function():
            self._restore_gradients()

    # The two loops below are methods: in a `with` statement of CPython 3.12 and 3.13, an interrupt
    # after the `if` of a loop skips the statement's exit, and no subclass or mode would see a call
    # of torch any more. https://github.com/python/cpython/issues/130279

    def _tensors(self) -> tuple[list[torch.Tensor], _Gradients]:
        found = [each for obj in self._objects for _, each in tensors_in(obj, "", {})]
        tensors = list({id(each): each for each in found}.values())
        return tensors, [(each, each.grad) for each in tensors if each.is_leaf]

    def _restore_gradients(self) -> None:
        for tensor, gradient in self.saved[-1][1]:
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient


@public
def rollback_on_error(
    *objects: object, data: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Give tensors their old metadata back if the block raises.

    Equals plain code on success. When the block raises, whatever it raises, each
    tensor listed has its shape, stride, storage offset, storage, ``requires_grad``
    and ``.grad`` back, and the exception goes on. With ``data=True`` its
    elements and its version counter too: they are copied on entry, which costs
    the tensors' memory once more for as long as the block runs.

    Takes what :func:`check_consistent` takes: of a module these are the parameters, buffers and
    gradients, of an optimizer the parameters and what its state holds. For a training step use
    :func:`transaction`, which restores what is no tensor too and copies less.

    Without ``data=True`` the version counter goes on counting the writes that
    succeeded inside the block. A graph recorded inside a block that failed must
    not be used afterwards.

    Args:
        *objects: tensors of any kind and shape, modules, optimizers, and dicts, lists, tuples or
            data classes of these.
        data: copy the elements on entry and put them back on failure.

    Raises:
        TypeError: there are no ``objects``, or one is none of these.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Example:
        >>> import torch, torchguard
        >>> table = torch.zeros(3)
        >>> try:
        ...     with torchguard.rollback_on_error(table, data=True):
        ...         table += 1
        ...         table[7] = 0
        ... except IndexError:
        ...     print(table)
        tensor([0., 0., 0.])
    """
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    if not objects:
        raise TypeError(
            "rollback_on_error: there is nothing to put back, expected what the block changes: "
            "`with torchguard.rollback_on_error(tensor, module):`"
        )
    for position, each in enumerate(objects):
        if not isinstance(each, torch.Tensor):
            require_container(each, f"rollback_on_error: objects[{position}]")
    return Rollback(objects, data=data)
