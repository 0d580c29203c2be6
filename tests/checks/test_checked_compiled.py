"""What is compiled in a scope is checked, and nothing else of it changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchguard
from support.compiled import Counting
from torchguard.errors import IndexOutOfRangeError, ZeroDivisorError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.arange(12.0).reshape(4, 3)
GOOD, BAD = torch.tensor([0, 3]), torch.tensor([0, -1])


def select(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index) * 2


@pytest.mark.slow
def test_bare_takes_a_padding_id() -> None:
    """What this is for: index -1 is the last row of an embedding, in compiled code alone."""
    with pytest.raises(IndexError):
        select(X, BAD)
    compiled = torch.compile(select, backend="inductor")
    assert compiled(X, BAD).equal(2 * X[BAD])
    with (
        torchguard.checked(),
        pytest.raises(IndexOutOfRangeError, match=r"d.py:\d+: index:"),
    ):
        compiled(X, BAD)


def test_each_side_of_a_scope_has_its_own_graph() -> None:
    """One each, however often scopes are entered; the one outside is the one without checks."""
    backend = Counting("aot_eager")
    compiled = torch.compile(select, backend=backend)
    compiled(X, GOOD)
    for _ in range(3):
        with torchguard.checked():
            assert compiled(X, GOOD).equal(2 * X[GOOD])
        compiled(X, GOOD)
    assert len(backend.graphs) == 2
    bare, checked = backend.graphs
    assert "clamp" in str(checked)
    assert set(bare) < set(checked)
    with torchguard.checked(), torchguard.no_recompile():
        compiled(X, GOOD)


def test_a_graph_without_anything_to_check_is_the_same() -> None:
    backend = Counting("aot_eager")
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with torchguard.checked():
        compiled(X)
        bare = torch.compile(lambda x: x.sin() + 1, backend=backend)
    bare(X)
    assert backend.graphs[0] == backend.graphs[1]


@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_shapes(dynamic: bool | None) -> None:
    """The range is that of the call's sizes, in as many graphs as without."""
    counts = []
    for scope in (False, True):
        torch.compiler.reset()
        backend = Counting("aot_eager")
        compiled = torch.compile(lambda x, i: x[i] + x.take(i), backend=backend, dynamic=dynamic)
        x = torch.arange(30.0)
        with torchguard.checked() if scope else torch.no_grad():
            for size in (5, 6, 7, 8):
                index = torch.arange(-size, size)
                assert compiled(x[:size], index).equal(2 * x[:size][index])
                if scope:
                    for bad in (-size - 1, size):
                        with pytest.raises(IndexOutOfRangeError, match=f"{-size} to {size - 1}, "):
                            compiled(x[:size], torch.cat((index, torch.tensor([bad])))[1:])
        counts.append(len(backend.graphs))
    assert counts[0] == counts[1]


def test_gradients_and_mutated_inputs() -> None:
    def step(x: Tensor, index: Tensor, buffer: Tensor) -> Tensor:
        buffer.index_add_(0, index, x.detach()[: len(index)])
        return functional.cross_entropy(x[index], index % 3) + functional.embedding(index, x).sum()

    results = []
    for scope in (False, True):
        x, buffer = X.clone().requires_grad_(), torch.zeros(4, 3)
        with torchguard.checked() if scope else torch.enable_grad():
            loss = torch.compile(step, backend="aot_eager")(x, GOOD, buffer)
            loss.backward()
        results.append((loss, x.grad, buffer))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_mode_for_training_and_one_for_none() -> None:
    """Under inference mode and autocast, too."""
    compiled = torch.compile(lambda x, i: (x @ x.T)[i], backend="aot_eager")
    for mode in (torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with torchguard.checked(), mode():
            assert compiled(X, GOOD).shape == (2, 4)
            with pytest.raises(IndexOutOfRangeError):
                compiled(X, torch.tensor([4]))


def test_with_verified_in_either_order() -> None:
    """The checks are in the graph that is verified; the verdict is equal."""
    inside = torchguard.verified(select, backend="aot_eager")
    with torchguard.checked():
        inside(X, GOOD)
        with pytest.raises(IndexOutOfRangeError):
            inside(X, BAD)
    outside = torchguard.verified(torchguard.checked()(select), backend="aot_eager")
    outside(X, GOOD)
    for checked in (inside, outside):
        assert {graph.status for graph in checked.stats().graphs} == {"verified"}


def test_with_bucketed() -> None:
    bucketed = torchguard.bucketed(
        dims={"index": {0: "n"}},
        buckets={"n": torchguard.Buckets([4, 8])},
        compile={"backend": "aot_eager"},
    )(lambda index: functional.embedding(index, X))
    with torchguard.checked():
        assert bucketed(torch.tensor([1, 2, 3])).equal(X[1:])
        with pytest.raises(IndexOutOfRangeError):
            bucketed(torch.tensor([1, 2, 4]))


def test_graph_breaks_and_transforms() -> None:
    """Between two graphs the eager check stands; inside of vmap nothing is checked."""

    def broken(x: Tensor, index: Tensor) -> Tensor:
        y = x[index]
        torch._dynamo.graph_break()
        return y.sum() + torch.bincount(index).sum()

    def mapped(x: Tensor, index: Tensor) -> Tensor:
        return torch.vmap(lambda row, i: row[i])(x, index[:, None])[:, 0] + x[index, 0]  # type: ignore[no-any-return]

    index = torch.tensor([0, 1, 2, 2])
    with torchguard.checked():
        assert torch.compile(broken, backend="aot_eager")(X, index) == X[index].sum() + 4
        for bad in (-5, 4):
            with pytest.raises(IndexOutOfRangeError):
                torch.compile(broken, backend="aot_eager")(X, torch.tensor([bad]))
        compiled = torch.compile(mapped, backend="aot_eager")
        assert compiled(X, index).equal(mapped(X, index))
        grad = torch.func.grad(lambda x: x[index].sum())
        assert torch.compile(grad, backend="aot_eager")(X).equal(grad(X))


def test_activation_checkpointing_still_works() -> None:
    """Its body is not checked, as the docstring says; what stands around it is."""

    def call(x: Tensor, index: Tensor) -> Tensor:
        return checkpoint(lambda t: t[index].sin(), x, use_reentrant=False)[index % 2]  # type: ignore[no-any-return]

    x = X.clone().requires_grad_()
    with torchguard.checked():
        compiled = torch.compile(call, backend="aot_eager")(x, GOOD)
    assert compiled.equal(call(x, GOOD))


def test_a_scope_inside_of_compiled_code_does_nothing() -> None:
    def call(x: Tensor, index: Tensor) -> Tensor:
        with torchguard.checked():
            return x.index_select(0, index)

    assert torch.compile(call, backend="aot_eager", fullgraph=True)(X, GOOD).equal(X[GOOD])


def test_a_divisor_that_is_computed() -> None:
    compiled = torch.compile(lambda x, n: x // (n - 1) + x % (n - 1), backend="aot_eager")
    x, n = torch.arange(3), torch.tensor([2, 3, 4])
    with torchguard.checked():
        assert compiled(x, n).equal(x // (n - 1) + x % (n - 1))
        with pytest.raises(ZeroDivisorError):
            compiled(x, n - 1)


def test_installed() -> None:
    """What was compiled before is compiled again with the checks, and used again afterwards."""
    backend = Counting("aot_eager")
    compiled = torch.compile(select, backend=backend)
    compiled(X, GOOD)
    with torchguard.install("checks"), pytest.raises(IndexOutOfRangeError):
        compiled(X, BAD)
    compiled(X, GOOD)
    assert len(backend.graphs) == 2


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_no_checks(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(0, index)

    with torchguard.checked():
        program = torch.export.export(Module(), (X, GOOD), strict=strict)
    names = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert names == ["index_select"]
