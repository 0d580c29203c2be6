"""install() and uninstall(): what they promise about torch, and the guard ``out``."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
import warnings
from collections import namedtuple
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from child_process import output_of, run_python

import torchguard
from torchguard import PatchConflictError, install, installed, uninstall
from torchguard import get_original as torch_has
from torchguard._torch import is_wrapped_builtin
from torchguard.patching.guards import GUARDS, Guard
from torchguard.patching.install import Installation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RESIZE = (
    "torch.Tensor.resize_",
    "torch.Tensor.resize_as_",
    "torch.Tensor.set_",
    "torch.resize_as_",
)


def snapshot() -> list[dict[str, Any]]:
    namespaces = (
        torch.Tensor,
        torch,
        torch.linalg,
        torch.special,
        torch.fft,
        torch.nn.functional,
    )
    return [dict(vars(namespace)) for namespace in namespaces]


def same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    return all(
        one.keys() == other.keys() and all(one[name] is other[name] for name in one)
        for one, other in zip(before, after, strict=True)
    )


def locked(*values: float) -> torch.Tensor:
    """A tensor whose storage can't grow."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def resize_is_safe() -> bool:
    tensor = locked(1, 2)
    with pytest.raises(RuntimeError):
        tensor.resize_(50)
    safe = tuple(tensor.shape) == (2,)
    torch.Tensor.set_(tensor, torch.empty(0))  # type: ignore[call-overload]
    return safe


def out_is_safe() -> bool:
    out = locked()
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(5), 1, out=out)
    safe = tuple(out.shape) == (0,)
    torch.Tensor.set_(out, torch.empty(0))  # type: ignore[call-overload]
    return safe


# --- installing and undoing


def test_install_guards_resize_and_nothing_else_by_default() -> None:
    assert not resize_is_safe()
    with install() as installation:
        assert installation.names == ("resize",)
        assert resize_is_safe()
        assert not out_is_safe()
    assert not resize_is_safe()


def test_uninstall_restores_every_attribute_or_its_absence() -> None:
    before = snapshot()
    assert "resize_" not in vars(torch.Tensor)
    install("resize", "out")
    assert "resize_" in vars(torch.Tensor)
    assert not same(before, snapshot())
    uninstall()
    assert same(before, snapshot())
    assert "resize_" not in vars(torch.Tensor)
    assert torch.Tensor.resize_ is torch._C.TensorBase.resize_


def test_installing_the_same_guard_twice_leaves_one_layer() -> None:
    first = install("resize")
    layer = torch.Tensor.resize_
    second = install("resize", "resize")
    assert second.names == ("resize",)
    assert torch.Tensor.resize_ is layer
    first.uninstall()
    assert torch.Tensor.resize_ is layer
    second.uninstall()
    assert "resize_" not in vars(torch.Tensor)


def test_different_names_add_up() -> None:
    with install("resize"):
        layer = torch.Tensor.resize_
        with install("out"):
            assert torchguard.installed() == ("resize", "out")
            assert torch.Tensor.resize_ is layer
            assert resize_is_safe()
            assert out_is_safe()
        assert torchguard.installed() == ("resize",)
        assert not out_is_safe()
    assert torchguard.installed() == ()


def test_nested_with_statements_count() -> None:
    with install("resize"):
        with install("resize", "out"):
            with install("resize"):
                pass
            assert resize_is_safe()
        assert resize_is_safe()
        assert not out_is_safe()
    assert not resize_is_safe()


def test_installations_may_end_in_any_order() -> None:
    first, second, third = install("resize"), install("out", "resize"), install("out")
    first.uninstall()
    assert torchguard.installed() == ("out", "resize") or torchguard.installed() == (
        "resize",
        "out",
    )
    second.uninstall()
    assert torchguard.installed() == ("out",)
    third.uninstall()
    assert torchguard.installed() == ()


def test_a_with_statement_that_raises_uninstalls_and_lets_the_error_through() -> None:
    with pytest.raises(ZeroDivisionError), install("resize"):
        raise ZeroDivisionError
    assert not installed()


def test_uninstall_by_name_undoes_every_layer_of_that_guard_only() -> None:
    install("resize")
    install("resize", "out")
    uninstall("resize")
    assert torchguard.installed() == ("out",)
    uninstall("out", "resize")
    assert torchguard.installed() == ()


def test_uninstall_with_nothing_installed_does_nothing() -> None:
    before = snapshot()
    uninstall()
    uninstall("out")
    assert same(before, snapshot())


def test_an_installation_says_what_it_did_and_uninstalls_once() -> None:
    outer = install("resize")
    inner = install("resize", "out")
    assert repr(inner) == "Installation(names=('resize', 'out'), skipped={})"
    inner.uninstall()
    inner.uninstall()
    assert "resize" in installed()
    outer.uninstall()
    assert not installed()


def test_an_installation_that_was_undone_by_name_lets_go_of_nobody_elses() -> None:
    mine = install("resize")
    uninstall()
    somebody_elses = install("resize")
    mine.uninstall()
    assert "resize" in installed()
    somebody_elses.uninstall()


def test_installed_looks_at_the_live_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not installed()
    assert "resize" not in installed()
    with install("resize"):
        assert installed()
        assert "resize" in installed()
        assert "out" not in installed()
        monkeypatch.setattr(torch.Tensor, "set_", torch_has("torch.Tensor.set_"))
        assert "resize" not in installed()
        assert not installed()
        assert torchguard.installed() == ()
        monkeypatch.undo()
        assert torchguard.installed() == ("resize",)


def test_original_is_torchs_own_function_patched_or_not() -> None:
    bare = {path: torch_has(path) for path in (*RESIZE, "torch.add", "torch.nn.functional.gelu")}
    with install("resize", "out"):
        for path, function in bare.items():
            assert torch_has(path) is function
        assert torch.add is not bare["torch.add"]
    assert torch_has("torch.Tensor.resize_") is torch._C.TensorBase.resize_


@pytest.mark.parametrize("path", ["torch.Tensor.no_such_method", "torch.no_such_module.add"])
def test_original_of_what_does_not_exist_raises(path: str) -> None:
    with pytest.raises(AttributeError):
        torch_has(path)


@pytest.mark.parametrize("path", ["Tensor.resize_", "numpy.add", "torch", ""])
def test_original_of_what_is_not_torchs_says_what_a_path_looks_like(path: str) -> None:
    with pytest.raises(ValueError, match=r"path is .*expected one like 'torch\.Tensor\.resize_'"):
        torch_has(path)


# --- unknown names


@pytest.mark.parametrize("function", [install, uninstall])
def test_an_unknown_name_is_refused_with_the_list_and_the_nearest(
    function: Callable[..., Any],
) -> None:
    before = snapshot()
    with pytest.raises(
        ValueError,
        match=rf"^{function.__name__}: there is no guard named 'resise'; did you mean 'resize'\? "
        r"guards are: .*\bout, .*resize",
    ):
        function("resise")
    with pytest.raises(ValueError, match=r"named 'zzz'; guards are: ") as refusal:
        function("zzz")
    assert "did you mean" not in str(refusal.value)
    assert same(before, snapshot())


def test_one_unknown_name_among_good_ones_installs_nothing() -> None:
    with pytest.raises(ValueError, match="named 'resise'"):
        install("resize", "resise")  # type: ignore[arg-type]
    assert not installed()


def test_a_list_of_names_is_refused_with_a_word_on_how_to_give_them() -> None:
    with pytest.raises((TypeError, ValueError), match=r"guards are|install"):
        install(["resize", "out"])  # type: ignore[arg-type]
    assert not installed()


# --- all or nothing


def _broken(_: Callable[..., Any]) -> Callable[..., Any]:
    raise ZeroDivisionError("this guard is broken")


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    def passing_on(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return passing_on


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "a replacement raises midway": lambda: {"torch.relu": _passing_on, "torch.chunk": _broken},
    "the list of replacements raises": lambda: _broken(len),  # type: ignore[dict-item, return-value]
    "a path does not exist": lambda: {"torch.relu": _passing_on, "torch.no_such": _passing_on},
    "a path can't be set": lambda: {
        "torch.relu": _passing_on,
        "torch._C.TensorBase.resize_": _passing_on,
    },
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_guard_that_fails_midway_undoes_everything(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot()
    scripted = dict(torch.jit._builtins._get_builtin_table())
    monkeypatch.setitem(GUARDS, "broken", Guard("broken", BROKEN[how], lambda: None))
    with pytest.raises((ZeroDivisionError, AttributeError, TypeError)):
        install("resize", "out", "broken")  # type: ignore[arg-type]
    assert same(before, snapshot())
    assert torchguard.installed() == ()
    now = torch.jit._builtins._get_builtin_table()
    assert [name for key, name in now.items() if key not in scripted] == []


@pytest.mark.parametrize("how", BROKEN)
def test_a_guard_that_fails_midway_leaves_what_was_installed_before(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GUARDS, "broken", Guard("broken", BROKEN[how], lambda: None))
    with install("resize"):
        layer = torch.Tensor.resize_
        before = snapshot()
        with pytest.raises((ZeroDivisionError, AttributeError, TypeError)):
            install("broken", "out", "resize")  # type: ignore[arg-type]
        assert same(before, snapshot())
        assert torchguard.installed() == ("resize",)
        assert torch.Tensor.resize_ is layer
    assert "resize_" not in vars(torch.Tensor)


def test_two_guards_on_one_path_leave_one_layer_and_the_last_takes_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        GUARDS, "second", Guard("second", lambda: {"torch.relu": _passing_on}, lambda: None)
    )
    monkeypatch.setitem(
        GUARDS, "third", Guard("third", lambda: {"torch.relu": _passing_on}, lambda: None)
    )
    bare = torch.relu
    first, second = install("second"), install("third")  # type: ignore[arg-type]
    layer = torch.relu
    assert layer is not bare
    first.uninstall()
    assert torch.relu is layer
    second.uninstall()
    assert torch.relu is bare
    install("second", "third")  # type: ignore[arg-type]
    uninstall("second", "third")  # type: ignore[arg-type]
    assert torch.relu is bare


# --- somebody patches on top


def on_top(*args: Any, **kwargs: Any) -> Any:
    return torch_has("torch.Tensor.resize_as_")(*args, **kwargs)


@pytest.mark.parametrize(
    "undo", [uninstall, lambda: uninstall("resize"), lambda: uninstall("out", "resize")]
)
def test_uninstall_refuses_to_overwrite_somebody_elses_patch_and_changes_nothing(
    undo: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("resize", "out")
    monkeypatch.setattr(torch.Tensor, "resize_as_", on_top)
    before = snapshot()
    with pytest.raises(
        PatchConflictError, match=r"^torch\.Tensor\.resize_as_ was patched .*on_top"
    ):
        undo()
    assert same(before, snapshot())
    assert resize_is_safe()
    monkeypatch.undo()
    undo()
    assert "resize" not in installed()
    uninstall()


def test_the_conflict_names_the_right_path_when_a_guard_is_named_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("resize")
    monkeypatch.setattr(torch, "resize_as_", on_top)
    with pytest.raises(PatchConflictError, match=r"^torch\.resize_as_ was patched"):
        uninstall("out", "resize")
    monkeypatch.undo()
    uninstall()


def test_an_installation_that_met_a_conflict_can_be_undone_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installation = install("resize")
    monkeypatch.setattr(torch.Tensor, "resize_", on_top)
    with pytest.raises(PatchConflictError):
        installation.uninstall()
    monkeypatch.undo()
    assert "resize" in installed()
    installation.uninstall()
    assert "resize_" not in vars(torch.Tensor)


def test_a_patch_that_was_deleted_is_a_conflict_too() -> None:
    install("resize")
    layer = torch.Tensor.resize_
    del torch.Tensor.resize_
    with pytest.raises(PatchConflictError):
        uninstall()
    torch.Tensor.resize_ = layer  # type: ignore[method-assign]
    uninstall()


def test_somebody_elses_patch_from_before_is_called_and_comes_back() -> None:
    calls = []

    def theirs(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return torch._C.TensorBase.resize_(self, *args, **kwargs)

    torch.Tensor.resize_ = theirs  # type: ignore[method-assign, assignment]
    try:
        with install("resize"):
            calls.clear()  # install() has tried it
            assert resize_is_safe()
            assert torch.ones(2).resize_(3).shape == (3,)
        assert torch.Tensor.resize_ is theirs
        assert calls == [(50,), (3,)]
    finally:
        del torch.Tensor.resize_


# --- patches of others, below


def wrapped_out(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return timed


def add_is_safe() -> bool:
    out = locked(1, 2)
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(9), 1, out=out)
    return out.shape == (2,)


@pytest.mark.parametrize("kind", ["wraps", "mock", "side effect", "partial"])
@pytest.mark.parametrize("name", ["add", "linalg.inv", "special.erf", "nn.functional.gelu"])
def test_a_function_that_somebody_has_wrapped_is_guarded_too(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = torch_has(f"torch.{name}")
    wrappers: dict[str, Callable[[], Any]] = {
        "wraps": lambda: wrapped_out(function),
        "mock": lambda: mock.MagicMock(wraps=function),
        "side effect": lambda: mock.MagicMock(side_effect=function),
        "partial": lambda: functools.partial(function),
    }
    theirs = wrappers[kind]()
    owner, _, short = f"torch.{name}".rpartition(".")
    monkeypatch.setattr(f"{owner}.{short}", theirs)
    before = snapshot()
    with install("out"):
        assert "out" in installed()
        out = locked(1, 2)
        with pytest.raises(RuntimeError):
            getattr(sys.modules[owner], short)(*locked_arguments(name), out=out)
        assert out.shape == (2,)
    assert same(before, snapshot())


def locked_arguments(name: str) -> tuple[Any, ...]:
    return (torch.eye(4), 1) if name == "add" else (torch.eye(4),)


def test_functions_that_torch_has_written_in_python_are_no_wrapped_builtins() -> None:
    guarded = set(GUARDS["out"].replacements())
    for name in ("chain_matmul", "nn.functional.softmax", "nn.functional.adaptive_max_pool2d"):
        assert f"torch.{name}" not in guarded
    assert not any(
        is_wrapped_builtin(namespace, name)
        for namespace in (torch, torch.linalg, torch.special, torch.fft, torch.nn.functional)
        for name in vars(namespace)
        if not name.startswith("_")
    )


@pytest.mark.parametrize("guard", ["out", "resize"])
def test_a_patch_below_ours_may_be_taken_away(guard: Any) -> None:
    """Its undoing puts torch's own in place of ours: that is said, and both ways go on."""
    owner, name = (torch, "add") if guard == "out" else (torch.Tensor, "resize_")
    is_safe = add_is_safe if guard == "out" else resize_is_safe
    bare = snapshot()
    for guard_again in (False, True):
        patcher = mock.patch.object(owner, name, wrapped_out(getattr(owner, name)))
        patcher.start()
        first = install(guard)
        assert is_safe()
        patcher.stop()
        assert guard not in installed()
        if guard_again:
            second = install(guard)
            assert guard in installed()
            assert is_safe()
            first.uninstall()
            assert is_safe()
            second.uninstall()
        else:
            first.uninstall()
        assert guard not in installed()
        assert same(bare, snapshot())
        with install(guard):
            assert is_safe()
        assert same(bare, snapshot())


def test_what_was_deleted_is_installed_again() -> None:
    bare = snapshot()
    install("resize")
    del torch.Tensor.resize_
    with pytest.raises(PatchConflictError, match=r"^torch\.Tensor\.resize_ was put back.*install"):
        uninstall()
    install("resize")
    assert resize_is_safe()
    uninstall()
    assert same(bare, snapshot())


def test_installing_again_adds_nothing_where_somebody_has_patched_on_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("out")
    theirs = wrapped_out(torch.add)
    monkeypatch.setattr(torch, "add", theirs)
    install("out")
    assert torch.add is theirs
    assert "out" not in installed()
    assert add_is_safe()
    monkeypatch.undo()
    assert "out" in installed()
    uninstall()


# --- only if needed


def fixed_resize(
    self: torch.Tensor, *size: Any, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """A resize_ that checks first: what torch may do one day."""
    bare = torch._C.TensorBase.resize_
    sizes = tuple(size[0]) if size and not isinstance(size[0], int) else size
    if min(sizes, default=0) < 0 or (
        torch.Size(sizes).numel() > self.numel() and not self.untyped_storage().resizable()
    ):
        raise RuntimeError("refused")
    return bare(self, *size, memory_format=memory_format)


def test_a_guard_that_this_torch_does_not_need_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "resize_", fixed_resize)
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: False)
    installation = install("resize")
    assert installation.names == ()
    assert list(installation.skipped) == ["resize"]
    assert "leaves the tensor as it was on this torch" in installation.skipped["resize"]
    assert not installed()
    assert torch.Tensor.resize_ is fixed_resize
    installation.uninstall()


def test_a_resize_that_is_fixed_for_all_but_shared_memory_is_still_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "resize_", fixed_resize)
    with install("resize") as installation:
        assert installation.skipped == {}


def test_a_skipped_guard_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "resize_", fixed_resize)
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: False)
    with install("resize", only_if_needed=False) as installation:
        assert installation.skipped == {}
        assert "resize" in installed()
    assert torch.Tensor.resize_ is fixed_resize


def test_the_out_guard_is_skipped_where_a_failing_out_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = torch.add

    def fixed_add(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = bare(*args, **kwargs)
        if out is None:
            return result
        if not out.untyped_storage().resizable():
            raise RuntimeError("refused")
        return out.resize_(result.shape).copy_(result)

    monkeypatch.setattr(torch, "add", fixed_add)
    with install("resize", "out") as installation:
        assert installation.names == ("resize",)
        assert list(installation.skipped) == ["out"]
        assert torch.add is fixed_add


@pytest.mark.parametrize("setting", ["device", "dtype", "inference", "no_grad", "deterministic"])
def test_no_setting_of_torch_makes_a_needed_guard_look_unneeded(setting: str) -> None:
    settings = {
        "device": lambda: torch.device("meta"),
        "dtype": _default_dtype,
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "deterministic": _deterministic,
    }
    with settings[setting](), install("resize", "out") as installation:  # type: ignore[attr-defined]
        assert installation.skipped == {}


class _default_dtype:  # noqa: N801
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float16)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


class _deterministic:  # noqa: N801
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(mode=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(mode=False)


# --- threads


def test_threads_that_install_and_uninstall_at_random_end_clean() -> None:
    before = snapshot()
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def at_random(seed: int) -> None:
        chooser = random.Random(seed)  # noqa: S311
        held: list[Installation] = []
        start.wait()
        try:
            for _ in range(40):
                if held and chooser.random() < 0.5:
                    held.pop(chooser.randrange(len(held))).uninstall()
                else:
                    held.append(install(chooser.choice(["resize", "resize", "out"])))
                tensor = torch.ones(4)
                assert tensor.resize_(2).shape == (2,)
                assert torch.add(tensor, 1, out=torch.empty(2)).tolist() == [2, 2]
                if any("resize" in each.names for each in held):
                    assert "resize" in installed()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        finally:
            for each in held:
                each.uninstall()

    threads = [threading.Thread(target=at_random, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert torchguard.installed() == ()
    assert same(before, snapshot())


# --- the guard `out`: failures


class Case:
    """One call that fails, with what it is to fail on."""

    def __init__(self, call: Callable[..., Any], *outs: Callable[[], torch.Tensor]) -> None:
        self.call = call
        self.outs = outs

    def __call__(self) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
        """Make the call, and yield each output with what it was before."""
        outs = [out() for out in self.outs]
        before = [_state(out) for out in outs]
        with pytest.raises((RuntimeError, IndexError)) as failure:
            self.call(*outs)
        assert not isinstance(failure.value, torchguard.TorchGuardError)
        yield from zip(outs, before, strict=True)


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        storage._cdata,  # which storage it is: growing may move its bytes
        storage.nbytes(),
        tensor.requires_grad,
    )


def locked_empty() -> torch.Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.float32))


def locked_long() -> torch.Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.int64))


def growable() -> torch.Tensor:
    return torch.arange(12.0)[3:9].view(2, 3).t()


MATRIX = torch.arange(1.0, 10).view(3, 3) + torch.eye(3)
FAR = torch.tensor([0, 99])
FAILING = {
    "add into numpy": Case(lambda out: torch.add(MATRIX, 1, out=out), locked_empty),
    "cat into numpy": Case(lambda out: torch.cat([MATRIX, MATRIX], out=out), locked_empty),
    "arange into numpy": Case(lambda out: torch.arange(9.0, out=out), locked_empty),
    "gelu into numpy": Case(
        lambda out: torch.nn.functional.gelu(MATRIX, out=out),  # type: ignore[call-arg]
        locked_empty,
    ),
    "normalize into numpy": Case(
        lambda out: torch.nn.functional.normalize(MATRIX, out=out), locked_empty
    ),
    "fft into numpy": Case(
        lambda out: torch.fft.rfft(MATRIX, out=out),
        lambda: torch.from_numpy(np.empty(0, dtype=np.complex64)),
    ),
    "special into numpy": Case(lambda out: torch.special.erf(MATRIX, out=out), locked_empty),
    "inv into numpy": Case(lambda out: torch.linalg.inv(MATRIX, out=out), locked_empty),
    "max, two outputs": Case(
        lambda values, indices: torch.max(MATRIX, 1, out=(values, indices)),
        locked_empty,
        locked_long,
    ),
    "sort, the second fails": Case(
        lambda values, indices: torch.sort(MATRIX, out=(values, indices)), growable, locked_long
    ),
    "sort, a list of outputs": Case(
        lambda values, indices: torch.sort(MATRIX, out=[values, indices]),
        locked_empty,
        locked_long,
    ),
    "qr, the second fails": Case(
        lambda q, r: torch.linalg.qr(MATRIX, out=(q, r)), growable, locked_empty
    ),
    "tensordot by place": Case(lambda out: torch.tensordot(MATRIX, MATRIX, 1, out), locked_empty),
    "tensordot by name": Case(
        lambda out: torch.tensordot(MATRIX, MATRIX, 1, out=out), locked_empty
    ),
    "norm by place": Case(lambda out: torch.norm(MATRIX, "fro", 1, False, out), locked_empty),
    "norm by name": Case(lambda out: torch.norm(MATRIX, dim=1, out=out), locked_empty),
    "index_select with a bad index": Case(
        lambda out: torch.index_select(MATRIX, 0, FAR, out=out), growable
    ),
    "gather with a bad index": Case(
        lambda out: torch.gather(MATRIX, 0, FAR.view(1, 2), out=out), growable
    ),
    "take with a bad index": Case(lambda out: torch.take(MATRIX, FAR, out=out), growable),
    "scatter with a bad index": Case(
        lambda out: torch.scatter(MATRIX, 0, FAR.view(1, 2), MATRIX[:1, :2], out=out), growable
    ),
    "inv of a singular matrix": Case(
        lambda out: torch.linalg.inv(torch.zeros(4, 4), out=out), growable
    ),
    "cholesky of a negative matrix": Case(
        lambda out: torch.linalg.cholesky(-MATRIX[:2, :2], out=out), growable
    ),
    "sort with a wrong index dtype": Case(
        lambda values, indices: torch.sort(MATRIX, out=(values, indices)), growable, growable
    ),
    "floor_divide by zero": Case(
        lambda out: torch.floor_divide(torch.ones(8, dtype=torch.long), 0, out=out),
        lambda: torch.zeros(2, dtype=torch.long),
    ),
}
# Nothing is resized in this one before it fails, on some releases.
MAY_BE_RIGHT = {"floor_divide by zero", "cholesky of a negative matrix"}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", FAILING)
def test_a_failing_out_leaves_the_output_as_it_was(name: str) -> None:
    bare = [_state(out) == before for out, before in FAILING[name]()]
    if name not in MAY_BE_RIGHT:
        assert not all(bare), "plain torch got it right: this proves nothing"
    with install("out"):
        for out, before in FAILING[name]():
            assert _state(out) == before


def test_the_exception_is_torchs_own_and_the_traceback_gains_one_line() -> None:
    def depth(error: BaseException) -> int:
        frame, count = error.__traceback__, 0
        while frame is not None:
            frame, count = frame.tb_next, count + 1
        return count

    errors = []
    for names in ((), ("resize", "out")):
        installation = install(*names) if names else None
        for call in (
            lambda: torch.index_select(MATRIX, 0, FAR, out=torch.empty(0)),
            lambda: torch.add(MATRIX, 1, out=locked_empty()),
            lambda: torch.add(MATRIX, 1, out=3),  # type: ignore[call-overload]
            lambda: torch.add(MATRIX, 1, out=locked_empty().numpy()),  # type: ignore[call-overload]
            lambda: locked(1).resize_(9),
            lambda: locked(1).resize_("a"),  # type: ignore[arg-type]
            lambda: locked(1).resize_as_(3),  # type: ignore[arg-type]
            lambda: locked(1).set_(3, 4, 5, 6, 7),  # type: ignore[call-overload]
        ):
            with pytest.raises((RuntimeError, IndexError, TypeError)) as failure:
                call()
            errors.append(failure.value)
        if installation is not None:
            installation.uninstall()
    half = len(errors) // 2
    for bare, guarded in zip(errors[:half], errors[half:], strict=True):
        assert type(bare) is type(guarded)
        assert str(bare) == str(guarded)
        assert guarded.__cause__ is None
        assert guarded.__context__ is None
        assert depth(guarded) <= depth(bare) + 1


def test_a_failed_out_that_may_be_half_written_makes_backward_refuse() -> None:
    def spoil(out: torch.Tensor) -> None:
        with pytest.raises((RuntimeError, IndexError)):
            torch.index_select(torch.full((9,), 7.0), 0, torch.tensor([1, 2, 99]), out=out)

    def wrong_gradient() -> None:
        weight = torch.ones(3, requires_grad=True)
        saved = torch.tensor([1.0, 2, 3])
        product = (weight * saved).sum()
        spoil(saved)
        product.backward()

    wrong_gradient()  # plain torch says nothing
    with install("out"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong_gradient()


# --- the guard `out`: success


def test_out_none_passes_by_name_and_by_place() -> None:
    with install("out"):
        assert torch.add(torch.ones(2), 1, out=None).tolist() == [2, 2]
        assert torch.tensordot(MATRIX, MATRIX, 1, None).shape == (3, 3)
        assert torch.norm(torch.ones(4), "fro", 0, False, None).item() == 2
        assert torch.arange(3, out=None).tolist() == [0, 1, 2]
        assert torch.zeros(2, 2, out=None).shape == (2, 2)


def test_the_result_is_the_output_that_was_given() -> None:
    with install("out"):
        out = torch.empty(3, 3)
        assert torch.add(MATRIX, 1, out=out) is out
        assert torch.tensordot(MATRIX, MATRIX, 1, out) is out
        assert torch.norm(MATRIX, "fro", 1, False, out[0]).shape == (3,)
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        result = torch.max(MATRIX, 1, out=(values, indices))
        assert result.values is values
        assert result.indices is indices
        q, r = torch.empty(3, 3), torch.empty(3, 3)
        assert torch.linalg.qr(MATRIX, out=(q, r)).R is r


class Recording(torch.Tensor):
    """A subclass that notes what it is called with."""

    calls: list[tuple[str, bool]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        cls.calls.append((getattr(func, "__name__", ""), isinstance(out, cls)))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def shared(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype).share_memory_()  # type: ignore[no-any-return]


def add_into_shared() -> Any:
    out = shared(3)
    result = torch.add(torch.arange(3.0), 1, out=out)
    return result is out, out, out.is_shared(), out._version


def shrink_shared() -> Any:
    out = shared(50)
    result = torch.add(torch.arange(3.0), 1, out=out)
    return result is out, out, out.stride(), out.untyped_storage().nbytes(), out._version


def view_of_shared() -> Any:
    base = shared(4, 4)
    result = torch.mul(torch.ones(2, 2), 3, out=base[1:3, 1:3])
    return result, base


def conjugated_shared() -> Any:
    base = shared(3, dtype=torch.complex64)
    torch.add(torch.tensor([1 + 2j, 3 - 1j, 2j]), 1j, out=base.conj())
    return base


def negated_shared() -> Any:
    base = shared(3, dtype=torch.complex64)
    torch.add(torch.ones(3), 1, out=base.conj().imag)
    return base


def max_into_shared() -> Any:
    out = (shared(3), shared(3, dtype=torch.long))
    result = torch.max(MATRIX, 1, out=out)
    return type(result).__name__, result[0] is out[0], result[1] is out[1], out


def named_tuple_of_shared() -> Any:
    pair = namedtuple("pair", "values indices")  # noqa: PYI024
    out = pair(shared(3), shared(3, dtype=torch.long))
    result = torch.max(MATRIX, 1, out=out)
    return type(result).__name__, result[0] is out[0], out[1]


def input_is_output() -> Any:
    out = shared(3, 3).add_(MATRIX)
    torch.mm(out, out, out=out)
    return out


def grows_within_shared_storage() -> Any:
    base = shared(100)
    out = base[:0]
    result = torch.add(torch.ones(5), 1, out=out)
    return result is out, out, base


def parameter_in_shared_memory() -> Any:
    out = shared(2).requires_grad_()
    return torch.add(torch.ones(2), 1, out=out)


def inference_tensor_in_shared_memory() -> Any:
    with torch.inference_mode():
        out = shared(2)
    return torch.add(torch.ones(2), 1, out=out)


def inside_inference_mode() -> Any:
    with torch.inference_mode():
        out = shared(2)
        return torch.add(torch.ones(2), 1, out=out) is out, out


def bad_index_with_room() -> Any:
    return torch.index_select(torch.ones(10), 0, FAR, out=shared(100)[:0])


def wrong_dtype_in_shared_memory() -> Any:
    return torch.add(torch.ones(2), 1.5, out=shared(2, dtype=torch.long))


def subclass_in_shared_memory() -> Any:
    out = shared(2).as_subclass(Recording)
    Recording.calls = []
    result = torch.add(torch.ones(2), 1, out=out)
    calls = list(Recording.calls)
    return calls, type(result).__name__, result is out


def overlapping_in_shared_memory() -> Any:
    return torch.add(torch.ones(3, 3), 1, out=shared(3).expand(3, 3))


SHARED = (
    add_into_shared,
    shrink_shared,
    view_of_shared,
    conjugated_shared,
    negated_shared,
    max_into_shared,
    named_tuple_of_shared,
    input_is_output,
    grows_within_shared_storage,
    parameter_in_shared_memory,
    inference_tensor_in_shared_memory,
    inside_inference_mode,
    bad_index_with_room,
    wrong_dtype_in_shared_memory,
    subclass_in_shared_memory,
    overlapping_in_shared_memory,
)


def _what_happens(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001  whatever torch raises has to stay the same
        return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("call", SHARED, ids=lambda call: call.__name__)
def test_an_output_in_shared_memory_behaves_as_without_the_guard(call: Callable[[], Any]) -> None:
    bare = _what_happens(call)
    with install("out"):
        assert _what_happens(call) == bare


GROWING_SHARED = {
    "add": "torch.add(torch.ones(5000), 1, out=torch.zeros(4).share_memory_())",
    "max": "torch.max(torch.ones(5000, 2), 1, out=(torch.zeros(4).share_memory_(), "
    "torch.zeros(4, dtype=torch.long).share_memory_()))",
    "tensordot": "torch.tensordot(torch.ones(90, 2), torch.ones(2, 90), 1, "
    "torch.zeros(4).share_memory_())",
    "the input": "(lambda t: torch.mm(t, torch.ones(2, 5000), out=t))"
    "(torch.zeros(2, 2).share_memory_())",
    "a view of the input": "(lambda t: torch.mm(t.view(1, 4), torch.ones(4, 5000), out=t))"
    "(torch.zeros(4).share_memory_())",
}


@pytest.mark.parametrize("name", GROWING_SHARED)
def test_an_output_in_shared_memory_that_would_have_to_grow_does_not_kill_the_process(
    name: str,
) -> None:
    program = f"""
        import sys, torch, torchguard
        if sys.argv[1:]:
            torchguard.install("out")
        try:
            {GROWING_SHARED[name]}
        except torchguard.NonResizableStorageError as error:
            print(error)
    """
    assert run_python(program).returncode < 0, "plain torch survived: this proves nothing"
    printed = output_of(program, "guarded")
    assert "in shared memory" in printed
    assert "share_memory_()" in printed


# --- the same with and without the guard, over torch's own database of operators


def _patched_out_functions() -> dict[str, Any]:
    return {path: torch_has(path) for path in GUARDS["out"].replacements()}


def _live(path: str) -> Any:
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def _op_samples() -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the function and one sample of each operator that takes ``out=``."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    by_function = {id(function): path for path, function in _patched_out_functions().items()}
    for operator in op_db:
        path = by_function.get(id(operator.op))
        if path is None or not operator.supports_out:
            continue
        dtypes = operator.dtypes
        dtype = next(
            (each for each in (torch.float32, torch.int64, torch.complex64) if each in dtypes),
            None,
        )
        if dtype is None:
            continue
        torch.manual_seed(0)
        try:
            samples = operator.sample_inputs("cpu", dtype, requires_grad=False)
            chosen = [sample for _, sample in zip(range(1), samples, strict=False)]
        except Exception:  # noqa: BLE001, S112  a generator that needs what is not built in here
            continue
        for sample in chosen:
            yield path, operator.op, sample


def _outputs(result: Any, size: Callable[[torch.Tensor], tuple[int, ...]]) -> Any:
    """Make an ``out=`` for what a call returned, or None if it returns something else."""
    if isinstance(result, torch.Tensor):
        return torch.full(size(result), 1, dtype=result.dtype)
    if isinstance(result, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in result):
        return tuple(torch.full(size(t), 1, dtype=t.dtype) for t in result)
    return None


def _record(call: Callable[..., Any], sample: Any, out: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call(sample.input, *sample.args, out=out, **sample.kwargs)
        except Exception as error:  # noqa: BLE001
            return {"error": f"{type(error).__name__}: {error}"}
    results = result if isinstance(result, (tuple, list)) else (result,)
    outs = out if isinstance(out, tuple) else (out,)
    return {
        "type": type(result),
        "is out": [one is other for one, other in zip(results, outs, strict=False)],
        "shapes": [(each.shape, each.stride(), each._version) for each in outs],
        "values": list(outs),
        # Deprecations are told once in a process, so they can't be compared.
        "warnings": [
            (each.category, str(each.message)) for each in warned if "resized" in str(each.message)
        ],
    }


SIZES: dict[str, Callable[[torch.Tensor], tuple[int, ...]]] = {
    "right": lambda tensor: tuple(tensor.shape),
    "wrong": lambda tensor: (*tensor.shape, 2),
    "empty": lambda _: (0,),
}


def _record_all(
    samples: list[tuple[str, Any, Any]], expected: list[Any]
) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Call each operator as the program sees it, patched or not, with outputs of three sizes."""
    return {
        (number, path, size): _record(_live(path), sample, out)
        for number, ((path, _, sample), result) in enumerate(zip(samples, expected, strict=True))
        for size, make in SIZES.items()
        if (out := _outputs(result, make)) is not None
    }


def _result(function: Callable[..., Any], sample: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001  not every sample runs everywhere
            return None


@pytest.mark.slow
def test_operators_with_out_give_the_same_with_and_without_the_guard() -> None:
    samples = list(_op_samples())
    expected = [_result(function, sample) for _, function, sample in samples]
    bare = _record_all(samples, expected)
    with install("out"):
        guarded = _record_all(samples, expected)
    differing = []
    for key, before in bare.items():
        after = guarded[key]
        values, others = before.pop("values", []), after.pop("values", [])
        if before != after:
            differing.append((key[1:], before, after))
        if "empty" in key[1]:
            continue  # whatever was in memory
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True, msg=key[1])
    assert differing == []
    assert len({path for _, path, _ in bare}) > 200
    assert (
        sum(
            any("resized" in text for _, text in each.get("warnings", ())) for each in bare.values()
        )
        > 100
    )
    assert sum("error" in each for each in bare.values()) < len(bare) / 5


def test_what_the_guard_patches_takes_out() -> None:
    functions = _patched_out_functions()
    assert len(functions) > 300
    takers = 0
    for path, function in functions.items():
        if inspect.isfunction(function):
            assert "out" in inspect.signature(function).parameters, path
            continue
        with pytest.raises((TypeError, RuntimeError, ValueError)) as refusal:
            function(out=object())
        # torch names an unknown keyword; a builtin that takes it names something else.
        assert "unexpected keyword argument 'out'" not in str(refusal.value), path
        takers += 1
    assert takers > 300


# --- torch's own tables of functions

QUANTIZES = """
    import torch
    from torchguard import install, uninstall
    if {early}:
        import torch.ao.quantization.quantize_fx
    if {guarded}:
        install("out", "resize", only_if_needed=False)
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = torch.mul(torch.add(self.linear(x), x), x)
            return torch.matmul(torch.cat([y, y]), x.t())

    x = torch.randn(2, 4)
    prepared = prepare_fx(Model().eval(), get_default_qconfig_mapping(), (x,))
    prepared(x)
    for node in convert_fx(prepared).graph.nodes:
        print(node.name)
    uninstall()
    assert "torchguard" not in torch.ao.quantization.quantize_fx._prepare_fx.__code__.co_filename
"""


@pytest.mark.parametrize("early", [True, False])
def test_quantization_replaces_what_it_replaces_without_the_guard(early: bool) -> None:
    bare = output_of(QUANTIZES.format(early=early, guarded=False))
    assert "add" in bare
    assert "dequantize" in bare
    assert output_of(QUANTIZES.format(early=early, guarded=True)) == bare


TABLES = """
    import importlib, sys, types
    import torch
    from torchguard import install
    from torchguard._torch import patch
    install("out", "resize", only_if_needed=False)
    names = sys.argv[1:]
    ours = {id(patch.replacement): path for path, patch in patch._table.items()}

    def found(value, depth=4):
        if id(value) in ours:
            yield ours[id(value)]
        elif depth and isinstance(value, dict):
            for pair in list(value.items()):
                yield from found(pair, depth - 1)
        elif depth and isinstance(value, (list, tuple, set, frozenset)):
            for each in list(value):
                yield from found(each, depth - 1)

    for name in names:
        module = importlib.import_module(name)
        for key, value in list(vars(module).items()):
            if not isinstance(value, types.ModuleType):
                for path in found(value):
                    print(name, key, path)
"""


def test_tables_of_modules_imported_later_hold_torchs_own_functions() -> None:
    names = (
        "torch._dynamo.variables.torch",
        "torch._inductor.lowering",
        "torch._inductor.fx_passes.split_cat",
        "torch._numpy._ufuncs",
        "torch._lazy.tensor_factory_functions",
        "torch.ao.quantization.fx._lower_to_native_backend",
    )
    assert output_of(TABLES, *names) == ""


def test_a_module_of_torch_that_is_imported_late_runs_the_hooks_of_others() -> None:
    program = """
        import wrapt
        import torch
        from torchguard import install, installed
        name = "torch._lazy.tensor_factory_functions"
        wrapt.register_post_import_hook(lambda module: print("hook", module.__name__), name)
        with install("out", only_if_needed=False):
            import torch._lazy.tensor_factory_functions as late
            assert "out" in installed()
            assert torch.add.__module__ == "torch"
            print(late.__spec__.name, late.__file__ is not None)
    """
    name = "torch._lazy.tensor_factory_functions"
    assert output_of(program) == f"hook {name}\n{name} True\n"


LATER = """
import pathlib, sys, torch, torchguard
from torch._dynamo.testing import CompileCounter

path = pathlib.Path(sys.argv[1], "y.pt")

def frames():
    def function(x):
        y = x + 1
        torch.save(y, path)  # a graph break
        return y * 2

    counter = CompileCounter()
    torch.compile(function, backend=counter)(torch.ones(3))
    return counter.frame_count

bare = frames()
with torchguard.guarded():
    assert "torchguard.checkpoint.saving" not in sys.modules
with torchguard.install("save", only_if_needed=False):
    print(bare, frames())
"""


def test_rooms_imported_after_the_first_patch_are_no_frames_of_dynamos(tmp_path: Path) -> None:
    assert output_of(LATER, str(tmp_path)).split() == ["2", "2"]
