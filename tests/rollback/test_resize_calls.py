"""resize_, resize_as_ and set_: subclasses, modes, interrupts, tracebacks, arguments."""

from __future__ import annotations

import inspect
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support import kinds
from support.kinds import locked, plain, state
from support.modes import DispatchMode, FunctionMode
from support.ways import BARE, HELPERS, INSTALLED, Way, differences, each_way, outcome_of
from torchguard import safe_resize_, safe_resize_as_, safe_set_
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable


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


RECORDED: list[Any] = []


def call_of(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The function by identity, types, args but the tensor itself, kwargs."""
    shown = tuple(id(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return func, tuple(types), len(shown), shown[1:], dict(kwargs)


class Recording(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        RECORDED.append(call_of(func, types, args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


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
        RECORDED.clear()
        call(way, tensor)
        return list(RECORDED)


@pytest.mark.parametrize("name", GOOD)
def test_a_subclass_sees_the_calls_it_sees_on_torch_under_install(name: str) -> None:
    expected = _calls_seen_by_a_subclass(BARE, GOOD[name])
    # torch does not dispatch set_ to __torch_function__.
    assert len(expected) == (0 if "set_" in name else 1)
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
        RECORDED.clear()
        GOOD[name](BARE, tensor)
        assert list(RECORDED) == expected


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
@each_way
def test_a_mode_of_the_user_sees_the_calls_it_sees_on_torch(way: Way, fails: bool) -> None:
    size = (2**62, 4) if fails else (3, 3)
    seen = []
    for each in (BARE, way):
        tensor = plain()
        # The guard is the outer one: the user's mode is asked first.
        with each.scope(), FunctionMode(call_of) as mode:
            outcome = outcome_of(lambda: each.resize_(tensor, *size))  # noqa: B023
        assert (outcome.error is not None) is fails
        seen.append([(func, types, size) for func, types, _, size, _ in mode.seen])
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]


@each_way
def test_a_dispatch_mode_of_the_user_sees_no_extra_call_when_it_succeeds(way: Way) -> None:
    seen = []
    for each in (BARE, way):
        tensor = plain()
        with each.scope(), DispatchMode() as mode:
            each.resize_(tensor, 3, 3)
            each.resize_as_(tensor, SOURCE)
            each.set_(tensor, SOURCE)
        seen.append(mode.seen)
    assert seen[1] == seen[0]


@each_way
def test_a_dispatch_mode_of_the_user_does_not_see_what_is_undone(way: Way) -> None:
    tensor = locked([1.0])
    with way.scope(), DispatchMode() as mode, pytest.raises(RuntimeError):
        way.resize_(tensor, 100)
    assert [func.name() for func in mode.seen] == ["aten::resize_"]


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
    assert not is_consistent(tensor)
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
