"""verified and bucketed around one function, in either order: every bucket's graph is checked."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from support.miscompiling import spoiling
from torchguard import (
    Buckets,
    MiscompilationWarning,
    bucketed,
    verification_report,
    verified,
    verified_backend,
)

if TYPE_CHECKING:
    from collections.abc import Callable

IN_BUCKETS: dict[str, Any] = {"dims": {"x": {0: "t"}}, "buckets": Buckets([4, 8])}
LENGTHS = (3, 6, 2)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


wrong = spoiling(lambda outputs, _: [outputs[0] + 1, *outputs[1:]])


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 2


MAKERS: dict[str, Callable[[Any], Any]] = {
    "inside": lambda backend: bucketed(verified(backend=backend)(double), **IN_BUCKETS),
    "around": lambda backend: verified(backend=backend)(bucketed(double, **IN_BUCKETS)),
    "inside of a module": lambda b: bucketed(verified(backend=b)(Scaled()), **IN_BUCKETS),
    "around a module": lambda b: verified(backend=b)(bucketed(Scaled(), **IN_BUCKETS)),
    "as a backend": lambda backend: bucketed(
        double, **IN_BUCKETS, compile={"backend": verified_backend(backend)}
    ),
    "around settings": lambda backend: verified()(
        bucketed(double, **IN_BUCKETS, compile={"backend": backend})
    ),
}


@pytest.mark.parametrize("how", MAKERS)
def test_each_buckets_graph_is_checked_and_what_is_wrong_replaced(how: str) -> None:
    make = MAKERS[how]
    right = make("aot_eager")
    before = len(verification_report().graphs)
    for length in LENGTHS:
        assert right(torch.ones(length)).tolist() == [2] * length
    graphs = verification_report().graphs[before:]
    assert [(graph.status, graph.runs) for graph in graphs] == [("verified", "aot_eager")] * 2
    assert right.stats().hits == {(4,): 2, (8,): 1}

    torch._dynamo.reset()
    spoiled = make(wrong)
    before = len(verification_report().graphs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in LENGTHS:
            assert spoiled(torch.ones(length)).tolist() == [2] * length
    kinds = [warning.category for warning in caught]
    assert kinds.count(MiscompilationWarning) == 2
    assert [graph.status for graph in verification_report().graphs[before:]] == ["mismatched"] * 2


def test_a_method_that_is_bucketed() -> None:
    class Model:
        @verified(backend="aot_eager")
        @bucketed(**IN_BUCKETS)  # type: ignore[untyped-decorator]
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    before = len(verification_report().graphs)
    assert Model().twice(torch.ones(3)).tolist() == [2, 2, 2]
    assert [graph.status for graph in verification_report().graphs[before:]] == ["verified"]


def test_a_module_stays_the_module_it_was() -> None:
    inner = Scaled()
    module = bucketed(inner, **IN_BUCKETS)
    checked = verified(backend="aot_eager")(module)
    assert checked is module
    assert type(checked).__name__ == "Scaled"
    assert list(checked.state_dict()) == ["weight"]
    again = pickle.loads(pickle.dumps(bucketed(Scaled(), **IN_BUCKETS)))  # noqa: S301
    assert again(torch.ones(3)).tolist() == copy.deepcopy(module)(torch.ones(3)).tolist()
    before = len(verification_report().graphs)
    inner(torch.ones(3))  # it shares everything but the buckets, and is not compiled
    assert len(verification_report().graphs) == before


def test_settings_given_twice_are_refused() -> None:
    compiled = bucketed(double, **IN_BUCKETS, compile={"backend": "eager"})
    with pytest.raises(TypeError, match="keeps its own backend, mode and options"):
        verified(backend="aot_eager")(compiled)
    with pytest.raises(ValueError, match="compiled already"):
        bucketed(verified(backend="aot_eager")(Scaled()), **IN_BUCKETS, compile=True)


@pytest.mark.slow
def test_what_torch_compile_has_made_is_checked_in_buckets_too() -> None:
    for function in (double, Scaled()):
        made: Any = torch.compile(function, options={"max_fusion_size": 32})
        checked: Any = verified()(bucketed(made, **IN_BUCKETS))
        before = len(verification_report().graphs)
        assert checked(torch.ones(3)).tolist() == [2, 2, 2]
        graphs = verification_report().graphs[before:]
        assert [(graph.status, graph.runs) for graph in graphs] == [("verified", "inductor")]
