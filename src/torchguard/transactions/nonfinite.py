"""``skip_nonfinite=True``: a step whose gradients are not finite is skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


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

    def of_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look at the gradients, or let the closure do so; return the arguments of the step."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.before(optimizer)
        elif len(args) > 1:
            args = (args[0], self.after_closure(optimizer, closure), *args[2:])
        else:
            kwargs = {**kwargs, "closure": self.after_closure(optimizer, closure)}
        return args, kwargs

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

    def after_closure(self, optimizer: Optimizer, given: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls :meth:`before` when it has made the gradients."""

        @functools.wraps(given)
        def closure() -> Any:
            loss = given()
            self.before(optimizer)
            return loss

        return closure

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
        finite = torch.isfinite(largest) & finite.to(
            largest.device, non_blocking=not largest.is_cpu
        )
    return bool(finite)
