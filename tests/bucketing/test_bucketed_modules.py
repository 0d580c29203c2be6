"""bucketed(): modules and methods, and the other features of torch around a call."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.bucketed import LADDER, Counting, Net, double, wrapped_net
from torchguard import Buckets, PaddingLeakError, bucketed


class TestModules:
    def test_share_everything_with_what_they_wrap(self) -> None:
        net, wrapped = wrapped_net()
        assert isinstance(wrapped, Net)
        assert wrapped.linear is net.linear
        assert wrapped.other() == "other"
        assert list(wrapped.state_dict()) == list(net.state_dict())
        wrapped.eval()
        assert not net.training
        wrapped.to(torch.float64)
        assert net.linear.weight.dtype == torch.float64
        wrapped.load_state_dict(net.state_dict())
        wrapped.name = "new"
        assert net.name == "new"
        with pytest.raises(AttributeError):
            _ = wrapped.missing

    def test_keep_the_signature_of_forward(self) -> None:
        net, wrapped = wrapped_net()
        assert inspect.signature(wrapped.forward) == inspect.signature(net.forward)

    def test_compiled_already_take_sizes_above_the_buckets(self, backend: Counting) -> None:
        net = nn.Linear(3, 3)
        seen = []
        net.register_forward_hook(lambda *_: seen.append(1))
        wrapped = bucketed(
            torch.compile(net, backend="eager"),
            dims={"input": {0: "t"}},
            buckets=LADDER,
            overflow="dynamic",
        )
        for length in (17, 20, 30):
            x = torch.randn(length, 3)
            torch.testing.assert_close(wrapped(x), functional.linear(x, net.weight, net.bias))
        assert len(seen) == 3
        assert wrapped.stats().overflowed == 3

    def test_hooks_see_real_sizes(self) -> None:
        net, wrapped = wrapped_net()
        seen = []
        net.register_forward_hook(lambda _, args, out: seen.append((args[0].shape, out.shape)))
        wrapped(torch.ones(5, 3))
        assert seen == [((5, 3), (5, 3))]

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_can_be_copied(self, how: str) -> None:
        net, wrapped = wrapped_net()
        wrapped.eval()
        copied = (
            copy.deepcopy(wrapped) if how == "deepcopy" else pickle.loads(pickle.dumps(wrapped))  # noqa: S301
        )
        x = torch.ones(5, 3)
        assert torch.equal(copied(x), wrapped(x))
        assert copied.linear.weight is not net.linear.weight
        assert copied.stats().calls == 1

    def test_compiled_already(self, backend: Counting) -> None:
        net = Net().eval()
        compiled = torch.compile(net, backend=backend)
        wrapped = bucketed(compiled, dims={"x": {0: "t"}}, buckets=Buckets.multiples_of(2, 24))
        for length in range(1, 25):
            x = torch.randn(length, 3)
            torch.testing.assert_close(wrapped(x), net(x))
        assert len(backend.graphs) == 12
        copied = copy.deepcopy(wrapped)
        torch.testing.assert_close(copied(x), wrapped(x))
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(wrapped)

    def test_train_and_eval_are_checked_on_their_own(self) -> None:
        norm = nn.BatchNorm1d(3).eval()
        wrapped = bucketed(norm, dims={"input": {2: "t"}}, buckets=LADDER)
        wrapped(torch.randn(2, 3, 5))
        wrapped.train()
        with pytest.raises(PaddingLeakError, match="first differs after native_batch_norm"):
            wrapped(torch.randn(2, 3, 5))

    def test_of_a_module_compiled_in_place_each_bucket_is_compiled_so(self) -> None:
        net = Net().eval()
        net.compile(backend="eager", fullgraph=True)
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        for length in (5, 6, 9):
            torch.testing.assert_close(wrapped(torch.ones(length, 3)), net(torch.ones(length, 3)))
        assert wrapped.stats().graphs == len(wrapped.stats().hits)
        with pytest.raises(ValueError, match="compiled already"):
            bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER, compile=True)

    def test_are_freed(self) -> None:
        net, wrapped = wrapped_net()
        wrapped(torch.ones(5, 3))
        reference = weakref.ref(net)
        del net, wrapped
        gc.collect()
        assert reference() is None


class TestMethods:
    def test_each_instance_has_graphs_of_its_own(self, backend: Counting) -> None:
        class Scale:
            def __init__(self, factor: float) -> None:
                self.factor = factor

            @bucketed(
                dims={"x": {0: "t"}},
                buckets=Buckets.multiples_of(2, 12),
                compile={"backend": backend},
            )
            def run(self, x: torch.Tensor) -> torch.Tensor:
                """Scale."""
                return x * self.factor

        for factor in (2.0, 3.0, 4.0):
            scale = Scale(factor)
            for length in range(1, 13):
                assert torch.equal(scale.run(torch.ones(length)), torch.full((length,), factor))
            assert scale.run.stats().calls == 12
        assert len(backend.graphs) == 18
        assert Scale.run.__doc__ == "Scale."
        reference = weakref.ref(scale)
        del scale
        torch.compiler.reset()
        gc.collect()
        assert reference() is None

    def test_a_function_keeps_its_name_and_can_be_pickled(self) -> None:
        assert at_module_level.__name__ == "at_module_level"
        assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level  # noqa: S301


@bucketed(dims={"x": {0: "t"}}, buckets=LADDER)
def at_module_level(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class TestWays:
    def test_grad_modes_and_inference(self, backend: Counting) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        x = torch.randn(5, 3)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found, expected = wrapped(x), linear(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad
            assert found.is_inference() == expected.is_inference()

    def test_autocast(self) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": "aot_eager"}
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = wrapped(torch.ones(5, 3)), linear(torch.ones(5, 3))
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)

    def test_activation_checkpointing(self) -> None:
        linear = nn.Linear(3, 3)

        def checkpointed(x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False).relu()

        wrapped = bucketed(
            checkpointed,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            compile={"backend": "aot_eager", "fullgraph": True},
        )
        x = torch.randn(5, 3)
        wrapped(x).sum().backward()
        found = linear.weight.grad
        linear.weight.grad = None
        checkpointed(x).sum().backward()
        torch.testing.assert_close(found, linear.weight.grad)

    def test_torch_func(self) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return x.square().sum()

        inside = bucketed(
            torch.func.grad(loss),
            dims=({0: "t"},),
            buckets=LADDER,
            compile={"backend": "eager"},
        )
        x = torch.randn(5)
        torch.testing.assert_close(inside(x), 2 * x)
        outside = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        torch.testing.assert_close(torch.func.grad(lambda y: outside(y).sum())(x), 2 * x / x)
        torch.testing.assert_close(torch.func.vmap(outside)(torch.ones(2, 5)), 2 * torch.ones(2, 5))

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_torch_func_around_what_is_compiled(self, compiler: str) -> None:
        # Plain torch runs it uncompiled there, and with backend="eager" fails for what is no leaf.
        def wave(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x

        wrapped = bucketed(
            wave, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": compiler}
        )
        x = torch.randn(5)
        for warm in (False, True):
            if warm:
                wrapped(x)
            for transformed in (
                lambda f: torch.func.grad(lambda y: f(y).sum())(x),
                lambda f: torch.func.vmap(f)(torch.stack([x, 2 * x])),
                lambda f: torch.func.jvp(f, (x,), (x,)),
                lambda f: torch.func.jacrev(f)(x),
                lambda f: torch.func.hessian(lambda y: f(y).sum())(x),
            ):
                torch.testing.assert_close(transformed(wrapped), transformed(wave))
        assert wrapped.stats().graphs == 1

    def test_functional_call(self) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        x = torch.randn(5, 3)
        doubled = {name: 2 * p.detach() for name, p in linear.named_parameters()}
        found = torch.func.functional_call(wrapped, doubled, (x,))
        torch.testing.assert_close(found, torch.func.functional_call(linear, doubled, (x,)))
        torch.testing.assert_close(wrapped(x), linear(x))

    def test_threads(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        wrong: list[Any] = []

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(25):
                x = torch.randn(int(torch.randint(1, 17, (), generator=generator)))
                if not torch.equal(wrapped(x), 2 * x):
                    wrong.append(x)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert wrapped.stats().calls == 100
        assert len(backend.graphs) == 3

    def test_nothing_keeps_inputs_alive(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for length in (5, 8):
            x = torch.randn(length)
            reference = weakref.ref(x)
            wrapped(x)
            wrapped(x)
            del x
            gc.collect()
            assert reference() is None

    def test_an_exception_in_the_function_leaves_statistics_right(self) -> None:
        def fails(x: torch.Tensor, when: bool) -> torch.Tensor:
            if when:
                raise RuntimeError("on purpose")
            return x + 1

        wrapped = bucketed(fails, dims={"x": {0: "t"}}, buckets=LADDER)
        wrapped(torch.ones(3), False)
        before = wrapped.stats()
        with pytest.raises(RuntimeError, match="on purpose"):
            wrapped(torch.ones(3), True)
        assert wrapped.stats() == before
        assert torch.equal(wrapped(torch.ones(3), False), torch.full((3,), 2.0))

    def test_outputs_of_cuda_graphs_are_copied(self) -> None:
        # A CUDA graph writes its outputs to the same memory in each call; so does this one.
        memory = torch.zeros(4)
        wrapped: Any = bucketed(
            memory.copy_,
            dims=({0: "t"},),
            buckets=LADDER,
            check_padding="never",
            outputs={0: "t"},
        )
        first = wrapped(torch.ones(3))
        wrapped(torch.zeros(3))
        assert first.tolist() == [0, 0, 0]  # so the memory is shared indeed
        wrapped._caller._uncompiled.cuda_graphs = True
        first = wrapped(torch.ones(3))
        wrapped(torch.zeros(3))
        assert first.tolist() == [1, 1, 1]

    def test_reduce_overhead_is_known_to_record_cuda_graphs(self) -> None:
        from torchguard._torch import records_cuda_graphs  # noqa: PLC0415

        assert records_cuda_graphs(torch.compile(double, mode="reduce-overhead"))
        assert not records_cuda_graphs(torch.compile(double))
        assert not records_cuda_graphs(torch.compile(double, backend="eager"))
