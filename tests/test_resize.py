"""resize_, resize_as_ and set_: what succeeds is torch's, what fails has changed nothing."""

from __future__ import annotations

import functools
import inspect
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import kinds
import pytest
import torch
from child_process import output_of
from kinds import Kind, empty_locked, locked, named, plain, state, values
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from ways import (
    BARE,
    BOTH,
    HELPERS,
    INSTALLED,
    ON_TORCH,
    WAYS,
    Way,
    differences,
    each_way,
    ends_the_process,
    outcome_of,
)

import torchguard
from torchguard import NonResizableStorageError, safe_resize_, safe_resize_as_, safe_set_

if TYPE_CHECKING:
    from collections.abc import Callable

    from kinds import State

HUGE = 2**58  # elements: no machine has the memory, and no count of bytes overflows

Call = dict[str, "Callable[[Way, torch.Tensor], Any]"]

RESIZE: Call = {
    "smaller": lambda way, t: way.resize_(t, 1),
    "same": lambda way, t: way.resize_(t, tuple(t.shape)),
    "flat": lambda way, t: way.resize_(t, t.numel()),
    "two integers": lambda way, t: way.resize_(t, 1, 1),
    "empty": lambda way, t: way.resize_(t, 0),
    "0-d": lambda way, t: way.resize_(t, ()),
    "a list": lambda way, t: way.resize_(t, [2, 1]),
    "larger": lambda way, t: way.resize_(t, 1000),
    "larger, four dimensions": lambda way, t: way.resize_(t, 3, 4, 5, 6),
    "channels_last": lambda way, t: way.resize_(t, 1, 2, 1, 1, memory_format=torch.channels_last),
    "larger, channels_last": lambda way, t: way.resize_(
        t, (4, 3, 20, 20), memory_format=torch.channels_last
    ),
    "no memory": lambda way, t: way.resize_(t, HUGE),
    "no memory for the rows": lambda way, t: way.resize_(t, HUGE, 2),
    "no memory for a batch": lambda way, t: way.resize_(t, 2, HUGE, 2),
    "too many columns": lambda way, t: way.resize_(t, 2, 2**62),
    "too many elements": lambda way, t: way.resize_(t, 2**62, 4),
    "too many bytes": lambda way, t: way.resize_(t, 2**62),
    "beyond int64": lambda way, t: way.resize_(t, 2**70),
    "negative": lambda way, t: way.resize_(t, -1),
    "one of them negative": lambda way, t: way.resize_(t, (3, -2)),
    "two negative": lambda way, t: way.resize_(t, -3, -2),
    "wrong rank for channels_last": lambda way, t: way.resize_(
        t, 2, 2, memory_format=torch.channels_last
    ),
    "wrong rank for channels_last_3d, larger": lambda way, t: way.resize_(
        t, (50, 50), memory_format=torch.channels_last_3d
    ),
    "preserve_format": lambda way, t: way.resize_(t, 2, memory_format=torch.preserve_format),
    "a string": lambda way, t: way.resize_(t, "two"),
    "a number with a fraction": lambda way, t: way.resize_(t, 1.5),
    "a tensor of a fraction": lambda way, t: way.resize_(t, torch.tensor(1.5)),
    "None": lambda way, t: way.resize_(t, None),
    "nothing": lambda way, t: way.resize_(t),
    "a list and a number": lambda way, t: way.resize_(t, [2], 3),
    "a memory format that is none": lambda way, t: way.resize_(t, 2, memory_format="channels"),
    "an unknown keyword": lambda way, t: way.resize_(t, 2, format=1),
}
RESIZE_AS: Call = {
    "smaller": lambda way, t: way.resize_as_(t, torch.empty(1)),
    "another dtype": lambda way, t: way.resize_as_(t, torch.empty(1, dtype=torch.int64)),
    "larger": lambda way, t: way.resize_as_(t, torch.empty(30, 40)),
    "by name": lambda way, t: way.resize_as_(t, torch.empty(30, 40), memory_format=None),
    "like channels_last": lambda way, t: way.resize_as_(
        t,
        torch.empty(1, 2, 3, 4).to(memory_format=torch.channels_last),
        memory_format=torch.preserve_format,
    ),
    "no memory": lambda way, t: way.resize_as_(t, torch.empty(1).expand(HUGE)),
    "no memory for the rows": lambda way, t: way.resize_as_(t, torch.empty(1).expand(HUGE, 2)),
    "wrong rank": lambda way, t: way.resize_as_(
        t, torch.empty(30, 40), memory_format=torch.channels_last
    ),
    "like a sparse tensor": lambda way, t: way.resize_as_(t, torch.eye(20).to_sparse()),
    "no template": lambda way, t: way.resize_as_(t, "template"),
    "None": lambda way, t: way.resize_as_(t, None),
    "a memory format that is none": lambda way, t: way.resize_as_(t, t, memory_format=3),
}


def _source(t: torch.Tensor) -> torch.Tensor:
    device = t.device if t.device.type == "meta" else "cpu"
    return torch.zeros(4, dtype=t.dtype if not t.is_quantized else torch.float32, device=device)


SET: Call = {
    "nothing": lambda way, t: way.set_(t),
    "a tensor": lambda way, t: way.set_(t, _source(t)),
    "a tensor by name": lambda way, t: way.set_(t, source=_source(t)),
    "a storage": lambda way, t: way.set_(t, _source(t).untyped_storage()),
    "a view of a storage": lambda way, t: way.set_(t, _source(t).untyped_storage(), 1, (2,), (1,)),
    "a view without strides": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, (2, 2)),
    "a larger view": lambda way, t: way.set_(t, _source(t).untyped_storage(), 3, (9, 9), (20, 2)),
    "its own storage": lambda way, t: way.set_(t, t.untyped_storage(), 0, (1,), (1,)),
    "no memory": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, (HUGE,), (1,)),
    "beyond a locked storage": lambda way, t: way.set_(
        t, empty_locked(torch.uint8, 16).untyped_storage(), 0, (100,), (1,)
    ),
    "an offset beyond a locked storage": lambda way, t: way.set_(
        t, empty_locked(torch.uint8, 16).untyped_storage(), 100, (1,), (1,)
    ),
    "beyond its own storage": lambda way, t: way.set_(
        t, t.untyped_storage(), t.storage_offset(), (300,), (2,)
    ),
    "too many elements": lambda way, t: way.set_(
        t, _source(t).untyped_storage(), 0, (2**62, 4), (4, 1)
    ),
    "a negative size": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, (-1,), (1,)),
    "a negative stride": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, (2,), (-1,)),
    "a negative offset": lambda way, t: way.set_(t, _source(t).untyped_storage(), -1, (2,), (1,)),
    "more strides than sizes": lambda way, t: way.set_(
        t, _source(t).untyped_storage(), 0, (2,), (1, 1)
    ),
    "a number of another dtype": lambda way, t: way.set_(
        t, torch.zeros(4, dtype=torch.float16 if t.dtype != torch.float16 else torch.float32)
    ),
    "another device": lambda way, t: way.set_(
        t, torch.zeros(4, dtype=t.dtype, device="cpu" if t.device.type == "meta" else "meta")
    ),
    "a string": lambda way, t: way.set_(t, "storage"),
    "a size that is none": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, "ab"),
    "a size of strings": lambda way, t: way.set_(t, _source(t).untyped_storage(), 0, ("a", "b")),
    "an offset that is none": lambda way, t: way.set_(
        t, _source(t).untyped_storage(), "a", (2,), (1,)
    ),
}
OPERATIONS = {"resize_": RESIZE, "resize_as_": RESIZE_AS, "set_": SET}


def _ends_the_process(kind: Kind, call: Callable[[Way, torch.Tensor], Any]) -> bool:
    return kind.kills and ends_the_process(lambda: call(BARE, kind.make()))


def _try(kind: Kind, way: Way, call: Callable[[Way, torch.Tensor], Any]) -> Any:
    """One call: the tensor, the outcome, and what has changed about tensor and an alias."""
    tensor = kind.make()
    before = state(tensor)
    alias = None
    if kind.has_metadata and type(tensor) is torch.Tensor:
        with torch.no_grad():
            alias = tensor.detach()
    alias_before = {} if alias is None else state(alias)
    with kind.scope():
        outcome = outcome_of(lambda: call(way, tensor))
    changed = differences(before, state(tensor))
    if alias is not None and (alias_differs := differences(alias_before, state(alias))):
        changed["alias"] = alias_differs  # type: ignore[assignment]
    return tensor, outcome, changed


@functools.cache
def _on_torch(kind: Kind, operation: str, name: str) -> Any:
    """What torch does: its error, the values where it succeeds, and what a failure changed."""
    call = OPERATIONS[operation][name]
    if _ends_the_process(kind, call):
        return NonResizableStorageError(), None, None
    tensor, outcome, changed = _try(kind, BARE, call)
    if outcome.error is not None:
        return outcome.error.with_traceback(None), None, changed
    return None, values(tensor), None


def _cases() -> list[Any]:
    few = {"plain", "numpy", "shared memory", "numpy subclass"}
    return [
        pytest.param(kind, operation, way, id=f"{kind.name}-{operation}-{way.name}")
        for kind in kinds.ALL
        for operation in OPERATIONS
        for way in WAYS
        if (way is not BOTH or kind.name in few)
        and (way is not ON_TORCH or operation == "resize_as_")
    ]


@pytest.mark.parametrize(("kind", "operation", "way"), _cases())
def test_equals_torch_or_changes_nothing(kind: Kind, operation: str, way: Way) -> None:
    torchs = {name: _on_torch(kind, operation, name) for name in OPERATIONS[operation]}
    wrong: list[str] = []
    with way.scope():
        for name, call in OPERATIONS[operation].items():
            error, expected, _ = torchs[name]
            tensor, ours, changed = _try(kind, way, call)
            if error is None:
                if ours.error is not None:
                    wrong.append(f"{name}: torch succeeds, here {ours.error!r}")
                elif ours.result is not tensor:
                    wrong.append(f"{name}: returned another object")
                elif differs := _differs_in(expected, values(tensor)):
                    wrong.append(f"{name}: differs from torch in {differs}")
                continue
            if type(ours.error) is not type(error):
                wrong.append(f"{name}: torch raises {error!r}, here {ours.error!r}")
            if changed:
                wrong.append(f"{name}: {changed}")
    if wrong:  # not an assertion, which would show all of this twice
        pytest.fail("\n".join(wrong), pytrace=False)


OVERFLOWING: Call = {
    "resize_": lambda way, t: way.resize_(t, (0, 5, 10, 10, 2**58)),
    "channels_last_3d": lambda way, t: way.resize_(
        t, (0, 5, 10, 10, 2**58), memory_format=torch.channels_last_3d
    ),
    "resize_as_": lambda way, t: way.resize_as_(
        t, torch.empty(0, 1, 1, 1, 1, device="meta").expand(-1, 5, 10, 10, 2**58)
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("name", OVERFLOWING)
def test_strides_that_overflow_are_put_back_without_being_read(name: str, way: Way) -> None:
    """Plain torch is not asked here: what it leaves behind can't be read by this process."""
    if way is ON_TORCH and name != "resize_as_":
        pytest.skip("torch.resize_as_ alone")
    for kind in kinds.ALL:
        if "fake" in kind.name:  # has no memory; its own dispatcher reads the strides before set_
            continue
        with way.scope():
            _, outcome, changed = _try(kind, way, OVERFLOWING[name])
        if kind.has_metadata and "inference" not in kind.name:
            assert isinstance(outcome.error, RuntimeError), (kind, outcome.error)
        assert outcome.error is None or changed == {}, kind


def _differs_in(expected: State, found: State) -> dict[str, Any]:
    differs = differences(expected, found)
    # What is new in a storage that has grown is whatever was in that memory.
    for name in ("bytes", "parts"):
        differs.pop(name, None)
    if "wrapped" in differs:
        differs["wrapped"] = _differs_in(expected["wrapped"], found["wrapped"])  # type: ignore[assignment]
    return {name: value for name, value in differs.items() if value}


@pytest.mark.parametrize(
    "kind",
    **named(tuple(k for k in kinds.STRIDED if "Parameter" not in k.name and k.name != "non-leaf")),
)
def test_torch_itself_corrupts_every_strided_kind(kind: Kind) -> None:
    """The same check, seen to fail: if this one passed on corrupt tensors, so would the other."""
    corrupted = {
        operation
        for operation, calls in OPERATIONS.items()
        for name in calls
        if _on_torch(kind, operation, name)[2]
    }
    assert corrupted >= {"resize_", "set_"}


@pytest.mark.parametrize("kind", **named(kinds.COMPRESSED_KINDS))
def test_torch_itself_corrupts_row_pointers(kind: Kind) -> None:
    tensor = kind.make()
    with pytest.raises(RuntimeError):
        tensor.resize_(HUGE, 3)
    pointers = kinds.compressed_parts(tensor)[0]
    assert pointers.numel() > 3 * 2 * pointers.untyped_storage().nbytes()


@each_way
@pytest.mark.parametrize("kind", **named(kinds.COMPRESSED_KINDS))
def test_a_sparse_tensor_saved_for_backward_keeps_its_version(kind: Kind, way: Way) -> None:
    tensor = kind.make()
    with way.scope():
        for size in ((HUGE, 3), (2, HUGE, 3), (2, 2**62)):
            before = tensor._version
            with pytest.raises(RuntimeError):
                way.resize_(tensor, size)
            assert tensor._version == before


@pytest.mark.parametrize("kind", **named(kinds.LOCKED))
def test_a_storage_that_cannot_grow_raises_exactly_what_torch_raises(kind: Kind) -> None:
    with pytest.raises(RuntimeError) as torchs, kind.scope():
        kind.make().resize_(1000)
    with pytest.raises(RuntimeError) as ours, kind.scope():
        safe_resize_(kind.make(), 1000)
    assert type(ours.value) is type(torchs.value)
    assert str(ours.value) == str(torchs.value)


@each_way
def test_out_of_memory_is_raised_as_torch_raises_it(way: Way) -> None:
    tensor = plain()
    with way.scope(), pytest.raises(RuntimeError, match=r"(?i)memory"):
        way.resize_(tensor, HUGE)
    assert tensor.shape == (2, 3)
    assert tensor.sum() == 15


class TestSharedMemory:
    GROW = (
        "resize_(tensor, 1000)",
        "resize_as_(tensor, torch.empty(1000))",
        "set_(tensor, tensor.untyped_storage(), 0, (1000,), (1,))",
        "set_(torch.empty(0), tensor.untyped_storage(), 0, (1000,))",
        "set_(torch.empty(0), tensor, 0, (1000,), (1,))",
        "set_(torch.empty(0), tensor.untyped_storage(), 1000, (1,))",
        "set_(torch.empty(0), tensor.untyped_storage(), 1000, ())",
        "resize_(torch.empty(0).share_memory_(), ())",
    )

    def test_kills_the_process_on_torch_and_raises_with_the_helpers(self) -> None:
        program = f"""
            import faulthandler, os
            import torch, torchguard

            for line in {self.GROW}:
                for prefix in ("torch.Tensor.", "torchguard.safe_"):
                    child = os.fork()
                    if child == 0:
                        tensor = torch.ones(4).share_memory_()
                        try:
                            eval(prefix + line)
                        except torchguard.NonResizableStorageError as error:
                            intact = tensor.tolist() == [1, 1, 1, 1] and len(tensor) == 4
                            name = line.partition("(")[0]
                            ours = str(error).startswith(f"safe_{{name}}: ")
                            os._exit(7 if intact and ours else 8)
                        os._exit(0)
                    status = os.waitpid(child, 0)[1]
                    print(prefix, os.waitstatus_to_exitcode(status))
        """
        lines = output_of(program).splitlines()
        bare = [line for line in lines if line.startswith("torch.Tensor. -")]
        assert len(bare) == len(self.GROW), lines
        assert lines.count("torchguard.safe_ 7") == len(self.GROW), lines

    @each_way
    @pytest.mark.parametrize("kind", **named(kinds.SHARED))
    def test_refuses_to_grow_and_names_what_to_do(self, kind: Kind, way: Way) -> None:
        tensor = kind.make()
        before = state(tensor)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: way.resize_(tensor, 1000),
            lambda: way.resize_(tensor, (100, 10)),
            lambda: way.resize_as_(tensor, torch.empty(1000)),
            lambda: way.set_(tensor, tensor.untyped_storage(), 0, (1000,), (1,)),
            lambda: way.set_(tensor, tensor.untyped_storage(), 0, (1000,)),
            lambda: way.set_(tensor, tensor, 0, (1000,), (1,)),
            lambda: way.set_(
                tensor, source=tensor.untyped_storage(), storage_offset=99, size=(2,), stride=(2,)
            ),
        )
        for call in calls:
            with way.scope(), pytest.raises(NonResizableStorageError) as caught:
                call()
            assert isinstance(caught.value, RuntimeError)
            assert str(tuple(tensor.shape)) in str(caught.value)
            assert "bytes" in str(caught.value)
            assert "share_memory_()" in str(caught.value)
            assert differences(before, state(tensor)) == {}

    @each_way
    def test_may_shrink_and_stay(self, way: Way) -> None:
        tensor = plain().share_memory_()
        with way.scope():
            way.resize_(tensor, 2, 2)
            way.resize_(tensor, 6)
            way.resize_as_(tensor, torch.empty(3))
            way.set_(tensor, tensor.untyped_storage(), 2, (2,), (1,))
        assert tensor.tolist() == [2, 3]
        assert tensor.is_shared()

    @each_way
    def test_is_not_asked_for_while_a_tensor_does_not_grow(
        self, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[torch.UntypedStorage] = []
        is_shared = torch.UntypedStorage.is_shared

        def counting(storage: torch.UntypedStorage) -> bool:
            asked.append(storage)
            return is_shared(storage)

        monkeypatch.setattr(torch.UntypedStorage, "is_shared", counting)
        tensor, view = plain(), torch.arange(12.0)[2:8]
        with way.scope():
            way.resize_(tensor, 3)
            way.resize_(tensor, 2, 3)
            way.resize_(tensor, (6,))
            way.resize_(view, 2, 5)
            way.resize_as_(tensor, torch.empty(2))
            way.set_(tensor, tensor.untyped_storage(), 0, (3,), (1,))
            way.set_(tensor, plain())
            assert asked == []
            way.resize_(tensor, 7)
        assert len(asked) == (2 if way is BOTH else 1)  # one for each layer

    def test_of_a_file_that_torch_refuses_to_grow_itself_says_what_torch_says(self) -> None:
        kind = next(kind for kind in kinds.LOCKED if kind.name == "shared file mapping")
        with pytest.raises(RuntimeError) as caught:
            safe_resize_(kind.make(), 1000)
        assert not isinstance(caught.value, NonResizableStorageError)


class TestTheVersionCounter:
    def saved_for_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
        saved = locked([5.0, 7.0])
        return weight, saved, (weight * saved).sum()

    @each_way
    @pytest.mark.parametrize("operation", ["resize_", "resize_as_", "set_"])
    def test_lets_backward_go_on_after_a_failure(self, way: Way, operation: str) -> None:
        weight, saved, loss = self.saved_for_backward()
        arguments: dict[str, tuple[Any, ...]] = {
            "resize_": (1000,),
            "resize_as_": (torch.empty(1000),),
            "set_": (saved.untyped_storage(), 0, (1000,), (1,)),
        }
        with way.scope(), pytest.raises(RuntimeError):
            getattr(way, operation)(saved, *arguments[operation])
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [5, 7]

    def test_is_not_what_saves_plain_torch(self) -> None:
        weight, saved, loss = self.saved_for_backward()
        with pytest.raises(RuntimeError):
            saved.resize_(1000)
        spoiled = outcome_of(loss.backward).error is not None
        wrong = weight.grad is None or weight.grad.tolist() != [5, 7]
        assert spoiled or wrong or saved.shape == (1000,)

    @each_way
    def test_moves_on_when_it_succeeds(self, way: Way) -> None:
        weight = torch.tensor([2.0, 3.0], requires_grad=True)
        saved = torch.tensor([5.0, 7.0])
        loss = (weight * saved).sum()
        twin = torch.tensor([5.0, 7.0])
        twin.resize_(1)
        with way.scope():
            way.resize_(saved, 1)
        assert saved._version == twin._version
        if twin._version:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    @each_way
    def test_is_shared_with_views_and_comes_back_for_them_too(self, way: Way) -> None:
        base = locked([1.0, 2.0, 3.0, 4.0])
        view = base[1:3]
        base.add_(1)
        versions = base._version, view._version
        with way.scope(), pytest.raises(RuntimeError):
            way.resize_(view, 1000)
        assert (base._version, view._version) == versions
        assert view.tolist() == [3, 4]


class Interrupting(torch.Tensor):
    """Raises KeyboardInterrupt after torch has done the work."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise KeyboardInterrupt


@each_way
@pytest.mark.parametrize("operation", ["resize_", "resize_as_"])
def test_an_interrupt_after_the_call_is_undone_as_well(way: Way, operation: str) -> None:
    def make() -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return torch.arange(4.0).as_subclass(Interrupting)

    arguments: dict[str, tuple[Any, ...]] = {
        "resize_": (100,),
        "resize_as_": (torch.empty(100),),
    }
    for each, expected in ((BARE, False), (way, True)):
        tensor = make()
        before = state(tensor)
        with each.scope(), pytest.raises(KeyboardInterrupt):
            getattr(each, operation)(tensor, *arguments[operation])
        assert (differences(before, state(tensor)) == {}) is expected


class OverridesMethods(torch.Tensor):
    """A subclass with methods of its own, as DTensor-like classes have."""

    def resize_(self, *size: Any, **options: Any) -> Any:
        kinds.CALLS.append(("own resize_", size, options))
        return super().resize_(*size, **options)

    def resize_as_(self, *args: Any, **options: Any) -> Any:
        kinds.CALLS.append(("own resize_as_", args, options))
        return super().resize_as_(*args, **options)

    def set_(self, *args: Any, **options: Any) -> Any:
        kinds.CALLS.append(("own set_", args, options))
        return super().set_(*args, **options)


@each_way
@pytest.mark.parametrize("operation", ["resize_", "resize_as_", "set_"])
def test_a_subclass_may_have_its_own_method(way: Way, operation: str) -> None:
    source = torch.zeros(2)
    arguments: dict[str, Any] = {"resize_": 2, "resize_as_": source, "set_": source}
    kinds.CALLS.clear()
    tensor = torch.arange(4.0).as_subclass(OverridesMethods)
    with way.scope():
        getattr(way, operation)(tensor, arguments[operation])
    if "torch." in way.name and operation == "resize_as_":
        return  # torch.resize_as_ does not ask for methods
    assert [call[0] for call in kinds.CALLS] == [f"own {operation}"]


class Recorder:
    """What a ``__torch_function__`` saw: the function by identity, types, args, kwargs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> None:
        shown = tuple(id(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        self.seen.append((func, tuple(types), len(shown), shown[1:], dict(kwargs or {})))


RECORDED = Recorder()


class Recording(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        RECORDED(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class RecordingMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded = Recorder()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.recorded(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class RecordingDispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen.append((func, args[1:], kwargs))
        return func(*args, **(kwargs or {}))


SOURCE = torch.zeros(3)
GOOD: dict[str, Callable[[Way, torch.Tensor], Any]] = {
    "resize_": lambda way, t: way.resize_(t, 2),
    "resize_ with integers": lambda way, t: way.resize_(t, 20, 3),
    "resize_ with a tuple": lambda way, t: way.resize_(t, (3, 2)),
    "resize_ with a format": lambda way, t: way.resize_(
        t, (1, 2, 3, 4), memory_format=torch.channels_last
    ),
    "resize_as_": lambda way, t: way.resize_as_(t, SOURCE),
    "set_ a tensor": lambda way, t: way.set_(t, SOURCE),
    "set_": lambda way, t: way.set_(t),
    "set_ a view": lambda way, t: way.set_(t, SOURCE.untyped_storage(), 1, (2,), (1,)),
}


def _calls_seen_by_a_subclass(way: Way, call: Callable[[Way, torch.Tensor], Any]) -> list[Any]:
    tensor = torch.arange(4.0).as_subclass(Recording)
    with way.scope():
        RECORDED.seen.clear()
        call(way, tensor)
        return list(RECORDED.seen)


@pytest.mark.parametrize("name", GOOD)
def test_a_subclass_sees_the_calls_it_sees_on_torch_under_install(name: str) -> None:
    expected = _calls_seen_by_a_subclass(BARE, GOOD[name])
    assert len(expected) == (0 if "set_" in name else 1)  # torch shows set_ to nobody
    assert _calls_seen_by_a_subclass(INSTALLED, GOOD[name]) == expected


@pytest.mark.parametrize("name", GOOD)
def test_a_subclass_sees_one_call_of_the_same_function_from_a_helper(name: str) -> None:
    expected = _calls_seen_by_a_subclass(BARE, GOOD[name])
    seen = _calls_seen_by_a_subclass(HELPERS, GOOD[name])
    assert [call[:2] for call in seen] == [call[:2] for call in expected]


@pytest.mark.parametrize("name", GOOD)
def test_a_subclass_sees_the_calls_it_sees_on_torch_inside_guarded(name: str) -> None:
    expected = _calls_seen_by_a_subclass(BARE, GOOD[name])
    tensor = torch.arange(4.0).as_subclass(Recording)
    with torchguard.guarded():
        RECORDED.seen.clear()
        GOOD[name](BARE, tensor)
        assert list(RECORDED.seen) == expected


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
@each_way
def test_a_mode_of_the_user_sees_the_calls_it_sees_on_torch(way: Way, fails: bool) -> None:
    size = (2**62, 4) if fails else (3, 3)
    seen = []
    for each in (BARE, way):
        tensor = plain()
        # The guard is the outer one: the user's mode is asked first.
        with each.scope(), RecordingMode() as mode:
            outcome = outcome_of(lambda: each.resize_(tensor, *size))  # noqa: B023
        assert (outcome.error is not None) is fails
        seen.append([(func, types, size) for func, types, _, size, _ in mode.recorded.seen])
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]


@each_way
def test_a_dispatch_mode_of_the_user_sees_no_extra_call_when_it_succeeds(way: Way) -> None:
    seen = []
    for each in (BARE, way):
        tensor = plain()
        with each.scope(), RecordingDispatchMode() as mode:
            each.resize_(tensor, 3, 3)
            each.resize_as_(tensor, SOURCE)
            each.set_(tensor, SOURCE)
        seen.append([func for func, _, _ in mode.seen])
    assert seen[1] == seen[0]


@each_way
def test_a_dispatch_mode_of_the_user_does_not_see_what_is_undone(way: Way) -> None:
    tensor = locked([1.0])
    with way.scope(), RecordingDispatchMode() as mode, pytest.raises(RuntimeError):
        way.resize_(tensor, 100)
    assert [func.name() for func, _, _ in mode.seen] == ["aten::resize_"]


@each_way
def test_a_traceback_gains_one_line(way: Way) -> None:
    def lines(each: Way) -> list[str]:
        with each.scope():
            error = outcome_of(lambda: each.resize_(locked([1.0]), 100)).error
        assert error is not None
        frames = traceback.extract_tb(error.__traceback__)
        return [frame.filename for frame in frames if "torchguard" in frame.filename]

    assert lines(BARE) == []
    limit = {"guarded": 2, "helpers under install": 2}.get(way.name, 1)
    assert len(lines(way)) <= limit


@each_way
def test_an_exception_has_no_context_of_ours(way: Way) -> None:
    with way.scope():
        error = outcome_of(lambda: way.resize_(locked([1.0]), 100)).error
    assert error is not None
    assert error.__cause__ is None
    assert error.__context__ is None


def test_the_helpers_return_the_tensor_itself_and_the_type_it_has() -> None:
    parameter = torch.nn.Parameter(plain(), requires_grad=False)
    assert safe_resize_(parameter, 2) is parameter
    assert safe_resize_as_(parameter, SOURCE) is parameter
    assert safe_set_(parameter, SOURCE) is parameter
    assert type(parameter) is torch.nn.Parameter


def test_safe_set_without_a_source_empties_the_tensor_as_torch_does() -> None:
    assert safe_set_(plain()).shape == plain().set_().shape == (0,)  # type: ignore[call-overload]


@pytest.mark.parametrize("helper", [safe_resize_, safe_resize_as_, safe_set_])
def test_the_helpers_have_a_readable_signature_and_say_what_they_equal(
    helper: Callable[..., Any],
) -> None:
    assert next(iter(inspect.signature(helper).parameters)) == "tensor"
    assert "Equals ``tensor." in (helper.__doc__ or "")
    assert "https://github.com/pytorch/pytorch/issues/170298" in (helper.__doc__ or "")
    assert pickle.loads(pickle.dumps(helper)) is helper  # noqa: S301


def test_a_tensor_that_was_corrupt_before_can_be_resized_back() -> None:
    tensor = locked([1.0, 2.0])
    with pytest.raises(RuntimeError):
        tensor.resize_(100)
    assert not torchguard.is_consistent(tensor)
    assert safe_resize_(tensor, 2).tolist() == [1, 2]


def test_symbolic_and_index_like_sizes_are_taken_as_torch_takes_them() -> None:
    class Four:
        def __index__(self) -> int:
            return 4

    for size in (torch.tensor(4), torch.Size([2, 2]), [torch.tensor(2), 2], True, Four()):
        theirs = outcome_of(lambda: plain().resize_(size))  # type: ignore[arg-type]  # noqa: B023
        ours = outcome_of(lambda: safe_resize_(plain(), size))  # type: ignore[arg-type]  # noqa: B023
        assert type(ours.error) is type(theirs.error)
        if theirs.error is None:
            assert ours.result.shape == theirs.result.shape


def test_an_unknown_keyword_is_refused_as_torch_refuses_it() -> None:
    for options in ({"second": 4}, {"sizes": (2,)}, {"rest": ()}):
        with pytest.raises(TypeError):
            plain().resize_(2, **options)
        with torchguard.install(), pytest.raises(TypeError):
            plain().resize_(2, **options)


@each_way
def test_inside_vmap_a_failure_stays_torchs(way: Way) -> None:
    def body(row: torch.Tensor) -> torch.Tensor:
        return way.resize_(row, 100)

    with way.scope():
        ours = outcome_of(lambda: torch.vmap(body)(torch.ones(2, 3)))
    theirs = outcome_of(lambda: torch.vmap(lambda row: row.resize_(100))(torch.ones(2, 3)))
    assert type(ours.error) is type(theirs.error)


# --- arguments by name


@pytest.mark.parametrize("scope", [torchguard.install, torchguard.guarded])
def test_torch_resize_as_takes_its_arguments_by_name(scope: Callable[[], Any]) -> None:
    with scope():
        tensor = torch.ones(2)
        given: dict[str, Any] = {"input": tensor, "the_template": torch.ones(30)}
        assert torch.resize_as_(**given) is tensor
        assert tensor.shape == (30,)
        stuck = locked([1.0, 2.0])
        before = state(stuck)
        with pytest.raises(RuntimeError):
            torch.resize_as_(input=stuck, the_template=torch.ones(30))
        assert differences(before, state(stuck)) == {}
        functions: tuple[Any, ...] = (torch.resize_as_, torch.Tensor.resize_as_, torch.Tensor.set_)
        for function in functions:
            with pytest.raises(TypeError):
                function(self=torch.ones(2), the_template=torch.ones(3))


def test_what_is_written_is_found_by_the_name_input() -> None:
    weight = torch.ones(3, requires_grad=True)
    numbers = torch.arange(3.0)
    loss = (weight * numbers).sum()
    with torchguard.guarded(data=True), pytest.raises(IndexError):
        torch.index_put_(input=numbers, indices=[torch.tensor([0, 7])], values=torch.ones(2))
    assert numbers.tolist() == [0, 1, 2]
    loss.backward()
