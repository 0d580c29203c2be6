"""verified: what is a mismatch, how the warning names it, and what is corrected silently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.miscompiling import verified_backend
from torchguard import MiscompilationWarning, verified
from torchguard.equivalence.compare import same_strides
from torchguard.verification.graph import why_not_twice

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- strides of outputs


def first_cache(empty: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(0,), (B, T, D) -> (B, H, T, D / H): the first keys of a decoder, and their double."""
    keys = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    return torch.cat([empty, keys], dim=-2), keys * 2


# The decompositions that inductor has, and no code generated: `cat` drops what is empty there.
DECOMPOSED = "aot_eager_decomp_partition"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning")
def test_a_first_cache_gets_the_strides_eager_gives_it(*, dynamic: bool) -> None:
    """A decoder's first keys are ``cat([empty, keys])``: no warning, and view() works."""
    compiled = verified(backend=DECOMPOSED, dynamic=dynamic)(first_cache)
    for time in (7, 9, 4) if dynamic else (7, 7):
        empty, x = torch.tensor([]), torch.randn(2, time, 8, requires_grad=True)
        want, found = first_cache(empty, x), compiled(empty, x)
        assert [value.stride() for value in found] == [value.stride() for value in want]
        assert found[0].view(2, 2 * time, 4)._base is found[0]
        assert not found[0]._is_view()
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        torch.autograd.backward(found, [torch.ones_like(value) for value in found])
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 3))
    (record,) = compiled.stats().graphs
    assert (record.status, record.runs) == ("verified", DECOMPOSED)
    assert record.reason == f"{DECOMPOSED} gives outputs other strides, they get eager's: 0"


def test_strides_that_shared_memory_needs_are_a_fault() -> None:
    """A copy with eager's strides would not share memory any more."""

    def transposed(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        return lambda *inputs: [value.t() for value in graph(*inputs)]

    compiled = verified(backend=transposed)(lambda x: x.view(3, 3))
    x = torch.randn(3, 3)
    with pytest.warns(MiscompilationWarning, match=r"strides \(1, 3\), eager has \(3, 1\)"):
        found = compiled(x)
    assert found.data_ptr() == x.data_ptr()
    assert found.stride() == (3, 1)


def test_strides_are_the_same_where_view_can_not_tell() -> None:
    for expected, actual, same in (
        ((6, 1), (6, 1), True),
        ((6, 1), (8, 1), False),  # padded rows: view(-1) raises
        ((8, 1), (6, 1), True),
        ((6, 1), (1, 4), False),
        ((0, 1), (6, 1), True),
        ((6, 1), (0, 1), False),
    ):
        made = [torch.empty_strided((4, 6), strides) for strides in (expected, actual)]
        assert same_strides(*made) is same


# --- custom operators

CALLS: list[str] = []


def operator_called(name: str) -> Any:
    @torch.library.custom_op(f"torchguard_tests::{name}", mutates_args=())
    def made(x: torch.Tensor) -> torch.Tensor:
        CALLS.append(name)
        return x * 2

    made.register_fake(torch.empty_like)
    made.register_autograd(lambda _, gradient: gradient * 2)
    return made


pure = operator_called("pure")
sending = operator_called("sending")


@torch.library.custom_op("torchguard_tests::filling", mutates_args=("x",))
def filling(x: torch.Tensor) -> None:
    x.fill_(3)


@filling.register_fake
def _(x: torch.Tensor) -> None:
    pass


@pytest.fixture
def with_token() -> Iterator[None]:
    """Give the operator ``sending`` a token, as an operator that prints has."""
    operator = torch.ops.torchguard_tests.sending.default
    effects: Any = torch._higher_order_ops.effects
    handle = effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    yield
    effects._deregister_effectful_op(operator) if handle is None else handle.destroy()


def test_a_custom_operator_that_writes_nothing_is_checked() -> None:
    compiled = verified(backend="aot_eager")(lambda x: pure(x) + 1)
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert [record.status for record in compiled.stats().graphs] == ["verified"]
    torch._dynamo.reset()
    spoiled = verified(backend=off_by_one)(lambda x: pure(x) + 1)
    with pytest.warns(MiscompilationWarning):
        assert spoiled(torch.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.usefixtures("with_token")
def test_a_custom_operator_with_a_token_or_that_writes_runs_once() -> None:
    compiled = verified(backend="eager")(lambda x: sending(x) + 1)
    CALLS.clear()
    compiled(torch.ones(3))
    assert CALLS == ["sending"]
    (record,) = compiled.stats().graphs
    assert record.status == "unverified"
    assert record.reason.startswith("torchguard_tests::sending is a custom operator whose schema")

    def writes(x: torch.Tensor) -> torch.Tensor:
        filling(x)
        return x + 1

    compiled = verified(backend="eager")(writes)
    assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
    assert [record.status for record in compiled.stats().graphs] == ["unverified"]


def test_with_other_ranks_a_custom_operator_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an all-reduce: the schema does not say, and a second one would wait for ever."""
    graph = torch.fx.Graph()
    called = graph.call_function(torch.ops.torchguard_tests.pure.default, (graph.placeholder("x"),))
    graph.output((called,))
    module = torch.fx.GraphModule({}, graph)
    assert why_not_twice(module) is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "may communicate with other ranks" in (why_not_twice(module) or "")


# --- names


def inner(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def tripled_twice(x: torch.Tensor) -> torch.Tensor:
    y = inner(x)
    torch._dynamo.graph_break()
    return inner(y)


class Tripling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tripled_twice(x)


def off_by_one(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    return lambda *inputs: [value + 1 for value in graph(*inputs)]


def test_the_warning_names_what_was_decorated_and_the_backend() -> None:
    """The last statement is in ``inner``, and torch.compile has done nothing wrong."""
    with pytest.warns(MiscompilationWarning) as caught:
        verified(backend=off_by_one)(Tripling())(torch.ones(3))
    first = f"the backend off_by_one (torch {torch.__version__}) compiled Tripling wrong:"
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2  # one on each side of the graph break
    for text in texts:
        assert text.splitlines()[0] == first
        assert "none: off_by_one is a callable, which a" in text  # why there is no reproducer


def test_without_a_decorator_it_is_what_dynamo_compiled() -> None:
    backend = verified_backend("eager")
    torch.compile(tripled_twice, backend=backend)(torch.ones(3))
    assert [graph.function for graph in backend.stats().graphs] == ["tripled_twice"] * 2
