"""An indexed write that raises has written part of its rows, and autograd does not know.

The in-place index operators check each index when they come to it: one bad index
raises after the good rows were written. The version counter of the tensor is
bumped only after a call that succeeded, so a backward that saved the tensor
before uses the spoiled data and returns a wrong gradient instead of refusing.

Nobody has reported it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from torchguard.defects.catalog import Defect

_BAD = torch.tensor([0, 9])  # row 0 exists, row 9 does not
_NEW = torch.tensor([50.0, 60.0])
_EVERYWHERE = torch.ones(4, dtype=torch.bool)  # 4 places for the 2 new values


def _set_item(t: Tensor) -> None:
    t[_BAD] = _NEW


_Write = Callable[[Tensor], object]

# Name, the call that can't succeed.
_CASES: tuple[tuple[str, _Write], ...] = (
    ("index_copy_", lambda t: t.index_copy_(0, _BAD, _NEW)),
    ("index_add_", lambda t: t.index_add_(0, _BAD, _NEW)),
    ("index_fill_", lambda t: t.index_fill_(0, _BAD, 50.0)),
    ("index_put_", lambda t: t.index_put_((_BAD,), _NEW)),
    ("index_put_(accumulate)", lambda t: t.index_put_((_BAD,), _NEW, accumulate=True)),
    ("setitem", _set_item),
    ("scatter_", lambda t: t.scatter_(0, _BAD, _NEW)),
    ("scatter_add_", lambda t: t.scatter_add_(0, _BAD, _NEW)),
    ("scatter_reduce_", lambda t: t.scatter_reduce_(0, _BAD, _NEW, "sum")),
    ("index_reduce_", lambda t: t.index_reduce_(0, _BAD, _NEW, "prod")),
    ("put_", lambda t: t.put_(_BAD, _NEW)),
    ("masked_scatter_", lambda t: t.masked_scatter_(_EVERYWHERE, _NEW)),
)


def _gradient_error(call: _Write) -> float:
    """Return how wrong the gradient of w * t is when ``call`` fails before the backward."""
    t = torch.arange(1.0, 5.0)
    w = torch.ones(4, requires_grad=True)
    right = t.clone()  # d(w * t).sum() / dw is t as it was in the forward
    loss = (w * t).sum()
    try:
        call(t)
    except (RuntimeError, IndexError):
        pass
    else:
        return 0.0
    try:
        (gradient,) = torch.autograd.grad(loss, w)
    except RuntimeError:  # autograd noticed that t was modified
        return 0.0
    return (gradient - right).abs().max().item()


def probe() -> str | None:
    """Let each write fail between a forward and its backward and look at the gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that index_reduce_ is in beta state
        errors = {name: _gradient_error(call) for name, call in _CASES}
    wrong = [name for name, error in errors.items() if error > 0]
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(_CASES)} failed writes: wrong gradient; "
        f"{first} by {errors[first]:g}, no message"
    )


def guarded_probe() -> str | None:
    """Run it in both scopes: the plain one bumps the version, the other restores the data."""
    import torchguard  # noqa: PLC0415 - the guarded run alone needs the guards

    for data in (False, True):
        with torchguard.guarded(data=data):
            seen = probe()
        if seen is not None:
            return f"data={data}: {seen}"
    return None


DEFECT = Defect(
    id="index-partial",
    summary="an indexed write that raises has written part of its rows; backward uses them",
    upstream=(),
    family="memory",
    probe=probe,
    guards=("guarded",),
    guarded_probe=guarded_probe,
)
