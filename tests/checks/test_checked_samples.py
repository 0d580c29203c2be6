"""No false alarm: the samples of torch's own OpInfo database compute what they compute without."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves

import torchguard
from support.sweep import by_name, places

NAMES = {
    *("index_select", "gather", "take", "take_along_dim", "index_put", "index_add", "index_copy"),
    *("index_fill", "index_reduce", "put", "scatter", "scatter_add", "scatter_reduce"),
    *("__getitem__", "bincount", "multinomial", "repeat_interleave", "floor_divide", "remainder"),
    *("fmod", "div", "__rmod__", "__rdiv__"),
    *(
        f"nn.functional.{name}"
        for name in (
            *("embedding", "embedding_bag", "one_hot", "nll_loss", "cross_entropy", "ctc_loss"),
            "binary_cross_entropy",
        )
    ),
}
OPERATORS = [
    operator
    for operator in op_db
    if operator.name in NAMES and operator.variant_test_name not in {"trunc_rounding_cuda"}
]
DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool)
WITH_INDUCTOR = {
    *("index_select", "gather", "take", "index_add", "scatter_add", "index_put", "__getitem__"),
    *("nn.functional.embedding", "nn.functional.nll_loss", "floor_divide"),
}


def _id(operator: Any) -> str:
    return f"{operator.name}-{operator.variant_test_name}".rstrip("-")


def _result(call: Callable[..., Any], sample: Any) -> Any:
    """Call with copies, from one seed; what was raised stands for a result."""
    torch.manual_seed(0)
    arguments = copy.deepcopy((sample.input, sample.args, sample.kwargs))
    try:
        results = call(arguments[0], *arguments[1], **arguments[2])
        return [
            each for each in tree_leaves((results, arguments)) if isinstance(each, torch.Tensor)
        ]
    except Exception as error:  # noqa: BLE001 - compared by its type
        return error


def _assert_equal(checked: Any, bare: Any) -> None:
    if isinstance(bare, Exception):
        assert isinstance(checked, type(bare)), (checked, bare)
    else:
        assert not isinstance(checked, Exception), checked
        torch.testing.assert_close(checked, bare, rtol=0, atol=0, equal_nan=True)


def _samples(operator: Any, most: int | None = None) -> list[Any]:
    found = []
    for dtype in DTYPES:
        if dtype in operator.dtypes:
            found += list(itertools.islice(operator.sample_inputs("cpu", dtype), most))
            if operator.error_inputs_func is not None and dtype is torch.float32:
                found += [each.sample_input for each in operator.error_inputs("cpu")]
    return found


@pytest.fixture(autouse=True)
def places_of_torch() -> None:
    places()  # remembered, so looked up outside of every scope


@pytest.mark.parametrize("operator", OPERATORS, ids=_id)
def test_eager(operator: Any) -> None:
    """Functions, methods and methods that write, each with all samples and all bad samples."""
    calls = [operator.op, operator.method_variant, operator.inplace_variant]
    for sample, call in itertools.product(_samples(operator), filter(None, calls)):
        bare = _result(call, sample)
        with torchguard.checked():
            checked = _result(by_name(call), sample)
        _assert_equal(checked, bare)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("operator", OPERATORS, ids=_id)
def test_compiled(operator: Any) -> None:
    """What AOTAutograd compiles, with the checks and without, in the same number of graphs."""
    for sample in _samples(operator, most=3):
        _compare_compiled(operator.op, sample, "aot_eager")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_inductor(dtype: torch.dtype) -> None:
    """All of these in one graph: a compile takes seconds."""
    chosen = [each for each in OPERATORS if each.name in WITH_INDUCTOR and dtype in each.dtypes]
    functions = [each.op for each in chosen]
    samples = [next(iter(each.sample_inputs("cpu", dtype))) for each in chosen]

    def call(inputs: Any, given: Any) -> Any:
        pairs = zip(functions, inputs, given, strict=True)
        return [function(first, *args, **kwargs) for function, first, (args, kwargs) in pairs]

    given = [(each.args, each.kwargs) for each in samples]
    sample = SampleInput([each.input for each in samples], args=(given,))
    assert not isinstance(_compare_compiled(call, sample), Exception)


class Graphs:
    """A backend that counts what it compiles."""

    def __init__(self, inner: str) -> None:
        self._inner = inner
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend(self._inner)(graph, inputs)


def _compare_compiled(call: Any, sample: Any, backend: str = "inductor") -> Any:
    torch.compiler.reset()
    graphs = Graphs(backend)

    def function(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        return results  # noqa: RET504 - more than a call, so that it has a frame to compile

    compiled = torch.compile(function, backend=graphs)
    bare, count = _result(compiled, sample), graphs.count
    with torchguard.checked():
        checked = _result(compiled, sample)
    if not isinstance(bare, Exception):
        assert graphs.count == 2 * count
    _assert_equal(checked, bare)
    return bare
