"""A training that is set up wrong says so: when its transaction is made, and in two steps."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._events import record, warn_user
from torchguard._torch.eager import call_unseen, call_with_grad, has_own_dispatch, has_scaled
from torchguard.errors import TrainingSetupWarning
from torchguard.state.training import TrainingState

_SHOWN = 3  # names
_ELEMENTS = 1024  # of a parameter, by which a step is seen to move it


def warn_of_setup(entry: str, text: str, function: str = "transaction") -> None:
    """Count the event, and warn at the line of the user's program."""
    record("training_setup", function, text, entry=entry, is_said=True)
    warn_user(entry, f"{function}: {text}", TrainingSetupWarning)


def warn_of_parameters(
    function: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Warn if a model has trainable parameters that no optimizer has, or trains its norms alone.

    A model of which no optimizer has any is the business of other code, such as the other half of a
    GAN, unless that is so of every model. Parameters that are in no model may be right (a
    temperature of the loss): they are named only if parameters of the model are missing, for then
    they may be those of a part that was replaced, or of the model before ``fully_shard``.
    """
    given = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    held = set(map(id, given))
    owned = [list(model.parameters()) for model in models]
    known = {id(p) for parameters in owned for p in parameters}
    trained = [each for each in owned if any(id(p) in held for p in each)] or owned
    missing = [p for each in trained for p in each if p.requires_grad and id(p) not in held]
    layers = [module for model in models for module in model.modules()]
    norms = [each for each in layers if re.search(r"Norm(\dd)?$", type(each).__name__)]
    of_norms = {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    used = {id(p) for p in given if p.requires_grad}
    if used and used <= of_norms < known and not missing:
        warn_of_setup(
            "only-norms-are-trained",
            f"only norms are trained{frozen(models)}. If you chose them by their names, look at "
            "model.named_parameters()",
            function,
        )
    if not missing or not held:
        return
    missed, stale = _named(models, missing), len(held - known)
    if stale:
        warn_of_setup(
            "optimizer-of-other-parameters",
            f"no optimizer has {missed}; and an optimizer has {stale} parameters that are not in "
            "the model. If a part of the model was replaced after the optimizer was made, make "
            "the optimizer again",
            function,
        )
    else:
        warn_of_setup(
            "parameters-without-an-optimizer",
            f"no optimizer has {missed}. Freeze them with requires_grad_(False), or pass the "
            "optimizer that has them",
            function,
        )


def frozen(models: Iterable[nn.Module]) -> str:
    """Say how much of the models is frozen; an empty text if nothing is."""
    sizes = {p: p.numel() for model in models for p in model.parameters()}
    total, trained = sum(sizes.values()), sum(n for p, n in sizes.items() if p.requires_grad)
    return f"; {total - trained:,} of {total:,} parameters are frozen" if trained < total else ""


def _named(models: Iterable[nn.Module], parameters: Sequence[Tensor]) -> str:
    """Say how many parameters there are, and the names of the first."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    shown = [names.get(id(each), "one of no model") for each in parameters[:_SHOWN]]
    more = ", ..." if len(parameters) > _SHOWN else ""
    return f"{len(parameters)} trainable parameters of the model: {', '.join(shown)}{more}"


class _Fault(NamedTuple):
    """What there is to warn of."""

    entry: str
    text: str


class FirstSteps:
    """Looks at the first two steps of an optimizer; runs none of the program's code."""

    def __init__(
        self, models: Sequence[nn.Module], optimizer: Optimizer, scaler: Any = None
    ) -> None:
        self._models, self._optimizer, self._scaler = models, optimizer, scaler
        self._steps = 0
        self._before: list[_Sampled] = []
        self._added_to: list[bool] = []
        """For each gradient that was added to a parameter, whether the last step's was there."""
        self._watched: Any = None
        """The node and the hook that note it: autograd makes a new node if nothing holds one."""

    def before_step(self) -> None:
        """Keep a sample of each parameter."""
        if self._steps == 0 and not self._before:
            with contextlib.suppress(Exception):  # a check must not end a training
                self._before = call_unseen(_sampled, self._optimizer)

    def after_step(self) -> bool:
        """Warn of what is wrong, and return whether this was the second step."""
        found: list[_Fault | None] = []
        with contextlib.suppress(Exception):
            found = call_unseen(self._look)
        for fault in filter(None, found):
            warn_of_setup(*fault)
        return self._steps > 1

    def _look(self) -> list[_Fault | None]:
        if getattr(self._optimizer, "found_inf", False):
            return []  # a fused kernel has skipped the step
        self._steps += 1
        is_first = self._steps == 1
        stuck = unmoved(self._models, self._optimizer, self._before, is_first=is_first)
        if is_first:
            without = missing_gradients(self._models, self._optimizer)
            self._before = [] if stuck else self._before
            self._watched = _watch_one(self._optimizer, self._added_to)
            return [without, stuck, unscaled(self._scaler, self._optimizer)]
        if self._watched is not None:
            self._watched[1].remove()
        return [stuck, uncleared(self._optimizer, self._added_to)]


def missing_gradients(models: Sequence[nn.Module], optimizer: Optimizer) -> _Fault | None:
    """Say which parameters have no gradient in the first step."""
    without = [p for p in _parameters(optimizer) if p.requires_grad and p.grad is None]
    if not without:
        return None
    return _Fault(
        "parameters-without-a-gradient",
        f"the first step of {type(optimizer).__name__} had no gradient for "
        f"{_named(models, without)}. If no batch uses them, freeze them or leave them out of the "
        "optimizer",
    )


def unscaled(scaler: Any, optimizer: Optimizer) -> _Fault | None:
    """Say that the transaction was given a GradScaler that has scaled no loss."""
    if scaler is None or has_scaled(scaler) or not scaler.is_enabled():
        return None
    return _Fault(
        "gradscaler-that-scales-nothing",
        f"{type(optimizer).__name__} has stepped, and the GradScaler has scaled no loss: write "
        "scaler.scale(loss).backward() and scaler.step(optimizer), or leave out scaler=",
    )


_Sampled = tuple[Tensor, Any, Tensor]
"""A parameter, its group, and some of its elements before the first step."""


def unmoved(
    models: Sequence[nn.Module], optimizer: Optimizer, before: list[_Sampled], *, is_first: bool
) -> _Fault | None:
    """Say which parameters have a gradient and are where they were before the first step."""
    visible = [each for each in before if _has_to_move(*each)]
    stuck = [p for p, _, elements in visible if torch.equal(_sample(p), elements)]
    # Some optimizers (SOAP) move nothing in their first step.
    if not stuck or (is_first and len(stuck) == len(visible)):
        return None
    return _Fault(
        "parameters-that-do-not-move",
        f"{type(optimizer).__name__}.step() did not move {_named(models, stuck)}; they have a "
        "gradient",
    )


def uncleared(optimizer: Optimizer, added_to: list[bool]) -> _Fault | None:
    """Say that gradients of the second step were added to those of the first, if all were."""
    if not added_to or not all(added_to):
        return None
    return _Fault(
        "gradients-not-cleared",
        f"the gradients that {type(optimizer).__name__} has used in its first step were not "
        "cleared before those of the second were added: call zero_grad() in each step",
    )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sampled(optimizer: Optimizer) -> list[_Sampled]:
    groups = optimizer.param_groups
    return [(p, g, _sample(p)) for g in groups for p in g["params"] if _is_plain(p)]


def _watch_one(optimizer: Optimizer, added_to: list[bool]) -> Any:
    """Watch the last of the smallest: near the loss, or one that model.zero_grad() can't reach."""
    for each in sorted(filter(_is_plain, reversed(_parameters(optimizer))), key=Tensor.numel):
        if each.grad is not None and _is_plain(each.grad) and bool(each.grad.any()):
            return _watch(each, added_to)
    return None


class StepsOutside:
    """Looks for a loop that steps outside of its blocks, until a block of it has stepped."""

    def __init__(self) -> None:
        self.are_looked_for = True
        self._is_after_a_block = False
        """Whether the last block has not stepped, and no step came since."""
        self._found = 0
        self._is_said = False

    def block_ends(self, *, stepped: bool) -> None:
        """Note the end of a block that has not raised."""
        self.are_looked_for = self.are_looked_for and not stepped
        self._is_after_a_block = True

    def step_ends(self, training: TrainingState, optimizer: Optimizer) -> None:
        """Note a step while no block of its transaction is open."""
        if not self._is_after_a_block or not training.shares_parameters(optimizer, modules=False):
            return
        self._is_after_a_block = False
        self._found += 1
        if self._found > 1:  # the first may be of a warm-up
            self.say_once(
                "steps-outside-the-block",
                f"{type(optimizer).__name__} steps outside of the block, so the transaction "
                "guards nothing: move backward and optimizer.step() into `with step:`",
            )

    def say_once(self, entry: str, text: str) -> None:
        """Warn of steps that the transaction does not guard."""
        self.are_looked_for = False
        if not self._is_said:
            self._is_said = True
            warn_of_setup(entry, text)


def _watch(parameter: Tensor, added_to: list[bool]) -> Any:
    """Note in a list, before autograd adds a gradient, whether the present one was still there.

    ``zero_grad()`` may come at the end of a step or anywhere before the next backward, and may
    write zeros. Other code may add to gradients that are cleared later, such as the generator's
    backward in a GAN, so each time counts.
    """
    assert parameter.grad is not None
    spent = parameter.grad.clone()

    def note(_: object) -> None:
        with contextlib.suppress(Exception):
            # Not by a weak reference: with one, torch.utils.swap_tensors (model.half()) refuses.
            now = parameter.grad
            # At first it has to be the very one: some programs make gradients by hand.
            there = torch.any if added_to else functools.partial(torch.equal, spent)
            added_to.append(now is not None and bool(call_unseen(there, now)))

    node = call_with_grad(True, torch.autograd.graph.get_gradient_edge, parameter).node
    return node, node.register_prehook(note)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements can be read without communication."""
    return tensor.layout is torch.strided and not has_own_dispatch(tensor)


def _sample(tensor: Tensor) -> Tensor:
    """Copy elements from all over a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)].clone()


def _has_to_move(parameter: Tensor, group: Any, before: Tensor) -> bool:
    """Whether a step moves an element of the sample by more than rounding."""
    rate, gradient = group.get("lr"), parameter.grad
    if rate is None or gradient is None or not _is_plain(gradient):
        return False
    # SGD moves an element by the rate times its gradient, Adam at first by the rate.
    least = float(rate) * _sample(gradient).abs().clamp(max=1)
    return bool((least > 4 * torch.finfo(parameter.dtype).eps * before.abs()).any())
