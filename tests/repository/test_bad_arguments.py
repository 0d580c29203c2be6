"""What a wrong argument of a public name says: the argument, what it was, what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import torchguard
from torchguard import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _transaction(**options: Any) -> Any:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchguard.transaction(model, optimizer, **options)


def _bucketed(**options: Any) -> Any:
    return torchguard.bucketed(**{"buckets": Buckets([4, 8]), **options})(_double)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "at": (
        lambda: torchguard.at(3),  # type: ignore[arg-type]
        TypeError,
        "at: t is of type int, expected a torch.Tensor",
    ),
    "bucketed-dims": (
        lambda: _bucketed(dims="x"),
        TypeError,
        "bucketed: dims is 'x', expected {argument: {dim: name}}, such as {'x': {1: 't'}}",
    ),
    "buckets": (
        lambda: Buckets([]),
        ValueError,
        "Buckets: sizes is empty, expected at least one size",
    ),
    "doctor": (
        lambda: torchguard.doctor(only="buffer-updat"),
        ValueError,
        "no defect 'buffer-updat' in the catalog; did you mean buffer-update",
    ),
    "guarded": (
        lambda: torchguard.guarded(torch.ones(2)),  # type: ignore[call-overload]
        TypeError,
        "guarded: function is a Tensor, expected a function or a method",
    ),
    "no_recompile": (
        lambda: torchguard.no_recompile(3),  # type: ignore[call-overload]
        TypeError,
        "no_recompile: function is int, expected a function: write @no_recompile, or",
    ),
    "sliced_assign": (
        lambda: torchguard.sliced_assign(np.ones(3), 0, 1.0),  # type: ignore[arg-type]
        TypeError,
        "sliced_assign: t is of type ndarray, expected a torch.Tensor",
    ),
    "transaction-also": (
        lambda: _transaction(also=3),
        TypeError,
        "transaction: also has 3, expected a tensor, a module, a torch.Generator or an object with",
    ),
    "transaction-also-several": (
        lambda: _transaction(also=[torch.zeros(()), "ema"]),
        TypeError,
        "transaction: also has 'ema', expected a tensor, a module",
    ),
    "transaction-scaler": (
        lambda: _transaction(scaler=3),
        TypeError,
        "transaction: scaler is of type int, expected a torch.amp.GradScaler",
    ),
    "transaction-scheduler": (
        lambda: _transaction(scheduler=nn.Linear(1, 1)),
        TypeError,
        "transaction: scheduler is of type Linear, expected a scheduler of torch.optim",
    ),
    "verified-group": (
        lambda: torchguard.verified(group="world"),
        TypeError,
        "verified: group is 'world', expected a process group, such as torch.distributed.group",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message_names_the_argument_and_what_was_expected(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message)
