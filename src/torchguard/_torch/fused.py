"""Which kernels of a fused ``optimizer.step()`` have run: sentinel tensors go through them.

Nothing else shows it. A fused kernel does not move the version counters of what it writes (measured
on 2.6 to 2.15), a parameter whose gradient is zero has the same bits before and after it, and an
error may come before a kernel, from it or after it: from a mode, from the launch of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch.optimizers import (
    init_group,
    init_group_arguments,
    lists_of_init_group,
    same_tensors,
)

_PARAMETERS = {"params", "params_with_grad"}
_GRADIENTS = "grads"
_COUNTERS = "state_steps"
_OVERRIDDEN = ("_init_group", "_optimizer_step_code")


def has_fused_lists(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``_init_group`` fills lists of the names that :class:`FusedLists` knows."""
    names = init_group_arguments(optimizer)
    replaced = vars(optimizer).get("_init_group", has_fused_lists)  # by other code
    is_own = getattr(replaced, "__module__", None) == __name__
    return is_own and _GRADIENTS in names and not _PARAMETERS.isdisjoint(names)


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
    sentinels: tuple[dict[str, Tensor], dict[str, Tensor]]
    """What stands before and behind the parameters, by the name of the list."""


class _Group(NamedTuple):
    """What ``_init_group`` has made of a group of parameters."""

    options: dict[str, Any]
    lists: dict[str, list[Any]]
    """What it fills, by name, with the sentinels; of gradients only those of the sentinels."""

    result: Any
    kernels: list[_Kernel]
    with_gradient: int
    """How many of its parameters have a gradient."""


class FusedLists:
    """The lists that ``_init_group`` fills for ``step()``, with sentinels in them.

    ``step()`` takes one group after the other, and within a group ``_fused_adam`` and its like take
    one device and dtype after the other: increment the step counters, run the kernel over the
    lists, and with a GradScaler subtract ``found_inf`` from the counters.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L802

    Sentinels are two parameters of one element more in each call of a kernel, zero before the step,
    first and last in these lists. Their gradient is infinite, so that no learning rate, scale,
    rounding or choice of options lets the kernel leave them as they were, but for ``found_inf``,
    with which it changes no parameter either. One changed and the other not: the kernel was torn.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``_init_group``, which makes state that is not there yet."""
        self._parameters = _parameters_of(optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        self._has_gradient = [gradient is not None for gradient in gradients]
        wanted: list[_Wanted] = []
        self._groups: list[_Group] = []
        for group in optimizer.param_groups:
            lists, result = init_group(optimizer, group)
            kernels = _kernels_of(lists, wanted)
            options = {**group, "params": list(group["params"])}
            count = sum(len(kernel.parameters) for kernel in kernels)
            self._groups.append(_Group(options, lists, result, kernels, count))
        # Only the optimizer writes its state; kernels on a GPU look at layouts themselves.
        self._state_is_contiguous = any(each.is_cpu for each in self._parameters) and all(
            _are_contiguous(tensors)
            for group in self._groups
            for name, tensors in group.lists.items()
            if name not in {_GRADIENTS, _COUNTERS}
        )
        self._zeroed = _allocate(wanted)
        self._sentinels = [sentinel[name] for sentinel, name, _ in wanted if name in _PARAMETERS]
        for each in self._groups:
            _insert_sentinels(each)
        self._hold(gradients)
        self._has_sparse = self._holds_sparse()

    def renew(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the gradients that there are now; return whether the lists are right for them.

        The caller knows that the state is made of the same tensors.
        """
        groups = optimizer.param_groups
        # Asked for here and not when step() is called: a hook may have replaced them since.
        gradients = [parameter.grad for parameter in self._parameters]
        if not (
            len(groups) == len(self._groups)
            and all(map(_is_filled_alike, groups, self._groups))
            and [gradient is not None for gradient in gradients] == self._has_gradient
        ):
            return False
        self._hold(gradients)
        for each in self._zeroed:
            each.zero_()
        return self._holds_sparse() == self._has_sparse  # _init_group notes it in its result

    def _hold(self, gradients: list[Tensor | None]) -> None:
        self._gradients = [gradient for gradient in gradients if gradient is not None]
        self._is_contiguous = (
            self._state_is_contiguous
            and _are_contiguous(self._gradients)
            and _are_contiguous(self._parameters)
        )

    def _holds_sparse(self) -> bool:
        # No sparse gradient is contiguous, so the usual step asks none of them.
        return not self._is_contiguous and any(g.is_sparse for g in self._gradients)

    def fill(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Do what ``optimizer._init_group(group, *arguments)`` does, with the sentinels."""
        place = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
        known = self._groups[place]
        for name, given in lists_of_init_group(optimizer, arguments).items():
            given.extend(known.lists[name])
            if name == _GRADIENTS:
                first = sum(each.with_gradient for each in self._groups[:place])
                middle = len(known.kernels)
                given[middle:middle] = self._gradients[first : first + known.with_gradient]
            elif name in _PARAMETERS and self._is_contiguous:
                known_contiguous[:] = [given]
        return known.result

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Release the gradients, and what SGD notes of each parameter in its lists."""
        # zero_grad() gives their memory back; these lists stay until the next step.
        self._gradients = []
        known_contiguous.clear()
        for sentinel in self._sentinels:
            optimizer.state.pop(sentinel, None)

    def progress(self) -> FusedProgress | None:
        """Return how far the step got; None if that can't be seen, or a kernel is torn."""
        stepped: list[Tensor] = []
        counted: list[Tensor] = []
        all_stepped = True
        for kernel in chain.from_iterable(group.kernels for group in self._groups):
            ran, ran_to_the_end = map(_has_run, kernel.sentinels)
            incremented, all_incremented = map(_is_incremented, kernel.sentinels)
            if ran != ran_to_the_end or incremented != all_incremented:
                return None
            all_stepped &= ran
            if ran:
                stepped += kernel.parameters
            elif incremented:
                counted += kernel.counters
        return FusedProgress(stepped, counted, all_stepped and bool(stepped))


known_contiguous: list[list[Any]] = []
"""The list of parameters of the kernel that comes next, if all that it gets is contiguous."""


class FusedStep:
    """Lets one ``optimizer.step()`` take its lists from :class:`FusedLists`, until :meth:`end`."""

    def __init__(self, optimizer: torch.optim.Optimizer, prepare: Callable[[], FusedLists]) -> None:
        """``prepare`` is called when the step asks for the first list."""
        self._optimizer = optimizer
        self._lists: FusedLists | None = None
        attributes = vars(optimizer)
        _remove_override(attributes)  # an interrupt may have left that of the last step
        self._before = {name: attributes[name] for name in _OVERRIDDEN if name in attributes}
        # An attribute of the object comes before a method of its class, and step() asks for
        # self._init_group; no other optimizer of this class sees it.
        step_code: Any = getattr(optimizer, "_optimizer_step_code")  # noqa: B009

        def init_group(group: dict[str, Any], *arguments: Any) -> Any:
            if self._lists is None:
                self._lists = prepare()
            return self._lists.fill(optimizer, group, arguments)

        def end() -> None:
            # The profiler's mark, called between the step and the hooks after it.
            self.end()
            step_code()

        attributes.update(zip(_OVERRIDDEN, (init_group, end), strict=True))

    def end(self) -> None:
        """Take back what this did to the optimizer; what the sentinels have seen stays."""
        attributes = vars(self._optimizer)
        _remove_override(attributes)
        attributes.update(self._before)
        self._before = {}
        if self._lists is not None:
            self._lists.release(self._optimizer)

    def progress(self) -> FusedProgress | None:
        """Return what :meth:`FusedLists.progress` does."""
        if self._lists is None:
            # It raised in a hook or a closure, before the first list.
            return FusedProgress([], [], all_stepped=False)
        return self._lists.progress()


def _remove_override(attributes: dict[str, Any]) -> None:
    for name in _OVERRIDDEN:
        if getattr(attributes.get(name), "__module__", None) == __name__:
            del attributes[name]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _are_contiguous(tensors: list[Any]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except (TypeError, RuntimeError):  # a momentum buffer that is not made yet; a sparse gradient
        return False


def _is_filled_alike(options: dict[str, Any], group: _Group) -> bool:
    """Whether ``_init_group`` makes the same lists of a group with these parameters and options."""
    # It looks at flags, at whether a number is zero, and at whether lr is a tensor. A scheduler
    # changes the numbers themselves.
    before = group.options
    return (
        options.keys() == before.keys()
        and same_tensors(options["params"], before["params"])
        and all(
            options[name] is value
            or name == "params"
            or (
                type(options[name]) is type(value)
                and not isinstance(value, Tensor)
                and bool(options[name]) == bool(value)
            )
            for name, value in before.items()
        )
    )


def _insert_sentinels(group: _Group) -> None:
    for name, held in group.lists.items():
        if name == _GRADIENTS:
            held.clear()
        elif not held:
            continue
        held[:0] = [kernel.sentinels[0][name] for kernel in group.kernels]
        held += [kernel.sentinels[1][name] for kernel in group.kernels]


_Wanted = tuple[dict[str, Tensor], str, Tensor]
"""A sentinel, the name of a list, and an entry of that list to be like."""


def _kernels_of(lists: dict[str, list[Any]], wanted: list[_Wanted]) -> list[_Kernel]:
    parameters: list[Tensor] = next(lists[name] for name in lists.keys() & _PARAMETERS)
    by_kind: dict[Any, list[int]] = {}
    for place, parameter in enumerate(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(place)
    kernels = []
    for places in by_kind.values():
        sentinels: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for sentinel in sentinels:
            for name, held in lists.items():
                like = held[places[0]] if held else None
                if name == _GRADIENTS and like is not None:
                    sentinel[name] = torch.full((1,), inf, dtype=like.dtype, device=like.device)
                elif held:
                    wanted.append((sentinel, name, parameters[places[0]] if like is None else like))
        counters = lists.get(_COUNTERS)
        counted = [counters[place] for place in places] if counters else []
        kernels.append(_Kernel([parameters[place] for place in places], counted, sentinels))
    return kernels


def _allocate(wanted: list[_Wanted]) -> list[Tensor]:
    """Give the sentinels zeros: those of one device and dtype in a row, which one call resets."""
    by_kind: dict[Any, list[_Wanted]] = {}
    for each in wanted:
        by_kind.setdefault((each[2].device, each[2].dtype), []).append(each)
    rows = []
    for (device, dtype), alike in by_kind.items():
        row = torch.zeros(len(alike), device=device, dtype=dtype)
        for place, (sentinel, name, _) in enumerate(alike):
            # A step counter is a scalar.
            sentinel[name] = row[place] if name == _COUNTERS else row[place : place + 1]
        rows.append(row)
    return rows


def _has_run(sentinel: dict[str, Tensor]) -> bool:
    written = (t for name, t in sentinel.items() if name not in {_GRADIENTS, _COUNTERS})
    return any(bool((each != 0).any()) for each in written)  # NaN != 0 is true


def _is_incremented(sentinel: dict[str, Tensor]) -> bool:
    return _COUNTERS in sentinel and bool(sentinel[_COUNTERS] != 0)
