"""Cases of torch's own OpInfo database: operators with ``out=``, and their in-place variants."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db

from support.kinds import empty_locked

NAMESPACES: tuple[Any, ...] = (
    *(torch, torch.linalg, torch.special, torch.fft, torch.nn.functional),
    *(torch.sparse, torch.Tensor),
)


class OutCase(NamedTuple):
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    """Of the results; more than one where the operator has several outputs."""

    def outs(self) -> tuple[torch.Tensor, ...]:
        return tuple(empty_locked(dtype) for dtype in self.dtypes)

    def call(self, outs: tuple[torch.Tensor, ...]) -> Any:
        out = outs[0] if len(outs) == 1 else outs
        return by_name(self.function)(*self.args, **self.kwargs, out=out)


def samples_of(op: Any, dtype: torch.dtype, device: str = "cpu") -> Iterator[Any]:
    """Like ``op.sample_inputs``, which reads the whole stack of frames for each sample."""
    torch.manual_seed(0)
    return iter(op.sample_inputs_func(op, device, dtype, requires_grad=False))


def _samples(op: Any) -> Iterator[Any]:
    supported = op.supported_dtypes("cpu")
    preferred = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64)
    dtypes = [dtype for dtype in preferred if dtype in supported] or list(supported)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes[:2]:
            with contextlib.suppress(Exception):  # a sample that this build of torch can't make
                yield from samples_of(op, dtype)


def _full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@functools.cache
def out_cases() -> tuple[OutCase, ...]:
    """One call for each operator with ``out=`` whose result has elements."""
    torch.manual_seed(0)
    found = (next(_out_cases_of(op), None) for op in op_db if op.supports_out)
    return tuple(case for case in found if case is not None)


def _out_cases_of(op: Any) -> Iterator[OutCase]:
    for sample in _samples(op):
        args = (sample.input, *sample.args)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = op.op(*args, **sample.kwargs)
        except Exception:  # noqa: BLE001, S112
            continue
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(each, torch.Tensor) and each.numel() for each in results):
            dtypes = tuple(each.dtype for each in results)
            yield OutCase(_full_name(op), op.op, args, sample.kwargs, dtypes)


@functools.cache
def places() -> dict[int, tuple[Any, str]]:
    """Where each function is reachable; taken while nothing is installed."""
    return {
        id(function): (namespace, name)
        for namespace in reversed(NAMESPACES)
        for name in dir(namespace)
        if callable(function := getattr(namespace, name))
    }


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Look a function up now, as programs do; OpInfo has looked it up long before any scope."""
    namespace, name = places().get(id(function), (None, ""))
    return function if namespace is None else getattr(namespace, name)
