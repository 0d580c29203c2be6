"""What a wrong argument of a public name says: the argument, what it was, what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchguard

ANY: Any = torchguard  # what is given here is of a wrong type


def transaction(**options: Any) -> Any:
    model = nn.Linear(2, 2)
    return torchguard.transaction(model, torch.optim.SGD(model.parameters()), **options)


MESSAGES: dict[str, Callable[[], Any]] = {
    "TypeError: bucketed: dims is 'x', expected {argument: {dim: name}}, such as {'x': {1: 't'}}": (
        lambda: ANY.bucketed(dims="x", buckets=[4, 8])(lambda x: x * 2)
    ),
    "TypeError: sliced_assign: t is of type ndarray, expected a torch.Tensor": (
        lambda: ANY.sliced_assign(np.ones(3), 0, 1.0)
    ),
    "TypeError: transaction: also has 3, expected a tensor, a module, a torch.Generator or an "
    "object with": lambda: transaction(also=3),
    "TypeError: transaction: also has 'ema', expected a tensor, a module": (
        lambda: transaction(also=[torch.zeros(()), "ema"])
    ),
    "TypeError: transaction: scheduler is of type Linear, expected a scheduler of torch.optim": (
        lambda: transaction(scheduler=nn.Linear(1, 1))
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_names_the_argument_and_what_was_expected(message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        MESSAGES[message]()
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
