"""Integer division by a zero element, compiled for the CPU, kills the process.

Inductor writes an integer ``//``, ``%`` or truncated division as the bare C++ operators.
Division by zero is undefined there and traps on x86 (SIGFPE), where eager raises
``RuntimeError: ZeroDivisionError``. Since 2.13 ``//`` and ``%`` go through helpers that
look at the divisor first; ``torch.div(..., rounding_mode="trunc")`` does not.

https://github.com/pytorch/pytorch/issues/143649
https://github.com/pytorch/pytorch/issues/183610
https://github.com/pytorch/pytorch/issues/178013
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _divide(dividend: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    truncated = torch.div(dividend, divisor, rounding_mode="trunc")
    return dividend // divisor, dividend % divisor, truncated


def probe() -> str | None:
    """Divide by zero: eager raises, compiled dies where the defect is live."""
    try:
        results = torch.compile(_divide)(torch.tensor([7]), torch.tensor([0]))
    except RuntimeError as error:
        if "ZeroDivisionError" in str(error):  # as eager raises
            return None
        raise
    floored, remainder, truncated = (result.item() for result in results)
    return f"compiled: 7 // 0 = {floored}, 7 % 0 = {remainder}, 7 / 0 = {truncated}; eager raises"


DEFECT = Defect(
    id="int-div-zero",
    summary="compiled on CPU: an integer division by a zero element kills the process",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/143649",
        "https://github.com/pytorch/pytorch/issues/183610",
        "https://github.com/pytorch/pytorch/issues/178013",
    ),
    family="compile",
    probe=probe,
    advice="Replace zeros first: divisor = torch.where(divisor == 0, 1, divisor).",
)
