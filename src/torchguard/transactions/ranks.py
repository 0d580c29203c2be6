"""A step of DistributedDataParallel that all ranks take, or none.

Forward and backward run without communication, so that when a rank fails in them, no other rank
waits in a collective. Then the ranks agree, by one all-reduce, on whether all are well; only then
gradients are averaged and the optimizer steps, and they agree once more at the last moment at
which the step can be taken back.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchguard._torch import has_communication_hook, without_dispatch_modes
from torchguard.errors import PeerFailedError, UnrecoverableStepError
from torchguard.state.process import DeferredSignals

# What a rank says of itself; the ranks act on the largest.
_OK, OUT_OF_MEMORY, FAILED = range(3)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _flattened(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _Pairs]:
    """Return a row of memory for each dtype and device, and each tensor with its view of one."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    rows: list[torch.Tensor] = []
    pairs: _Pairs = []
    for (dtype, device), same in alike.items():
        lengths = [each.numel() for each in same]
        rows.append(torch.zeros(sum(lengths), dtype=dtype, device=device))
        pieces = zip(same, rows[-1].split(lengths), strict=True)
        pairs += [(each, piece.view(each.shape)) for each, piece in pieces]
    return rows, pairs


class Ranks:
    """The processes of a group, True for the default one, which take each step together.

    Each DistributedDataParallel among the models of the transaction is averaged.
    """

    def __init__(self, models: Sequence[nn.Module], group: Any) -> None:
        self._group = None if group is True else group
        self._models = [m for m in models if isinstance(m, DistributedDataParallel)]
        parameters = [
            parameter
            for model in self._models
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]
        _check(self._models, parameters)
        self._world = dist.get_world_size(self._group)
        # One flag, and for each parameter whether any rank has a gradient. Made here: when memory
        # has run out, nothing can be made any more.
        self._flags = torch.zeros(
            1 + len(parameters), dtype=torch.int32, device=parameters[0].device
        )
        self._parameters = parameters
        self._gradient_rows: list[torch.Tensor] = []
        self._gradients: _Pairs = []
        self._buffer_rows: list[torch.Tensor] = []
        self._buffers: _Pairs = []
        self._signals: DeferredSignals | None = None
        self.undecided = False
        """Whether the other ranks will wait for this one to say how it is."""
        self.worst = _OK
        """What the ranks agreed on."""

    @contextlib.contextmanager
    def attempt(self, code_of: Callable[[BaseException], int]) -> Iterator[None]:
        """Tell the other ranks if the block raises before :meth:`agree_to_commit`.

        Ctrl-C waits for the next agreement: between two of them it would leave this rank with
        another answer than the one it gave. A second one does not wait.
        """
        self._signals = DeferredSignals((signal.SIGINT,), at_most=1)
        try:
            self.undecided = True
            self.worst = _OK
            yield
        except BaseException as error:
            if self.undecided:
                self.undecided = False
                self._all_reduce(code_of(error))
            raise
        finally:
            # One that came after the last agreement is handled now: the step is done.
            self._signals.restore_handlers()

    @contextlib.contextmanager
    def without_communication(self) -> Iterator[None]:
        """Keep forward and backward of the models from communicating."""
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.no_sync())
                # no_sync() keeps gradients local, but the first forward within it still
                # broadcasts buffers (torch/nn/parallel/distributed.py, _pre_forward).
                model.require_forward_param_sync = False
            yield

    def average(self) -> None:
        """Agree that all are well, then average gradients, broadcast the first rank's buffers."""
        self._collect()
        self._agree()
        with without_dispatch_modes(self._flags):
            for row in self._gradient_rows:
                dist.all_reduce(row, group=self._group)
            first = dist.get_process_group_ranks(self._group or dist.group.WORLD)[0]
            for row in self._buffer_rows:
                dist.broadcast(row, src=first, group=self._group)
        self._distribute()

    @torch.no_grad()
    def _collect(self) -> None:
        """Copy gradients and buffers to where the other ranks get them from."""
        if not self._gradients:
            self._gradient_rows, self._gradients = _flattened(self._parameters)
            models = [model for model in self._models if model.broadcast_buffers]
            buffers = [b for model in models for b in model.modules_buffers]
            self._buffer_rows, self._buffers = _flattened(buffers)
        self._flags[1:].copy_(
            torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.int32)
        )
        for parameter, view in self._gradients:
            if parameter.grad is None:
                view.zero_()
            else:
                # As DistributedDataParallel does: divided first, then added up.
                torch.mul(parameter.grad, 1.0 / self._world, out=view)
        for buffer, view in self._buffers:
            view.copy_(buffer)

    @torch.no_grad()
    def _distribute(self) -> None:
        """Copy what the ranks have made together back to gradients and buffers."""
        with without_dispatch_modes(self._flags):
            has_gradient = dict(zip(self._parameters, self._flags[1:].tolist(), strict=True))
        for parameter, view in self._gradients:
            if not has_gradient[parameter]:
                continue  # unused on every rank: stays None, and weight decay skips it
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)
        for buffer, view in self._buffers:
            buffer.copy_(view)

    def agree_to_commit(self) -> None:
        """Agree at the last moment at which the step can be taken back."""
        if self.undecided:
            self._agree()
            self.undecided = False

    def run_again(self, error: BaseException) -> bool:
        """Whether all run the batch again: out of memory on any rank, and nothing else on any."""
        again = self.worst == OUT_OF_MEMORY
        if again and isinstance(error, UnrecoverableStepError):
            self._all_reduce(FAILED)  # the others run again, and learn it at their next agreement
            return False
        return again

    def _agree(self) -> None:
        """Raise PeerFailedError if another rank failed."""
        if self._signals is not None:
            self._signals.deliver()
        self._all_reduce(_OK)
        if self.worst != _OK:
            self.undecided = False
            raise PeerFailedError(
                "the step was rolled back on this rank because it failed on another one"
                + (": out of memory" if self.worst == OUT_OF_MEMORY else "")
            )

    def _all_reduce(self, code: int) -> None:
        with without_dispatch_modes(self._flags):
            self._flags[0] = code
            dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._group)
            self.worst = int(self._flags[0])


def _check(models: Sequence[DistributedDataParallel], parameters: Sequence[nn.Parameter]) -> None:
    if not parameters:
        raise ValueError(
            "transaction: group= without a DistributedDataParallel module that has parameters to "
            "train; pass the wrapped module as model="
        )
    for model in models:
        if model.static_graph:
            raise ValueError(
                "transaction: group= runs forward and backward without communication, which a "
                "DistributedDataParallel(static_graph=True) can't: leave out static_graph=True"
            )
        for name, module in model.named_modules():
            is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if is_table and module.sparse and module.weight.requires_grad:
                raise ValueError(
                    f"transaction: {name} has sparse=True, and group= averages dense gradients "
                    "alone: make the module with sparse=False, or leave out group="
                )
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(  # noqa: TRY004  the module is right, group= with it is not
                    f"transaction: {name} is a SyncBatchNorm, which communicates in its forward: "
                    "a rank that fails would leave the others waiting; use BatchNorm with group="
                )
        if has_communication_hook(model):
            raise ValueError(
                "transaction: group= averages gradients itself, and the communication hook that "
                "is registered on the DistributedDataParallel module would be left out"
            )
