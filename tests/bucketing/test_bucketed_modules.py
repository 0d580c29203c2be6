"""bucketed(): modules and methods, and the other features of torch around a call."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.bucketed import LADDER, Counting, Net, double, wrap
from torchguard import _torch, bucketed

EAGER: Any = {"backend": "eager"}


class TestModules:
    def test_share_everything_with_what_they_wrap(self) -> None:
        net = Net()
        wrapped = wrap(net)
        assert isinstance(wrapped, Net)
        assert wrapped.linear is net.linear
        assert wrapped.other() == "other"
        assert list(wrapped.state_dict()) == list(net.state_dict())
        assert inspect.signature(wrapped.forward) == inspect.signature(net.forward)
        wrapped.eval()
        assert not net.training
        wrapped.to(torch.float64)
        assert net.linear.weight.dtype == torch.float64
        wrapped.load_state_dict(net.state_dict())
        wrapped.name = "new"
        assert net.name == "new"
        with pytest.raises(AttributeError):
            _ = wrapped.missing

    def test_hooks_see_real_sizes(self) -> None:
        net = Net()
        seen = []
        net.register_forward_hook(lambda _, args, out: seen.append((args[0].shape, out.shape)))
        wrap(net)(torch.ones(5, 3))
        assert seen == [((5, 3), (5, 3))]

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
    def test_can_be_copied(self, how: Any) -> None:
        wrapped = wrap(Net().eval())
        copied = how(wrapped)
        x = torch.ones(5, 3)
        assert torch.equal(copied(x), wrapped(x))
        assert copied.linear.weight is not wrapped.linear.weight
        assert copied.stats().calls == 1

    def test_compiled_already(self, backend: Counting) -> None:
        net = Net().eval()
        wrapped = wrap(torch.compile(net, backend=backend))
        x = torch.randn(5, 3)
        torch.testing.assert_close(wrapped(x), net(x))
        assert len(backend.graphs) == 1
        copied = copy.deepcopy(wrapped)
        torch.testing.assert_close(copied(x), wrapped(x))
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(wrapped)

    def test_of_a_module_compiled_in_place_each_bucket_is_compiled_so(self) -> None:
        net = Net().eval()
        net.compile(backend="eager", fullgraph=True)
        wrapped = wrap(net)
        for length in (5, 6, 9):
            torch.testing.assert_close(wrapped(torch.ones(length, 3)), net(torch.ones(length, 3)))
        assert wrapped.stats().graphs == len(wrapped.stats().hits)
        with pytest.raises(ValueError, match="compiled already"):
            wrap(net, compile=True)

    def test_whose_class_registers_its_subclasses(self) -> None:
        registered = []

        class Base(nn.Module):
            def __init_subclass__(cls, *, name: str) -> None:
                registered.append((name, cls))

        class Model(Base, name="model"):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2

        assert torch.equal(wrap(Model())(torch.ones(5)), torch.full((5,), 2.0))
        assert registered == [("model", Model)]

    def test_are_freed(self) -> None:
        net = Net()
        wrapped = wrap(net)
        wrapped(torch.ones(5, 3))
        reference = weakref.ref(net)
        del net, wrapped
        gc.collect()
        assert reference() is None


@bucketed(dims={"x": {0: "t"}}, buckets=LADDER)
def at_module_level(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class TestMethods:
    def test_a_method_of_an_instance(self) -> None:
        class Scale:
            def __init__(self, factor: float) -> None:
                self.factor = factor
                self.run: Any = bucketed(self._run, dims={"x": {0: "t"}}, buckets=LADDER)

            def _run(self, x: torch.Tensor) -> torch.Tensor:
                """Scale."""
                return x * self.factor

        scale = Scale(2.0)
        assert (scale.run.__doc__, list(inspect.signature(scale.run).parameters)) == (
            "Scale.",
            ["x"],
        )
        copied = copy.deepcopy(scale)
        copied.factor = 3.0
        assert torch.equal(scale.run(torch.ones(5)), torch.full((5,), 2.0))
        assert torch.equal(copied.run(torch.ones(5)), torch.full((5,), 3.0))
        reference = weakref.ref(scale)
        del scale
        gc.collect()
        assert reference() is None

    def test_a_function_keeps_its_name_and_can_be_pickled(self) -> None:
        assert at_module_level.__name__ == "at_module_level"
        assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level  # noqa: S301


class TestWays:
    def test_grad_modes_and_inference(self, backend: Counting) -> None:
        linear = nn.Linear(3, 3)
        wrapped = wrap(linear, compile={"backend": backend})
        x = torch.randn(5, 3)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found, expected = wrapped(x), linear(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad
            assert found.is_inference() == expected.is_inference()

    def test_autocast(self) -> None:
        linear = nn.Linear(3, 3)
        wrapped = wrap(linear, compile={"backend": "aot_eager"})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = wrapped(torch.ones(5, 3)), linear(torch.ones(5, 3))
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)
        assert wrapped(torch.ones(5, 3)).dtype == torch.float32

    @pytest.mark.parametrize("compile_", [None, EAGER, {"backend": "aot_eager"}])
    def test_torch_func_around_it(self, compile_: Any) -> None:
        # Plain torch runs it uncompiled there, and with backend="eager" fails for what is no leaf.
        def wave(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x

        wrapped = wrap(wave, compile=compile_)
        x = torch.randn(5)
        for warm in (False, True):
            if warm:
                wrapped(x)
            transforms: tuple[Callable[[Any], Any], ...] = (
                lambda f: torch.func.grad(lambda y: f(y).sum())(x),
                lambda f: torch.func.vmap(f)(torch.stack([x, 2 * x])),
                lambda f: torch.func.jvp(f, (x,), (x,)),
                lambda f: torch.func.jacrev(f)(x),
                lambda f: torch.func.hessian(lambda y: f(y).sum())(x),
            )
            for transformed in transforms:
                torch.testing.assert_close(transformed(wrapped), transformed(wave))
        assert wrapped.stats().graphs == (0 if compile_ is None else 1)

    def test_nothing_keeps_inputs_alive(self, backend: Counting) -> None:
        wrapped = wrap(double, compile={"backend": backend})
        for length in (5, 8):
            x = torch.randn(length)
            reference = weakref.ref(x)
            wrapped(x)
            wrapped(x)
            del x
            gc.collect()
            assert reference() is None

    def test_outputs_of_cuda_graphs_are_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A CUDA graph writes its outputs to the same memory in each call; so does this one."""

        def backend(graph: Any, inputs: Any) -> Any:
            memory = torch.zeros(4)
            return lambda *given: (memory.copy_(*graph(*given)),)

        torch.compiler.reset()
        for records, kept in ((False, [0, 0, 0]), (True, [2, 2, 2])):
            monkeypatch.setattr(_torch, "records_cuda_graphs", lambda _, records=records: records)
            wrapped = wrap(double, compile={"backend": backend})
            with torch.no_grad():
                first = wrapped(torch.ones(3))
                wrapped(torch.zeros(3))
            assert first.tolist() == kept
        monkeypatch.undo()
        assert _torch.records_cuda_graphs(torch.compile(double, mode="reduce-overhead"))
        assert not _torch.records_cuda_graphs(torch.compile(double))
        assert not _torch.records_cuda_graphs(torch.compile(double, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_outputs_of_a_bucketed_cuda_graph_stay_when_it_is_replayed(device: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2 + 1

    torch.compiler.reset()
    call = wrap(model, buckets=[8, 16], compile={"mode": "reduce-overhead"})
    inputs = [torch.randn(length, 4, device=device) for length in (5, 7, 8, 11, 16, 5, 3)]
    outputs = [call(x) for x in (*inputs, *inputs)]
    for x, found in zip((*inputs, *inputs), outputs, strict=True):
        assert torch.equal(found, model(x))
    assert call.stats().graphs == 2


@pytest.mark.slow
def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def attend(x: torch.Tensor, real: torch.Tensor) -> Any:
        """x (B, H, T, D), real: how many keys there are."""

        def score(value: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return torch.where(k < real, value, -float("inf"))

        return flex.flex_attention(x, x, x, score_mod=score)

    x = torch.randn(1, 2, 37, 16)
    expected = attend(x, torch.tensor(37))
    try:
        torch.compile(attend, backend="aot_eager")(x, torch.tensor(37))
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"flex_attention does not compile on this machine: {type(error).__name__}")
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        pytest.skip("this torch runs flex_attention under no dispatch mode, and the check is one")
    options: Any = {"lengths": "real", "compile": {"backend": "aot_eager"}}
    wrapped = wrap(attend, dims={"x": {2: "t"}}, buckets=[64], **options)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), expected, rtol=1e-4, atol=1e-5)
