"""verified(against="python"): what Dynamo traces wrong is found, and what is right passes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.miscompiling import against, row
from torchguard import MiscompilationWarning, verified
from torchguard.errors import MiscompilationError, TorchGuardWarning

pytestmark = pytest.mark.usefixtures("fresh_reports")


def said(compiled: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Call it; return what it returns and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compiled(*args, **kwargs)
    return result, [str(w.message) for w in caught if w.category is MiscompilationWarning]


# --- what Dynamo traces wrong


def test_replaced_code_is_found_by_a_sample() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        del self
        return x * 3

    compiled = against(Model(), every=4)
    for _ in range(3):
        compiled(torch.ones(2))
    Model.scaled.__code__ = other.__code__
    found, texts = said(compiled, torch.ones(2))
    assert found.tolist() == [3, 3]
    assert [text.splitlines()[0].partition(" traced ")[2] for text in texts] in (
        ["`Model` wrong:"],
        [],
    )
    if texts:
        assert "last right comparison: 3 calls ago" in texts[0]
        assert said(compiled, torch.ones(2))[1] == []


# --- planted: a backend that is wrong where the check of the graph does not look


def trace_as(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """Make Dynamo trace functions of these names as other ones, as if it had a defect."""
    module = importlib.import_module("torchguard.verification.against")
    original = module.compare_with_python

    def compare(_: Any, function: Any, backend: Any) -> Any:
        wrong = torch.compile(replaced[function.__name__], backend="eager")
        return original(wrong, function, backend)

    monkeypatch.setattr(module, "compare_with_python", compare)


STATE: list[Any] = []
TABLE: dict[str, Any] = {"a": 1}


def returns(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def appends(x: torch.Tensor) -> torch.Tensor:
    STATE.append(x + 1)
    return x * 2


def sets(x: torch.Tensor) -> torch.Tensor:
    TABLE["a"] = 2
    return x * 2


def raises(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise ValueError("positive")
    return x * 2


def detaches(x: torch.Tensor) -> torch.Tensor:
    return x * x.detach()


def squares(x: torch.Tensor) -> torch.Tensor:
    return x * x


def masks(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, torch.tensor([-1e9, 0.5]), x)


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum() * 500


COUNTER = torch.full((1,), 1e5)


def increments(x: torch.Tensor) -> torch.Tensor:
    COUNTER.add_(1)
    return x * 2


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.tensor([1.0, -14.0])).softmax(0)


def halves_the_small_one(x: torch.Tensor) -> torch.Tensor:
    return probabilities(x) * torch.tensor([1.0, 0.5])


@pytest.mark.parametrize(
    ("function", "traced_as", "what"),
    [
        (returns, lambda x: x * 3, "output result: 2 of 2 elements differ"),
        (returns, lambda x: (x * 2, x), "output len(result)"),
        (returns, lambda x: (x * 2).double(), "dtype"),
        (writes, lambda x: (x + 1) * 2, "x after the call"),
        (appends, returns, "len(STATE) after the call: 0, eager has 1"),
        (sets, returns, "TABLE['a'] after the call: 1, eager has 2"),
        (raises, returns, "does not raise, eager raises ValueError"),
        (returns, raises, "raises ValueError: positive, eager does not"),
        (detaches, squares, "gradient of x"),
        (returns, lambda x: (x * 2).detach(), "requires_grad"),
        # Both runs are eager: what is large in a tensor excuses nothing.
        (masks, lambda x: masks(x) * torch.tensor([1.0, 0.5]), "output result: 1 of 2 elements"),
        (returns, lambda x: x * 2.0001, "output result: 2 of 2 elements differ"),
        (increments, returns, "COUNTER after the call"),
        (probabilities, halves_the_small_one, "output result: 1 of 2 elements"),
        (sums, lambda x: sums(x) + 0.04, "output result: 1 of 1 elements differ"),
        (sums, lambda x: sums(x * 1.0) * (1 + 1e-5), "output result: 1 of 1 elements differ"),
    ],
)
def test_each_kind_of_difference_is_found(
    monkeypatch: pytest.MonkeyPatch, function: Any, traced_as: Any, what: str
) -> None:
    trace_as(monkeypatch, **{function.__name__: traced_as})
    compiled = against(function)
    seen: list[Any] = []
    for call in (compiled, function):
        STATE.clear()
        TABLE["a"] = 1
        COUNTER.fill_(1e5)
        x, found = torch.ones(2, requires_grad=function is not writes), None
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ValueError):
            warnings.simplefilter("always")
            found = call(x)
        texts = [str(w.message) for w in caught if w.category is MiscompilationWarning]
        assert [what in text for text in texts] == [True] * (call is compiled)
        seen.append((found, x, list(STATE), dict(TABLE), COUNTER.clone()))
    torch.testing.assert_close(seen[0], seen[1])
    assert (row(compiled).status, row(compiled).runs) == ("mismatched", "Python")
    # From then on the function runs as Python, and says nothing.
    with contextlib.suppress(ValueError):
        assert said(compiled, torch.ones(2))[1] == []
    assert any("traced `" in e.message for e in torchguard.events() if e.kind == "miscompiled")


def test_on_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_as(monkeypatch, returns=lambda x: x * 3)
    refused = against(returns, on_mismatch="raise")
    for _ in range(2):
        with pytest.raises(MiscompilationError, match="traced `returns` wrong"):
            refused(torch.ones(2))
    torch._dynamo.reset()
    warned = against(returns, on_mismatch="warn")
    found, texts = said(warned, torch.ones(2))
    assert found.tolist() == [3, 3]
    assert "the wrong version still runs" in texts[0]


# --- what is right passes, and nothing of the comparison is left


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.shape[0])
        result: torch.Tensor = self.norm(self.linear(x))
        return result


def test_state_changes_once() -> None:
    torch.manual_seed(0)
    model = Counting()
    compiled = against(model, "aot_eager")
    x = torch.randn(4, 3)
    _, texts = said(compiled, x)
    assert texts == []
    assert (model.calls, model.seen) == (1, [4])
    assert model.norm.num_batches_tracked is not None
    assert int(model.norm.num_batches_tracked) == 1
    want = Counting()
    want.load_state_dict(model.state_dict())
    assert model.norm.running_mean is not None
    assert torch.allclose(model.norm.running_mean, 0.1 * model.linear(x).mean(0), atol=1e-6)
    assert row(compiled).status == "verified"


class Layer:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Cache:
    seen: list[int] = []  # noqa: RUF012 - that it is shared is the point

    def __init__(self) -> None:
        self.layers = [Layer()]


def add_one(counts: list[int]) -> None:
    counts.append(1)


def test_objects_inside_objects_and_names_of_the_closure_change_once() -> None:
    cache, calls, counts = Cache(), 0, list[int]()
    count = functools.partial(add_one, counts)

    def appends_to(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        nonlocal calls
        calls += 1
        count()
        cache.layers[0].keys.append(x)
        Cache.seen.append(1)
        return torch.cat(cache.layers[0].keys)

    Cache.seen.clear()
    compiled = against(appends_to)
    for number in (1, 2):
        found, _ = said(compiled, torch.ones(2), cache)
        assert found.shape == (2 * number,)
        assert [len(cache.layers[0].keys), calls, len(Cache.seen), len(counts)] == [number] * 4


@pytest.mark.parametrize("place", [None, slice(1, None)])
def test_a_tensor_with_a_history_that_is_written(place: Any) -> None:
    def run(function: Any) -> torch.Tensor:
        w = torch.full((3,), 3.0, requires_grad=True)
        x = w * 2
        given = (x, w) if place is None else (x[place], w[place])
        (function(*given).sum() + x.sum()).backward()
        assert w.grad is not None
        return w.grad

    def scales(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return x + 1

    compiled = against(scales)
    found, texts = said(lambda: run(compiled))
    assert texts == []
    torch.testing.assert_close(found, run(scales))


def test_nothing_is_compared_where_nothing_compiles() -> None:
    compiled = against(returns)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert row(compiled).checks == 1
    compiled(torch.ones(2, dtype=torch.float64))
    assert row(compiled).checks == 2


def test_a_call_that_compiles_late_has_the_next_one_compared() -> None:
    """The part before the graph break has run, and has written its input."""

    def breaks(x: torch.Tensor, y: Any) -> torch.Tensor:
        x.add_(1)
        torch._dynamo.graph_break()
        result: torch.Tensor = x * y
        return result

    compiled = against(breaks)
    x = torch.zeros(2)
    assert compiled(x, 2).tolist() == [2, 2]
    checks = row(compiled).checks
    assert compiled(x, 3).tolist() == [6, 6]  # only the rest compiles
    assert compiled(x, 3).tolist() == [9, 9]
    assert row(compiled).checks == checks + 1
    assert row(compiled).status == "verified"


@pytest.mark.parametrize("kind", ["decorated", "module"])
def test_what_is_called_inside_runs_as_python_too(kind: str) -> None:
    """A nested compiled function is not left uncompiled for good by the run as Python."""
    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append("compiled")
        return graph

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    made: dict[str, Any] = {
        "decorated": against(lambda x: x + 1, note),
        "module": torch.compile(Inner(), backend=note),
    }
    inner = made[kind]
    compiled = against(lambda x: inner(x) * 2)
    assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert graphs == []
    assert inner(torch.ones(2)).tolist() == [2, 2]
    assert graphs != []


def test_inside_of_a_compiled_function_it_is_traced() -> None:
    inner = against(lambda x: x + 1)
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)
    assert outer(torch.ones(2)).tolist() == [4, 4]

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def between(x: torch.Tensor) -> Any:
        return inner(x)

    around = torch.compile(lambda x: between(x) * 2, backend="eager")
    assert around(torch.ones(2)).tolist() == [4, 4]


def centred(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) * 3


@pytest.mark.parametrize(
    "traced_as",
    [
        lambda x: x * 3 - x.mean() * 3,
        lambda x: (x - x.flip(0).sum() / x.numel()) * 3,
        lambda x: torch.addcmul(-3 * x.mean(), x, torch.tensor(3.0)),
    ],
)
def test_other_last_digits_are_no_difference(
    monkeypatch: pytest.MonkeyPatch, traced_as: Any
) -> None:
    """Dynamo traces some operations of torch as several others."""
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    assert not torch.equal(centred(x), traced_as(x))
    trace_as(monkeypatch, centred=traced_as)
    assert said(against(centred), x)[1] == []


@pytest.mark.slow
def test_all_ways_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGUARD_VERIFIED", "python")
    x = torch.randn(4, 3)
    with torchguard.install("verified"):
        model = Counting()
        made = torch.compile(model)
        in_place = Counting()
        in_place.compile()
        for each, inner in ((made, model), (in_place, in_place)):
            each(x)
            assert inner.calls == 1
    names = {"Counting", "forward", "_call_impl"}
    rows = [g for g in torchguard.verification_report().graphs if not g.nodes]
    rows = [g for g in rows[-2:] if g.function in names]
    assert len(rows) == 2
    assert {each.status for each in rows} == {"verified"}
    monkeypatch.setenv("TORCHGUARD_VERIFIED", "pyhton")
    with (
        pytest.warns(TorchGuardWarning, match="against is 'pyhton'"),
        torchguard.install("verified"),
    ):
        pass


def test_options_are_checked() -> None:
    compiled = against(returns, "inductor")
    assert verified(against="python")(compiled) is compiled
    with pytest.raises(TypeError, match="verified already"):
        verified()(compiled)
    for options, text in (
        ({"against": "eager"}, "against is 'eager'"),
        ({"against": "python", "every": 0}, "every is 0"),
        ({"every": 10}, "every is for against='python'"),
    ):
        with pytest.raises(ValueError, match=text):
            verified(**options)(returns)
    bucket = torchguard.bucketed(dims={"x": {0: "t"}}, buckets=[4])(returns)
    with pytest.raises(TypeError, match="not for what is bucketed"):
        verified(against="python")(bucket)


def test_what_can_not_be_compared_is_said() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)

    def steps(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return x * weight

    numbers = iter([1.0, 2.0, 3.0, 4.0])

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    for function, args, reason in (
        (steps, (torch.ones(2),), "optimizer is an optimizer"),
        (reads, (torch.ones(2),), "numbers is an iterator"),
        (returns, (torch.ones(2, 2).to_sparse(),), "x a tensor of layout"),
        (raises, (torch.ones(2),), "Python raises ValueError"),
    ):
        torch._dynamo.reset()
        compiled = against(function)
        with contextlib.suppress(ValueError):
            compiled(*args)
        assert row(compiled).status == "unverified"
        assert row(compiled).reason.startswith(reason.replace("x a", "x is a"))


def test_what_dynamo_refuses_raises_as_before() -> None:
    def refused(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    compiled = against(refused, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(2))
    assert row(compiled).reason == "it can't be compiled: Unsupported"


def test_other_threads_run_what_is_compiled_meanwhile() -> None:
    ran: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            ran.append("compiled")
            return graph(*inputs)

        return run

    inside, done = threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            inside.set()
            assert done.wait(60)
        return x + 1

    other = torch.compile(returns, backend=note)
    other(torch.ones(2))
    thread = threading.Thread(target=against(waits), args=(torch.ones(2),), daemon=True)
    thread.start()
    assert inside.wait(60)
    ran.clear()
    other(torch.ones(2))
    done.set()
    thread.join(60)
    assert ran == ["compiled"]
    assert not thread.is_alive()
