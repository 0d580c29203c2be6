"""rollback_on_error(): the tensors of a block that fails are restored."""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any, NoReturn

import torch

from torchguard._events import record
from torchguard._public import called, public
from torchguard._torch import version_of, without_torch_function
from torchguard.state.process import roll_back, wait_for
from torchguard.state.tensors import (
    Gradients,
    Snapshot,
    capture,
    refuse_sparse,
    warn_if_refused,
)
from torchguard.state.walk import require_container, tensors_in

_NO_DECORATOR = (
    "rollback_on_error: is not a decorator; write `with torchguard.rollback_on_error(tensor):` "
    "inside of the function"
)


class Rollback:
    """The context manager that :func:`rollback_on_error` returns."""

    def __init__(self, objects: tuple[Any, ...], *, data: bool) -> None:
        self._objects = objects
        self._data = data
        self._saved: list[tuple[list[Snapshot], Gradients]] = []
        """One item for each block that is open."""

    def __enter__(self) -> None:
        with without_torch_function():
            found = [each for obj in self._objects for _, each in tensors_in(obj, "", {})]
            tensors = list({id(each): each for each in found}.values())
            gradients = Gradients(tensors)
        snapshots = [capture(each, self._data, autograd=True) for each in tensors]
        self._saved.append((snapshots, gradients))

    def __call__(self, *_: object) -> NoReturn:
        """Say that it is not a decorator."""
        raise TypeError(_NO_DECORATOR)

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is not None:
            roll_back(self._restore, *self._saved[-1])
            text = f"a block was rolled back after {exception_type.__name__}"
            record("rolled_back", "rollback_on_error", text)
        self._saved.pop()

    def _restore(self, snapshots: list[Snapshot], gradients: Gradients) -> None:
        if self._data:
            with without_torch_function():
                tensors = [each.tensor for each in snapshots]
                warn_if_refused(wait_for, tensors, failure="rollback_on_error")
        for saved in snapshots:
            with without_torch_function():
                # Without a copy of the elements the counter stays where the writes moved it.
                version = None if self._data else version_of(saved.tensor)
            saved.restore(version)
        with without_torch_function():
            gradients.restore()


@called("tensor")
@public
def rollback_on_error(
    *objects: object, data: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Restore the metadata of tensors if the block raises.

    Equals the block without it on success. If the block raises, the shape, stride, storage offset,
    storage, ``requires_grad`` and ``.grad`` of each tensor are restored, and the exception
    continues. With ``data=True`` its elements and its version counter are restored too.

    Of a module these are the parameters, buffers and gradients, of an optimizer the parameters and
    what its state holds. Without ``data=True`` the version counter keeps counting the writes inside
    the block. A graph recorded inside a block that failed must not be used afterwards. For a
    training step use :func:`transaction`, which restores more than tensors and copies less.

    Args:
        *objects: tensors of any shape, not sparse, modules, optimizers, and dicts, lists, tuples or
            data classes of these.
        data: copy the elements on entry and restore them on failure.

    Raises:
        TypeError: there are no ``objects``, one is none of these, or one holds a sparse tensor.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Cost:
        Microseconds for each tensor, and with ``data=True`` a copy of the elements.

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
            "rollback_on_error: there is nothing to restore, expected what the block changes: "
            "`with torchguard.rollback_on_error(tensor, module):`"
        )
    if isinstance(objects[0], FunctionType):
        raise TypeError(_NO_DECORATOR)
    for position, each in enumerate(objects):
        if not isinstance(each, torch.Tensor):
            require_container(each, f"rollback_on_error: objects[{position}]")
        with without_torch_function():
            named = tensors_in(each, f"objects[{position}]", {})
            # Gradients of nn.Embedding(sparse=True) are sparse, and are what the block makes anew.
            own = ((name, tensor) for name, tensor in named if not name.endswith(".grad"))
            refuse_sparse("rollback_on_error", own)
    return Rollback(objects, data=data)
