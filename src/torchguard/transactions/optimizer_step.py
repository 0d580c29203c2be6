"""One ``optimizer.step()``: rolled back from copies if it raises, skipped if it is not finite."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchguard._torch import has_own_dispatch
from torchguard._torch.eager import call_unseen, can_make_state, make_state
from torchguard.errors import UnrecoverableStepError
from torchguard.state.interrupts import roll_back
from torchguard.state.optimizers import OptimizerSnapshot, state_tensors
from torchguard.state.tensors import Elements

Undo = Literal["auto", "copy", "none"]


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether ``step()`` is written in PyTorch; a scheduler has wrapped that of an instance."""
    step: Any = type(optimizer).step
    return bool(step.__module__.startswith("torch.optim."))


def steps_fused(optimizer: Optimizer) -> bool:
    """Whether ``step()`` runs PyTorch's fused kernels and nothing that allocates memory.

    That is so once its state is there. SGD with dampening makes it in its first step.
    """
    return (
        is_of_torch(optimizer)
        and can_make_state(optimizer)
        and all(
            group.get("fused")
            and not group.get("differentiable")
            and not group.get("dampening")
            # Parameters that are DTensors; no kernel of PyTorch takes them with plain tensors.
            and not any(map(has_own_dispatch, group["params"][:1]))
            for group in optimizer.param_groups
        )
    )


class OptimizerStep:
    """A call of ``step()`` that a block has seen begin, and what rolls it back."""

    def __init__(
        self, optimizer: Optimizer, *, copies: bool, fused: bool, reuse: Elements | None = None
    ) -> None:
        """``reuse`` are the copies of an earlier step, whose memory is used again."""
        self.optimizer = optimizer
        self.is_nesting = False
        """Whether it has called ``super().step()``, which has hooks of its own."""
        self.copies: Elements | None = None
        if copies:
            snapshot = OptimizerSnapshot(optimizer)
            # PyTorch's steps write no options and no attributes, other libraries' may.
            self._state = snapshot.state if is_of_torch(optimizer) else snapshot
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            self.copies = Elements([*parameters, *state_tensors(optimizer)], reuse)
        elif fused and _lacks_state(optimizer):
            _make_whole_state(optimizer)

    def undo(self) -> None:
        """Restore what the step may have written from its copies, if there are any."""
        if self.copies is not None:
            self._state.restore()
            self.copies.restore()

    def fail(self, error: BaseException | None) -> None:
        """Roll back the step, which has raised.

        Raises:
            UnrecoverableStepError: there are no copies.
        """
        if self.copies is None:
            raise UnrecoverableStepError(
                f"{type(self.optimizer).__name__}.step() raised, and of "
                + ("a fused step" if steps_fused(self.optimizer) else "a step with undo='none'")
                + " there are no copies: load a checkpoint, or use undo='copy'"
            ) from error
        roll_back(self.undo)


def _lacks_state(optimizer: Optimizer) -> bool:
    """Whether a fused step has to make state before its kernels run."""
    return any(
        not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        if group.get("momentum", True)  # SGD without momentum has none
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _make_whole_state(optimizer: Optimizer) -> None:
    """Make the state of all parameters, so that memory runs out before the first is written.

    ``_fused_sgd`` makes its momentum by ``empty_like`` and lets the kernel fill it. Minus zero
    changes no bit: ``momentum * -0.0 + gradient`` is the gradient, its zeros' signs included.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    before = OptimizerSnapshot(optimizer)
    try:
        call_unseen(make_state, optimizer)
        for group in optimizer.param_groups:
            if not (group.get("momentum") and "dampening" in group):
                continue
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = call_unseen(torch.full_like, parameter, -0.0)
    except BaseException:
        roll_back(before.restore)
        raise


# --- a step that is skipped ------------------------------------------------------------------


class NonfiniteGate:
    """Takes the gradients away for one ``optimizer.step()`` if one of them is not finite.

    A parameter without a gradient is left alone by every optimizer of PyTorch.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        """If it is not finite, the steps of this block are skipped, whatever the gradients."""
        self.taken_away: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, during a step that is skipped."""
        self.skipped = 0
        """How many steps were skipped."""

    def before(self, optimizer: Optimizer) -> None:
        """Find out whether the step is to be skipped; the host waits for the device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        present = [(p, p.grad) for p in parameters if p.grad is not None]
        with torch.no_grad():
            finite = _all_finite([gradient for _, gradient in present], self.loss)
        if not finite:
            self.skipped += 1
            self.taken_away = present
            for parameter, _ in present:
                parameter.grad = None

    def before_or_in_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Call :meth:`before` now, or after the closure, which makes the gradients.

        Returns the arguments of ``step()``, with a closure that does so.
        """
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(given):
            self.before(optimizer)
            return args, kwargs

        @functools.wraps(given)
        def closure() -> Any:
            loss = given()
            self.before(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def restore_gradients(self) -> None:
        """Let parameters have the gradients that :meth:`before` took away for a step."""
        for parameter, gradient in self.taken_away:
            parameter.grad = gradient
        self.taken_away = []


def _all_finite(gradients: list[Tensor], loss: Tensor | None) -> bool:
    """Whether loss and gradients are finite, by one question to the device.

    The largest magnitude is finite just if every element is: it does not overflow, as a sum of
    squares does, and a NaN stays a NaN.
    """
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    with_elements = [each for each in values if each.numel() > 0]  # no elements, no norm
    finite = torch.ones((), dtype=torch.bool) if loss is None else torch.isfinite(loss).all()
    if with_elements:
        largest = torch.nn.utils.get_total_norm(with_elements, float("inf"))
        finite = torch.isfinite(largest) & finite.to(largest.device, non_blocking=True)
    return bool(finite)
