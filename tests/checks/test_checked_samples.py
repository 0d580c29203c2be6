"""No false alarm: the samples of torch's own OpInfo database compute what they compute without."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torchguard
from support.compiled import Counting
from support.slow import slow_except
from support.sweep import by_name, places, samples_of

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


def _samples(operator: Any, most: int, *dtypes: torch.dtype) -> list[Any]:
    """Some samples of each dtype."""
    found = []
    for dtype in dtypes:
        if dtype in operator.dtypes:
            found += list(itertools.islice(samples_of(operator, dtype), most))
    return found


QUICK = ("gather", "index_put", "floor_divide", "nn.functional.embedding")


@pytest.mark.parametrize("operator", slow_except(OPERATORS, *QUICK, name=_id), ids=_id)
def test_eager(operator: Any) -> None:
    """Functions, methods and methods that write, each with samples and all bad samples."""
    places()  # remembered, so looked up outside of every scope
    samples = _samples(operator, 6, torch.float32, torch.int64, torch.uint8, torch.bool)
    if operator.error_inputs_func is not None:
        samples += [each.sample_input for each in operator.error_inputs("cpu")]
    calls = [operator.op, operator.method_variant, operator.inplace_variant]
    for sample, call in itertools.product(samples, filter(None, calls)):
        bare = _result(call, sample)
        with torchguard.guarded("checks"):
            checked = _result(by_name(call), sample)
        _assert_equal(checked, bare)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("operator", [each for each in OPERATORS if _id(each) in QUICK], ids=_id)
def test_compiled(operator: Any) -> None:
    """What AOTAutograd compiles, with the checks and without, in the same number of graphs.

    Every operator is compiled in ``test_checked_values.py``, with good values and bad ones.
    """
    for sample in _samples(operator, 1, torch.float32, torch.int64):
        torch.compiler.reset()
        counting = Counting("aot_eager")

        def function(*args: Any, **kwargs: Any) -> Any:
            results = operator.op(*args, **kwargs)
            return results  # noqa: RET504 - more than a call, so that it has a frame to compile

        compiled = torch.compile(function, backend=counting)
        bare, count = _result(compiled, sample), len(counting.graphs)
        with torchguard.guarded("checks"):
            checked = _result(compiled, sample)
        if not isinstance(bare, Exception):
            assert len(counting.graphs) == 2 * count
        _assert_equal(checked, bare)
