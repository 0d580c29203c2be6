"""Which kernels of a fused ``optimizer.step()`` have run, told by tensors that go through them.

Nothing else tells. A fused kernel does not move the version counters of what it writes (measured
on 2.6 to 2.15), a parameter whose gradient is zero has the same bits before and after it, and an
error may come before a kernel, from it or after it: from a mode, from the launch of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch.optimizers import init_group_arguments, lists_of_init_group

__all__ = ["FusedProgress", "FusedWitness", "has_fused_lists"]

_PARAMETERS = {"params", "params_with_grad"}
_GRADIENTS = "grads"
_COUNTERS = "state_steps"
_OVERRIDDEN = ("_init_group", "_optimizer_step_code")


def has_fused_lists(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``_init_group`` fills lists of the names that :class:`FusedWitness` knows."""
    names = init_group_arguments(optimizer)
    return _GRADIENTS in names and not _PARAMETERS.isdisjoint(names)


class FusedProgress(NamedTuple):
    """How far a fused ``step()`` got before it raised."""

    stepped: list[Tensor]
    """Parameters whose kernel has run."""

    counted: list[Tensor]
    """Step counters that were incremented for a kernel that has changed nothing."""

    all_stepped: bool

    def take_back_counts(self) -> None:
        """Let the step counters of kernels that have changed nothing be as before the step."""
        if self.counted:
            torch._foreach_sub_(self.counted, 1)


class _Kernel(NamedTuple):
    """A call of a fused kernel: the parameters of a group that have one device and dtype."""

    parameters: list[Tensor]
    counters: list[Tensor]
    witnesses: tuple[dict[str, Tensor], dict[str, Tensor]]
    """What stands before and behind the parameters, by the name of the list."""


class FusedWitness:
    """Two parameters of one element more in each call of a fused kernel, zero before the step.

    ``step()`` fills lists with ``_init_group``, takes one group after the other, and within a group
    ``_fused_adam`` and its like take one device and dtype after the other: increment the step
    counters, run the kernel over the lists, and with a GradScaler subtract ``found_inf`` from the
    counters. https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L802

    The witnesses stand first and last in these lists, which nobody but ``step()`` sees. Their
    gradient is infinite, so that no learning rate, scale, rounding or choice of options lets the
    kernel leave them as they were, but for ``found_inf``, with which it changes no parameter
    either. The first one changed and the last one not means a kernel that was torn.
    """

    def __init__(self, groups: list[dict[str, list[Any]]]) -> None:
        """Take what ``_init_group`` has filled, for each group, by name."""
        wanted: list[_Wanted] = []
        self._groups = [_kernels_of(lists, wanted) for lists in groups]
        self._lengths = [list(map(len, lists.values())) for lists in groups]
        self._zeroed = _allocate(wanted)
        self._is_complete = True
        self._before: dict[str, Any] = {}

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next ``optimizer.step()`` take the witnesses along, until :meth:`end`."""
        for each in self._zeroed:
            each.zero_()
        self._is_complete = True
        self.end(optimizer)  # an interrupt may have left those of the last step
        attributes = vars(optimizer)
        self._before = {name: attributes[name] for name in _OVERRIDDEN if name in attributes}
        init_group, step_code = (getattr(optimizer, name) for name in _OVERRIDDEN)

        def with_witnesses(group: dict[str, Any], *lists: Any) -> Any:
            result = init_group(group, *lists)
            self._insert(optimizer, group, lists)
            return result

        def end() -> None:
            # The profiler's mark, called between the step and the hooks after it.
            self.end(optimizer)
            step_code()

        attributes.update(zip(_OVERRIDDEN, (with_witnesses, end), strict=True))

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back what :meth:`begin` did; what the witnesses have seen stays."""
        attributes = vars(optimizer)
        for name in _OVERRIDDEN:
            if getattr(attributes.get(name), "__module__", None) == __name__:
                del attributes[name]
        attributes.update(self._before)
        self._before = {}
        # SGD.step() notes the momentum buffer of each parameter in its lists.
        for kernel in self._kernels():
            for witness in kernel.witnesses:
                for name in witness.keys() & _PARAMETERS:
                    optimizer.state.pop(witness[name], None)

    def progress(self) -> FusedProgress | None:
        """Return how far the step got; None if it can't be told, or a kernel is torn."""
        stepped: list[Tensor] = []
        counted: list[Tensor] = []
        all_stepped = True
        for kernel in self._kernels():
            ran = {_has_run(each) for each in kernel.witnesses}
            incremented = {_is_incremented(each) for each in kernel.witnesses}
            if len(ran) > 1 or len(incremented) > 1 or not self._is_complete:
                return None
            if True in ran:
                stepped += kernel.parameters
                continue
            all_stepped = False
            if True in incremented:
                counted += kernel.counters
        return FusedProgress(stepped, counted, all_stepped and bool(stepped))

    def _kernels(self) -> Iterator[_Kernel]:
        return chain.from_iterable(self._groups)

    def _insert(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], arguments: tuple[Any, ...]
    ) -> None:
        lists = lists_of_init_group(optimizer, arguments)
        place = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
        if self._lengths[place : place + 1] != [list(map(len, lists.values()))]:
            self._is_complete = False  # somebody's hook has changed what there is to step
            return
        for name, held in lists.items():
            if held:
                held[:0] = [kernel.witnesses[0][name] for kernel in self._groups[place]]
                held += [kernel.witnesses[1][name] for kernel in self._groups[place]]


_Wanted = tuple[dict[str, Tensor], str, Tensor]
"""A witness, the name of a list, and an entry of that list to be like."""


def _kernels_of(lists: dict[str, list[Any]], wanted: list[_Wanted]) -> list[_Kernel]:
    parameters: list[Tensor] = next(lists[name] for name in lists.keys() & _PARAMETERS)
    by_kind: dict[Any, list[int]] = {}
    for place, parameter in enumerate(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(place)
    kernels = []
    for places in by_kind.values():
        witnesses: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for witness in witnesses:
            for name, held in lists.items():
                like = held[places[0]] if held else None
                if name == _GRADIENTS and like is not None:
                    witness[name] = torch.full((1,), inf, dtype=like.dtype, device=like.device)
                elif held:
                    wanted.append((witness, name, parameters[places[0]] if like is None else like))
        counters = lists.get(_COUNTERS) or []
        kernels.append(
            _Kernel(
                [parameters[place] for place in places],
                [counters[place] for place in places] if counters else [],
                witnesses,
            )
        )
    return kernels


def _allocate(wanted: list[_Wanted]) -> list[Tensor]:
    """Give the witnesses zeros: those of one device and dtype in a row, which one call resets."""
    by_kind: dict[Any, list[_Wanted]] = {}
    for each in wanted:
        by_kind.setdefault((each[2].device, each[2].dtype), []).append(each)
    rows = []
    for (device, dtype), alike in by_kind.items():
        row = torch.zeros(len(alike), device=device, dtype=dtype)
        for place, (witness, name, _) in enumerate(alike):
            # A step counter is a scalar.
            witness[name] = row[place] if name == _COUNTERS else row[place : place + 1]
        rows.append(row)
    return rows


def _has_run(witness: dict[str, Tensor]) -> bool:
    written = [t for name, t in witness.items() if name not in {_GRADIENTS, _COUNTERS}]
    return any(bool((each != 0).any()) for each in written)  # NaN != 0 is true


def _is_incremented(witness: dict[str, Tensor]) -> bool:
    return _COUNTERS in witness and bool(witness[_COUNTERS] != 0)
