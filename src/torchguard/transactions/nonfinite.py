"""Skip a step whose loss or gradients are not finite, without a host read where possible.

The fused optimizers have a way to skip on the device, made for GradScaler: a tensor ``found_inf``
on the optimizer, which their kernel reads. It leaves parameters, moments and step counters as they
are where ``found_inf`` is 1. Nothing else in PyTorch can be skipped without asking the device, so
for other optimizers the host reads the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["NonfiniteGate", "is_gated_on_device"]


def is_gated_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of this optimizer reads ``found_inf`` within its kernel.

    ``GradScaler.step`` asks for the same attribute, which fused optimizers set
    (torch/amp/grad_scaler.py). It says nothing of each group, and ``fused`` is an option of each.
    """
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused") for group in optimizer.param_groups)


class NonfiniteGate:
    """Closes for one ``optimizer.step()`` when what it would apply is not finite.

    :meth:`before` and :meth:`after` belong around each step; ``GradScaler`` does the same to
    ``optimizer.found_inf``, so there is no scaler.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._totals: dict[torch.device, torch.Tensor] = {}

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Reading it waits for the device."""
        return sum(int(total) for total in self._totals.values())

    def look_at(self, loss: torch.Tensor) -> None:
        """Skip the steps of this block if ``loss`` is not finite, whatever the gradients are."""
        self._loss = loss.detach()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out whether the step is to be skipped, and let the optimizer know."""
        with torch.no_grad():
            self._found = _nonfinite(_gradients_of(optimizer), self._loss)
        if self._found is None:
            return
        if is_gated_on_device(optimizer):
            optimizer.found_inf = self._found  # type: ignore[attr-defined]
        elif bool(self._found):  # the host read
            # A parameter without a gradient is left alone by every optimizer of PyTorch.
            self._gradients = [
                (p, p.grad) for group in optimizer.param_groups for p in group["params"]
                if p.grad is not None
            ]  # fmt: skip
            for parameter, _ in self._gradients:
                parameter.grad = None

    def after(
        self, optimizer: torch.optim.Optimizer, restore_where: Callable[[torch.Tensor], None]
    ) -> None:
        """Call ``restore_where(skipped)``, to put buffers back where it is True, and count."""
        if self._found is not None:
            with torch.no_grad():
                restore_where(self._found.bool())
                total = self._totals.setdefault(
                    self._found.device, torch.zeros_like(self._found, dtype=torch.int64)
                )
                total.add_(self._found.to(torch.int64))
        self._end(optimizer)

    def close(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take back what :meth:`before` did, also after a step that raised."""
        for optimizer in optimizers:
            self._end(optimizer)
        self._loss = None

    def give_gradients_back(self) -> None:
        """Let parameters have the gradients that :meth:`before` took away for a step."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        self.give_gradients_back()
        if self._found is not None and vars(optimizer).get("found_inf") is self._found:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._found = None


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    return [each.coalesce().values() if each.is_sparse else each for each in gradients]


def _nonfinite(gradients: Sequence[torch.Tensor], loss: torch.Tensor | None) -> torch.Tensor | None:
    """Return 1.0 if anything is not finite, else 0.0, on the device of the first gradient.

    The largest magnitude is finite just if every element is: it does not overflow, as a sum of
    squares does, and a NaN stays a NaN.
    """
    with_elements = [each for each in gradients if each.numel() > 0]  # no elements, no norm
    if not with_elements:
        return None
    largest = torch.nn.utils.get_total_norm(with_elements, float("inf"))
    finite = torch.isfinite(largest)
    if loss is not None:
        finite = finite & torch.isfinite(loss).all().to(finite.device, non_blocking=True)
    return (~finite).float()
