"""resize_, resize_as_ and set_: what succeeds is torch's, what fails has changed nothing."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from support import kinds
from support.kinds import Kind, State, empty_locked, locked, state, values
from support.ways import (
    BARE,
    BOTH,
    GUARDED,
    HELPERS,
    ON_TORCH,
    WAYS,
    Way,
    differences,
    each_way,
    ends_the_process,
    outcome_of,
)
from torchguard import safe_resize_, safe_resize_as_, safe_set_
from torchguard.errors import NonResizableStorageError
from torchguard.rollback.consistency import is_consistent

HUGE = 2**58  # elements: no machine has the memory, and no count of bytes overflows
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def given(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


class Four:
    def __index__(self) -> int:
        return 4


SIZES: tuple[Any, ...] = (
    *((0,), (1,), (1, 1), (5,), ((),), ([2, 1],)),
    *((torch.tensor(4),), (torch.Size([2, 2]),), ([torch.tensor(2), 2],), (True,), (Four(),)),
    *((1000,), (3, 4, 5, 6), ((20, 3),)),
    # No memory, too many elements, too many bytes, beyond int64.
    *((HUGE,), (HUGE, 2), (2, HUGE, 2), (2, 2**62), (2**62, 4), (2**62,), (2**70,)),
    *((-1,), ((3, -2),), (-3, -2), (2**63 - 1,), (-(2**63),), (2**64,)),
    *(("two",), (b"2",), (1.5,), (torch.tensor(1.5),), (None,), (), ([2], 3), ([[3, 1]],)),
)
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def like(t: torch.Tensor) -> torch.Tensor:
    device = t.device if t.device.type == "meta" else "cpu"
    return torch.zeros(4, dtype=t.dtype if not t.is_quantized else torch.float32, device=device)


def storage(t: torch.Tensor) -> torch.UntypedStorage:
    return like(t).untyped_storage()


def locked_storage() -> torch.UntypedStorage:
    return empty_locked(torch.uint8, 16).untyped_storage()


OPERATIONS: dict[str, tuple[Arguments | Callable[[torch.Tensor], Arguments], ...]] = {
    "resize_": (
        *(given(*size) for size in SIZES),
        lambda t: given(tuple(t.shape)),
        lambda t: given(t.numel()),
        given(size=(1000,)),
        given(1, 2, 1, 1, memory_format=LAST),
        given((4, 3, 20, 20), memory_format=LAST),
        given(2, 2, memory_format=LAST),
        given((50, 50), memory_format=LAST_3D),
        given(2, memory_format=torch.preserve_format),
        given(2, memory_format="channels"),
        *(given(2, **wrong) for wrong in ({"format": 1}, {"second": 4}, {"rest": ()})),
    ),
    # Made inside the scope of a fake tensor's mode, as a program makes them.
    "resize_as_": (
        lambda _: given(torch.empty(1)),
        lambda _: given(torch.empty(1, dtype=torch.int64)),
        lambda _: given(torch.empty(30, 40)),
        lambda _: given(torch.empty(30, 40), memory_format=None),
        lambda _: given(
            torch.empty(1, 2, 3, 4).to(memory_format=LAST), memory_format=torch.preserve_format
        ),
        lambda _: given(torch.empty(1).expand(HUGE)),
        lambda _: given(torch.empty(1).expand(HUGE, 2)),
        lambda _: given(torch.empty(30, 40), memory_format=LAST),
        lambda _: given(torch.eye(20).to_sparse()),
        given("template"),
        given(None),
        lambda t: given(t, memory_format=3),
    ),
    "set_": (
        given(),
        lambda t: given(like(t)),
        lambda t: given(source=like(t)),
        lambda t: given(storage(t)),
        lambda t: given(storage(t), 1, (2,), (1,)),
        lambda t: given(storage(t), 0, (2, 2)),
        lambda t: given(storage(t), 3, (9, 9), (20, 2)),
        lambda t: given(t.untyped_storage(), 0, (1,), (1,)),
        lambda t: given(storage(t), 0, (HUGE,), (1,)),
        lambda _: given(locked_storage(), 0, (100,), (1,)),
        lambda _: given(locked_storage(), 100, (1,), (1,)),
        lambda t: given(t.untyped_storage(), t.storage_offset(), (300,), (2,)),
        lambda t: given(t.untyped_storage(), 0, (1000,)),
        lambda t: given(t, 0, (1000,), (1,)),
        lambda t: given(source=t.untyped_storage(), storage_offset=99, size=(2,), stride=(2,)),
        lambda t: given(storage(t), 0, (2**62, 4), (4, 1)),
        lambda t: given(storage(t), 0, (-1,), (1,)),
        lambda t: given(storage(t), 0, (2,), (-1,)),
        lambda t: given(storage(t), -1, (2,), (1,)),
        lambda t: given(storage(t), 0, (2,), (1, 1)),
        lambda t: given(torch.zeros(4, dtype=torch.int16 if t.is_floating_point() else torch.half)),
        lambda t: given(torch.zeros(4, dtype=t.dtype, device="cpu" if t.is_meta else "meta")),
        given("storage"),
        given(np.zeros(3)),
        lambda t: given(storage(t), 0, "ab"),
        lambda t: given(storage(t), 0, ("a", "b")),
        lambda t: given(storage(t), "a", (2,), (1,)),
    ),
}


def _call(way: Way, tensor: torch.Tensor, operation: str, number: int) -> Any:
    made = OPERATIONS[operation][number]
    args, kwargs = made(tensor) if callable(made) else made
    return getattr(way, operation)(tensor, *args, **kwargs)


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
def _on_torch(kind: Kind, operation: str, number: int) -> Any:
    """What torch does: its error, or the values where it succeeds."""

    def call(way: Way, tensor: torch.Tensor) -> Any:
        return _call(way, tensor, operation, number)

    if kind.kills and ends_the_process(lambda: call(BARE, kind.make())):
        return NonResizableStorageError(), None
    tensor, outcome, _ = _try(kind, BARE, call)
    if outcome.error is not None:
        return outcome.error.with_traceback(None), None
    return None, values(tensor)


def _cases() -> list[Any]:
    few = {"plain", "numpy", "shared memory", "numpy subclass"}
    each = (HELPERS, GUARDED)
    return [
        pytest.param(
            kind,
            operation,
            way,
            id=f"{kind.name}-{operation}-{way.name}",
            marks=[] if way in each else pytest.mark.slow,
        )
        for kind in kinds.ALL
        for operation in OPERATIONS
        for way in WAYS
        if (way is not BOTH or kind.name in few)
        and (way is not ON_TORCH or operation == "resize_as_")
    ]


@pytest.mark.parametrize(("kind", "operation", "way"), _cases())
def test_equals_torch_or_changes_nothing(kind: Kind, operation: str, way: Way) -> None:
    """The result, the error and its text are torch's; where that dies, it is an error of ours."""
    numbers = range(len(OPERATIONS[operation]))
    torchs = [_on_torch(kind, operation, number) for number in numbers]
    wrong: list[str] = []
    with way.scope():
        for number in numbers:
            error, expected = torchs[number]
            tensor, ours, changed = _try(
                kind,
                way,
                lambda way, t: _call(way, t, operation, number),  # noqa: B023
            )
            if error is None:
                if ours.error is not None:
                    wrong.append(f"{number}: torch succeeds, here {ours.error!r}")
                elif ours.result is not tensor:
                    wrong.append(f"{number}: returned another object")
                elif differs := _differs_in(expected, values(tensor)):
                    wrong.append(f"{number}: differs from torch in {differs}")
                continue
            same_text = type(error) is not RuntimeError or str(error) == str(ours.error)
            if type(ours.error) is not type(error) or not same_text:
                wrong.append(f"{number}: torch raises {error!r}, here {ours.error!r}")
            if changed and kind not in kinds.COMPRESSED_KINDS:  # a limit that the page names
                wrong.append(f"{number}: {changed}")
    if wrong:  # not an assertion, which would show all of this twice
        pytest.fail("\n".join(wrong), pytrace=False)


def _differs_in(expected: State, found: State) -> dict[str, Any]:
    differs = differences(expected, found)
    # What is new in a storage that has grown is whatever was in that memory.
    for name in ("bytes", "parts"):
        differs.pop(name, None)
    if "wrapped" in differs:
        differs["wrapped"] = _differs_in(expected["wrapped"], found["wrapped"])  # type: ignore[assignment]
    return {name: value for name, value in differs.items() if value}


OVERFLOWING: dict[str, Arguments] = {
    "resize_": given((0, 5, 10, 10, HUGE)),
    "resize_, channels_last_3d": given((0, 5, 10, 10, HUGE), memory_format=LAST_3D),
    "resize_as_": given(torch.empty(0, 1, 1, 1, 1, device="meta").expand(-1, 5, 10, 10, HUGE)),
}


@each_way
@pytest.mark.parametrize("name", OVERFLOWING)
def test_strides_that_overflow_are_put_back_without_being_read(name: str, way: Way) -> None:
    """Plain torch is not asked here: what it leaves behind can't be read by this process."""
    operation, (args, kwargs) = name.partition(",")[0], OVERFLOWING[name]
    for kind in kinds.ALL:
        if "fake" in kind.name:  # has no memory; its own dispatcher reads the strides before set_
            continue
        with way.scope():
            _, outcome, changed = _try(
                kind, way, lambda way, t: getattr(way, operation)(t, *args, **kwargs)
            )
        if kind.has_metadata and "inference" not in kind.name:
            assert isinstance(outcome.error, RuntimeError), (kind, outcome.error)
        assert outcome.error is None or changed == {}, kind


CANNOT_GROW = r"^(safe_)?\w+_: .*\) would need \d+ bytes.* holds \d+ bytes.*\.share_memory_\(\)"


@each_way
def test_a_storage_in_shared_memory_that_is_too_small_is_described(way: Way) -> None:
    calls: tuple[Callable[[Way, torch.Tensor], Any], ...] = (
        lambda way, shared: way.set_(torch.empty(0), shared.untyped_storage(), 0, (1000,)),
        lambda way, shared: way.set_(torch.empty(0), shared, 0, (1000,), (1,)),
        lambda way, shared: way.set_(torch.empty(0), shared.untyped_storage(), 1000, (1,)),
        lambda way, shared: way.set_(torch.empty(0), shared.untyped_storage(), 1000, ()),
        lambda way, _: way.resize_(torch.empty(0).share_memory_(), ()),
        lambda way, shared: way.resize_as_(shared, torch.ones(1000)),
    )
    for call in calls:
        shared = torch.ones(4).share_memory_()
        before = state(shared)
        with way.scope(), pytest.raises(NonResizableStorageError, match=CANNOT_GROW):
            call(way, shared)
        assert differences(before, state(shared)) == {}


class OverridesMethods(torch.Tensor):
    """A subclass with methods of its own, as DTensor-like classes have."""

    def resize_(self, *size: Any, **options: Any) -> Any:
        kinds.CALLS.append(("resize_", size, options))
        return super().resize_(*size, **options)

    def resize_as_(self, *args: Any, **options: Any) -> Any:
        kinds.CALLS.append(("resize_as_", args, options))
        return super().resize_as_(*args, **options)

    def set_(self, *args: Any, **options: Any) -> Any:
        kinds.CALLS.append(("set_", args, options))
        return super().set_(*args, **options)


@each_way
def test_a_subclass_may_have_its_own_method(way: Way) -> None:
    for operation in OPERATIONS:
        kinds.CALLS.clear()
        tensor = torch.arange(4.0).as_subclass(OverridesMethods)
        with way.scope():
            getattr(way, operation)(tensor, 2 if operation == "resize_" else torch.zeros(2))
        if way is not ON_TORCH or operation != "resize_as_":  # torch.resize_as_ asks for no methods
            assert [call[0] for call in kinds.CALLS] == [operation]


def test_a_tensor_that_was_corrupt_before_can_be_resized_back() -> None:
    tensor = locked([1.0, 2.0])
    with pytest.raises(RuntimeError):
        tensor.resize_(100)
    assert not is_consistent(tensor)
    assert safe_resize_(tensor, 2).tolist() == [1, 2]


def test_torch_resize_as_takes_its_arguments_by_name() -> None:
    with torchguard.guarded():
        tensor = torch.ones(2)
        by_name: dict[str, Any] = {"input": tensor, "the_template": torch.ones(30)}
        assert torch.resize_as_(**by_name) is tensor
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


@pytest.mark.parametrize("helper", [safe_resize_, safe_resize_as_, safe_set_])
def test_a_helper_can_be_pickled(helper: Callable[..., Any]) -> None:
    assert pickle.loads(pickle.dumps(helper)) is helper  # noqa: S301
