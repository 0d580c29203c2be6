"""guarded(): ``out=`` arguments, also in shared memory."""

from __future__ import annotations

import collections
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from support import kinds
from support.kinds import Kind, empty_locked, named, state
from support.scopes import each_scope
from support.ways import differences, ends_the_process, outcome_of
from torchguard import guarded
from torchguard.errors import NonResizableStorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class TestOutArguments:
    @each_scope
    @pytest.mark.parametrize("kind", **named((*kinds.LOCKED, *kinds.SHARED)))
    def test_that_cannot_grow_are_as_they_were(
        self, kind: Kind, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        out = kind.make()
        before = state(out)
        with kind.scope(), scope(), pytest.raises(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cat([torch.ones(1000, dtype=out.dtype), torch.ones(9, dtype=out.dtype)], out=out)
        changed = differences(before, state(out))
        changed.pop("version", None)  # it may have been written to, for all one knows
        assert changed == {}

    @each_scope
    def test_of_a_shape_that_fits_are_written_in_place(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        array = np.zeros(3)
        out = torch.from_numpy(array)
        with scope():
            assert torch.add(torch.ones(3, dtype=torch.float64), 1, out=out) is out
        assert array.tolist() == [2, 2, 2]

    @each_scope
    def test_given_by_position_are_seen_too(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        eye = torch.eye(3)
        calls: tuple[Callable[[torch.Tensor], Any], ...] = (
            lambda out: torch.tensordot(eye, eye, 1, out),
            lambda out: torch.norm(eye, 2, 0, False, out),
            lambda out: torch.linalg.multi_dot([eye, eye, eye], out=out),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in calls:
                out = empty_locked(torch.float32)
                before = state(out)
                with scope():
                    error = outcome_of(lambda: call(out)).error  # noqa: B023
                assert error is not None, call
                assert differences(before, state(out)) == {}

    @each_scope
    @pytest.mark.filterwarnings("ignore")
    def test_of_chain_matmul_are_written_to_as_outside(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """With any function mode on the stack, torch forgets this one's ``out``."""
        out = torch.empty(3, 3)
        with scope():
            assert torch.chain_matmul(torch.eye(3), torch.eye(3), out=out) is out
        assert out.tolist() == torch.eye(3).tolist()

    @each_scope
    def test_of_functions_that_make_tensors_are_guarded(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "zeros": lambda out: torch.zeros(100, out=out),
            "ones": lambda out: torch.ones(100, out=out),
            "full": lambda out: torch.full((100,), 1.0, out=out),
            "empty": lambda out: torch.empty(100, out=out),
            "arange": lambda out: torch.arange(100, out=out),
            "linspace": lambda out: torch.linspace(0, 1, 100, out=out),
            "logspace": lambda out: torch.logspace(0, 1, 100, out=out),
            "eye": lambda out: torch.eye(100, out=out),
            "rand": lambda out: torch.rand(100, out=out),
            "randn": lambda out: torch.randn(100, out=out),
            "randperm": lambda out: torch.randperm(100, out=out),
            "normal": lambda out: torch.normal(0.0, 1.0, (100,), out=out),
            "fft.fftfreq": lambda out: torch.fft.fftfreq(100, out=out),
        }
        for name, call in calls.items():
            corrupted = []
            for each in (nullcontext, scope):
                out = empty_locked(torch.int64 if name == "randperm" else torch.float32)
                before = state(out)
                with each():
                    assert outcome_of(lambda: call(out)).error is not None, name  # noqa: B023
                corrupted.append(bool(differences(before, state(out))))
            assert corrupted == [True, False], name

    @each_scope
    def test_of_overloads_with_names_of_their_own_are_guarded(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        values, indices = empty_locked(torch.float32), empty_locked(torch.int64)
        before = state(values), state(indices)
        with scope(), pytest.raises(RuntimeError):
            torch.ops.aten.sort.values(torch.ones(5), values=values, indices=indices)
        for old, out in zip(before, (values, indices), strict=True):
            assert set(differences(old, state(out))) <= {"version"}

    @each_scope
    def test_that_grew_before_the_operation_failed_are_as_they_were(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        corrupted = []
        for each in (nullcontext, scope):
            out = torch.empty(0)
            before = state(out)
            with each(), pytest.raises(IndexError):
                torch.index_select(torch.ones(3), 0, torch.tensor([0, 99]), out=out)
            corrupted.append(bool(differences(before, state(out))))
        assert corrupted == [True, False]


class TestSharedMemoryAsOut:
    @each_scope
    def test_is_written_and_handed_back(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        out = torch.zeros(3).share_memory_()
        seen_by_others = out.view(-1)
        version = out._version
        with scope():
            assert torch.add(torch.ones(3), 1, out=out) is out
        assert out.is_shared()
        assert seen_by_others.tolist() == [2, 2, 2]
        assert out._version > version

    @each_scope
    def test_of_several_outputs_is_written_and_handed_back(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        pair = collections.namedtuple("pair", "values indices")  # noqa: PYI024
        makers: tuple[Callable[..., Any], ...] = (
            lambda *outs: outs,
            lambda *outs: list(outs),
            pair,
            lambda *outs: torch.return_types.sort(outs),
        )
        for make in makers:
            outs = make(torch.zeros(3).share_memory_(), torch.zeros(3, dtype=torch.int64))
            torchs = outcome_of(lambda: torch.sort(torch.tensor([3.0, 1, 2]), out=outs))  # noqa: B023
            outs[0].zero_()
            with scope():
                ours = outcome_of(lambda: torch.sort(torch.tensor([3.0, 1, 2]), out=outs))  # noqa: B023
            assert type(ours.error) is type(torchs.error)
            if torchs.error is None:
                assert type(ours.result) is type(torchs.result)
                assert ours.result[0] is outs[0]
                assert ours.result[1] is outs[1]
                assert outs[0].tolist() == [1, 2, 3]
                assert outs[1].tolist() == [1, 2, 0]

    @each_scope
    def test_of_every_kind_gets_what_torch_writes(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        shared: dict[str, Callable[[], torch.Tensor]] = {
            "plain": lambda: torch.zeros(2).share_memory_(),
            "view": lambda: torch.zeros(8).share_memory_()[1:7:3],
            "transposed": lambda: torch.zeros(2, 2).share_memory_().t(),
            "complex": lambda: torch.zeros(2, dtype=torch.complex64).share_memory_(),
            "conj": lambda: torch.zeros(2, dtype=torch.complex64).share_memory_().conj(),
            "neg": lambda: torch.zeros(2, dtype=torch.complex64).share_memory_().conj().imag,
            "int": lambda: torch.zeros(2, dtype=torch.int16).share_memory_(),
            "Parameter": lambda: torch.nn.Parameter(torch.zeros(2)).share_memory_(),
            "subclass": lambda: torch.zeros(2).share_memory_().as_subclass(kinds.Watching),
            "larger": lambda: torch.zeros(9).share_memory_(),
            "empty": lambda: torch.zeros(9).share_memory_()[:0],
            "requires grad": lambda: torch.zeros(2).share_memory_().requires_grad_(),
        }
        for name, make in shared.items():
            results = []
            for each in (nullcontext, scope):
                out = make()
                source = torch.tensor([1 + 2j, 3 - 4j])
                source = source if out.is_complex() else source.real.to(out.dtype)
                kinds.CALLS.clear()
                with each(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcome = outcome_of(lambda: torch.mul(source, 2, out=out))  # noqa: B023
                calls = len(kinds.CALLS)
                results.append(
                    (
                        type(outcome.error),
                        outcome.result is out,
                        type(outcome.result),
                        kinds.values(out),
                        calls,
                    )
                )
            assert results[0] == results[1], name

    @each_scope
    def test_in_inference_mode(self, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        with torch.inference_mode():
            out = torch.zeros(3).share_memory_()
            with scope():
                assert torch.add(torch.ones(3), 1, out=out) is out
                assert out.tolist() == [2, 2, 2]
                with pytest.raises(RuntimeError):
                    torch.add(torch.ones(30), 1, out=out)
            assert out.tolist() == [2, 2, 2]

    GROW: tuple[Callable[[], Any], ...] = (
        lambda: torch.add(torch.ones(1000), 1, out=torch.zeros(0).share_memory_()),
        lambda: torch.add(torch.ones(1000), 1, out=torch.zeros(4).share_memory_()),
        lambda: torch.sort(
            torch.ones(1000),
            out=(torch.zeros(4).share_memory_(), torch.zeros(4, dtype=torch.int64)),
        ),
        lambda: torch.zeros(1000, out=torch.zeros(4).share_memory_()),
        lambda: torch.ops.aten.add.out(torch.ones(1000), 1, out=torch.zeros(4).share_memory_()),
        lambda: torch.ops.aten.sort.values(
            torch.ones(1000),
            values=torch.zeros(0).share_memory_(),
            indices=torch.zeros(0, dtype=torch.int64).share_memory_(),
        ),
        lambda: _with_an_input_as_out(lambda x: torch.cat([x, torch.ones(1000)], out=x)),
        lambda: _with_an_input_as_out(lambda x: torch.cumsum(x.expand(1000, 4), 0, out=x)),
        lambda: _with_an_input_as_out(
            lambda x: torch.matmul(x.view(1, 4).t(), torch.ones(1, 1000), out=x)
        ),
    )

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("number", range(len(GROW)))
    def test_that_has_to_grow_raises_instead_of_killing_the_process(self, number: int) -> None:
        call = self.GROW[number]
        assert ends_the_process(call), "torch itself survives"

        def inside() -> None:
            with guarded():
                call()

        assert not ends_the_process(inside)
        with pytest.raises(RuntimeError):
            inside()

    @pytest.mark.filterwarnings("ignore")
    @each_scope
    def test_that_has_to_grow_says_what_to_do(
        self, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        out = torch.zeros(4).share_memory_()
        before = state(out)
        with scope(), pytest.raises(NonResizableStorageError) as caught:
            torch.add(torch.ones(1000), 1, out=out)
        assert "out=" in str(caught.value)
        assert "(4,)" in str(caught.value)
        assert "share_memory_()" in str(caught.value)
        assert set(differences(before, state(out))) <= {"version"}
        assert out.tolist() == [0, 0, 0, 0]


def _with_an_input_as_out(call: Callable[[torch.Tensor], Any]) -> Any:
    return call(torch.ones(4).share_memory_())
