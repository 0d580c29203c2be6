"""resize_, resize_as_ and set_: what succeeds is torch's, what fails has changed nothing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import kinds
from support.child_process import output_of
from support.kinds import Kind, empty_locked, named, plain, state, values
from support.ways import (
    BARE,
    BOTH,
    ON_TORCH,
    WAYS,
    Way,
    differences,
    each_way,
    ends_the_process,
    outcome_of,
)
from torchguard import safe_resize_
from torchguard.errors import NonResizableStorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kinds import State


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
                        except torchguard.errors.NonResizableStorageError as error:
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
