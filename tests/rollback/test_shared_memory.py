"""``out=`` in shared memory: an error where torch would end the process, else what torch does."""

from __future__ import annotations

import re
from collections import namedtuple
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import kinds
from support.kinds import state
from support.ways import differences, ends_the_process, outcome_of
from torchguard import guarded, rollback_on_error, transaction
from torchguard.errors import NonResizableStorageError, UnrecoverableStepError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore", "error:torchguard. could not")
SLOW = pytest.mark.slow


def _shared(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor: torch.Tensor = torch.ones(*size, dtype=dtype).share_memory_()
    return tensor


def _parameter() -> torch.Tensor:
    """What Hogwild training shares."""
    return torch.nn.Linear(2, 2, bias=False).share_memory().weight


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _shared(2, 2)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: _shared(2, 2),
    "view": lambda: _shared(4, 8)[1:3, 1:7:3],
    "Parameter": _parameter,
    "subclass": lambda: _shared(2, 2).as_subclass(kinds.Watching),
    "conj view": lambda: _shared(2, 2, dtype=torch.complex64).conj(),
    "neg view": lambda: _shared(2, 2, dtype=torch.complex64).conj().imag,
    "inference": _inference,
}


def _like(tensor: torch.Tensor, *size: int) -> torch.Tensor:
    return torch.full(size or tuple(tensor.shape), 2, dtype=tensor.dtype)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.real if tensor.is_complex() else tensor


OUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: torch.add(_like(t, 500), 1, out=t),
    "zeros": lambda t: torch.zeros(500, dtype=t.dtype, out=t),
    "a tuple": lambda t: torch.max(
        _like(_real(t), 500, 3), -1, out=(t, torch.empty(0, dtype=torch.int64).share_memory_())
    ),
    "by place": lambda t: torch.tensordot(_like(t, 90, 2), _like(t, 2, 90), 1, t),
    "an input": lambda t: torch.cat([t.flatten(), _like(t, 500)], out=t),
    "a view of an input": lambda t: torch.mm(t.reshape(4, 1), _like(t, 1, 500), out=t),
}


CANNOT_GROW = r"out=: .*\) would need \d+ bytes.* holds \d+ bytes.*\.share_memory_\(\)"


def _grow(kind: str) -> list[str]:
    """Try every operation; say what went wrong."""
    wrong = []
    for name, call in OUT.items():
        if kind == "conj view" and name == "a tuple":
            continue  # torch orders no complex numbers
        tensor = KINDS[kind]()
        before = state(tensor)
        with guarded(), torch.inference_mode(kind == "inference"), torch.no_grad():
            error = outcome_of(lambda: call(tensor)).error  # noqa: B023
        changed = differences(before, state(tensor))
        if changed.pop("version", None):  # it may move on,
            changed.pop("grad_fn", None)  # and torch then makes another one for a view
        is_described = re.match(CANNOT_GROW, str(error))
        if changed or not is_described or not isinstance(error, NonResizableStorageError):
            wrong.append(f"{name}: {error!r}, {changed}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_growing_raises_and_changes_nothing(kind: str) -> None:
    assert not ends_the_process(lambda: _grow(kind))
    assert _grow(kind) == []


def _several(t: torch.Tensor, make: Callable[..., Any]) -> Any:
    return torch.max(_like(_real(t), 2, 2, 3), -1, out=make(t, _shared(2, 2, dtype=torch.int64)))


FITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "same shape": lambda t: torch.add(_like(t), 1, out=t),
    "smaller": lambda t: torch.add(_like(t, 2), 1, out=t),
    "in place": lambda t: torch.mul(t, 3, out=t),
    "overlapping": lambda t: torch.add(t.view(-1)[1:], 1, out=t.view(-1)[:-1]),
    "all in one place": lambda t: torch.add(_like(t), 1, out=t[:1, :1].expand(2, 2)),
    "detached": lambda t: torch.mul(t.detach(), 3, out=t),
    "the operands": lambda t: torch.mm(t, t, out=t),
    "wrong dtype": lambda t: torch.add(t, 1j, out=t),
    "with room": lambda t: torch.add(_like(t, 4), 1, out=t[:0]),
    "a bad index": lambda t: torch.index_select(_like(t, 9), 0, torch.tensor([0, 99]), out=t),
    "a tuple": lambda t: _several(t, lambda *outs: outs),
    "a list": lambda t: _several(t, lambda *outs: list(outs)),
    "a named tuple": lambda t: _several(t, namedtuple("pair", "values indices")),  # noqa: PYI024
    "a tuple of torch's": lambda t: _several(t, lambda *outs: torch.return_types.max(outs)),
}


def _shown(tensor: torch.Tensor) -> list[Any]:
    version = None if tensor.is_inference() else tensor._version
    elements = tensor.detach().resolve_conj().resolve_neg().tolist()
    return [type(tensor), tuple(tensor.shape), tensor.stride(), elements, version]


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.enable_grad, marks=SLOW)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_what_bare_torch_makes_of_it(kind: str, mode: Any) -> None:
    def outcome(call: Callable[[torch.Tensor], Any], scope: Any) -> list[Any]:
        tensor = KINDS[kind]()
        with torch.no_grad():
            (tensor if not tensor.is_inference() else tensor.clone()).fill_(5)
        storage = tensor.untyped_storage()
        kinds.CALLS.clear()
        with mode(), scope:
            ended = outcome_of(lambda: call(tensor))
        seen = len(kinds.CALLS)
        assert tensor.untyped_storage() is storage
        assert tensor.is_shared()
        if ended.error is not None:
            return [type(ended.error), seen]
        results = ended.result if isinstance(ended.result, tuple) else (ended.result,)
        shown = [(each is tensor, *_shown(each)[:-1]) for each in results]
        return [type(ended.result), seen, shown, _shown(tensor)]

    for name, call in FITS.items():
        assert outcome(call, guarded()) == outcome(call, nullcontext()), name


# ---- a block that gives shared memory up ----


def _in_rollback(tensor: torch.Tensor, *, data: bool) -> None:
    def fails() -> None:
        with suppress(KeyError), rollback_on_error(tensor, data=data):
            tensor.untyped_storage().resize_(0)
            raise KeyError

    with pytest.warns(UserWarning, match="made smaller, and can't grow again"):
        fails()


def _in_a_step() -> None:
    model = torch.nn.Linear(2, 2).share_memory()
    step = transaction(model, torch.optim.SGD(model.parameters()), undo="copy")
    with pytest.raises(UnrecoverableStepError, match="can't grow again"), step:
        model.weight.untyped_storage().resize_(0)
        raise KeyError


def _after_a_step() -> None:
    """Memory that is not shared, which the copies of the step would be written to."""
    models = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters()) for each in models]
    step = transaction(models, optimizers)
    with pytest.raises(UnrecoverableStepError, match="smaller than the tensor in it"), step:
        models[1](models[0](torch.ones(1, 2))).sum().backward()
        optimizers[0].step()
        models[0].weight.untyped_storage().resize_(0)
        raise KeyError


GIVES_UP: dict[str, Callable[[], None]] = {
    "metadata": lambda: _in_rollback(_shared(4), data=False),
    "elements": lambda: _in_rollback(_shared(4), data=True),
    "a view": lambda: _in_rollback(_shared(4)[1:3], data=True),
    "a step": _in_a_step,
    "after a step": _after_a_step,
}


@pytest.mark.parametrize("block", GIVES_UP)
def test_memory_that_can_not_come_back_is_said_to_be_lost(block: str) -> None:
    """No allocator can grow it again: the process would end in the rollback."""
    assert not ends_the_process(GIVES_UP[block])
    GIVES_UP[block]()
