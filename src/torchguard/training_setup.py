"""A training that is set up wrong says so: when its transaction is made, and in two steps."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._events import record, warn_user
from torchguard._torch.eager import call_unseen, call_with_grad, has_own_dispatch
from torchguard.errors import TrainingSetupWarning
from torchguard.state.training import Modules

_SHOWN = 3  # names
_ELEMENTS = 1024  # of a parameter, by which a step is seen to move it


def warn_of_setup(function: str, text: str) -> None:
    """Count the event, and warn at the line of the user's program."""
    record("training_setup", function, text)
    warn_user(f"{function}: {text}", TrainingSetupWarning)


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
            function,
            f"only norms are trained{frozen(models)}. If you chose them by their names, look at "
            "model.named_parameters()",
        )
    if not missing or not held:
        return
    text = f"no optimizer has {_named(models, missing)}"
    stale = len(held - known)
    if stale:
        text += (
            f"; and an optimizer has {stale} parameters that are not in the model. If a part of "
            "the model was replaced after the optimizer was made, make the optimizer again"
        )
    else:
        text += ". Freeze them with requires_grad_(False), or pass the optimizer that has them"
    warn_of_setup(function, text)


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


class FirstSteps:
    """Looks at the first two steps of an optimizer."""

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self._models, self._optimizer = models, optimizer
        self._steps = 0
        self._before: list[tuple[Tensor, Any, Tensor]] = []
        """Parameters, their group, and some of their elements before the first step."""
        self._added_to: list[bool] = []
        """For each gradient that was added to a parameter, whether the last step's was there."""
        self._watched: Any = None
        """The node and the hook that note it: autograd makes a new node if nothing holds one."""

    def before_step(self) -> None:
        """Keep a sample of each parameter; warn if ``train()`` would freeze some of them."""
        if self._steps == 0 and not self._before:
            unfrozen: list[Tensor] = []
            with contextlib.suppress(Exception):  # a check must not end a training
                self._before = call_unseen(self._samples)
                unfrozen = self._frozen_by_train()
            if unfrozen:
                warn_of_setup(
                    "transaction",
                    f"model.train() freezes {_named(self._models, unfrozen)}, and was not called "
                    "before the first step",
                )

    def _frozen_by_train(self) -> list[Tensor]:
        """Return the parameters that a ``train()`` of the program's own freezes if it is called."""
        modules = [each for model in self._models for each in model.modules()]
        own = [m for m in modules if m.training and type(m).train is not nn.Module.train]
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        trained = [p for p in held if p.requires_grad] if own else []
        before = Modules(modules).snapshot()
        try:
            for each in own:
                each.train()
            return [p for p in trained if not p.requires_grad]
        finally:
            before.restore()
            for parameter in trained:
                parameter.requires_grad_()

    def _samples(self) -> list[tuple[Tensor, Any, Tensor]]:
        groups = self._optimizer.param_groups
        return [(p, g, _sample(p)) for g in groups for p in g["params"] if _is_plain(p)]

    def after_step(self) -> bool:
        """Warn of what is wrong, and return whether this was the second step."""
        found: list[str] = []
        with contextlib.suppress(Exception):
            found += call_unseen(lambda: list(self._find()))
        for text in found:
            warn_of_setup("transaction", text)
        return self._steps > 1

    def _find(self) -> Iterator[str]:
        if getattr(self._optimizer, "found_inf", False):
            return  # a fused kernel has skipped the step
        self._steps += 1
        name = type(self._optimizer).__name__
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        without = [p for p in trained if p.requires_grad and p.grad is None]
        if without and self._steps == 1:
            yield (
                f"the first step of {name} had no gradient for {_named(self._models, without)}. "
                "If no batch uses them, freeze them or leave them out of the optimizer"
            )
        visible = [each for each in self._before if _has_to_move(*each)]
        stuck = [p for p, _, before in visible if torch.equal(_sample(p), before)]
        # Some optimizers (SOAP) move nothing in their first step.
        if stuck and (self._steps > 1 or len(stuck) < len(visible)):
            self._before = []
            yield f"{name}.step() did not move {_named(self._models, stuck)}; they have a gradient"
        if self._steps > 1:
            if self._watched is not None:
                self._watched[1].remove()
            if self._added_to and all(self._added_to):
                yield (
                    f"the gradients that {name} has used in its first step were not cleared before "
                    "those of the second were added: call zero_grad() in each step"
                )
            return
        # The last of the smallest: near the loss, or a scale that model.zero_grad() does not know.
        for each in sorted(filter(_is_plain, reversed(trained)), key=Tensor.numel):
            if each.grad is not None and _is_plain(each.grad) and bool(each.grad.any()):
                self._watched = _watch(each, self._added_to)
                return


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
