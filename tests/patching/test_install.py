"""install() and uninstall(): what they do and undo, all or nothing, guards not needed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support.install import locked, resize_is_safe, same, snapshot
from torchguard import get_original as torch_has
from torchguard import install, installed, uninstall
from torchguard.patching.guards import GUARDS, Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


RESIZE = (
    "torch.Tensor.resize_",
    "torch.Tensor.resize_as_",
    "torch.Tensor.set_",
    "torch.resize_as_",
)


def out_is_safe() -> bool:
    out = locked()
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(5), 1, out=out)
    safe = tuple(out.shape) == (0,)
    torch.Tensor.set_(out, torch.empty(0))  # type: ignore[call-overload]
    return safe


# --- installing and undoing


def test_install_guards_resize_and_nothing_else_by_default() -> None:
    """Until the with statement ends, with an error too."""
    assert not resize_is_safe()
    with pytest.raises(ZeroDivisionError), install() as installation:
        assert installation.names == ("resize",)
        assert resize_is_safe()
        assert not out_is_safe()
        raise ZeroDivisionError
    assert not resize_is_safe()


def test_uninstall_restores_every_attribute_or_its_absence() -> None:
    before = snapshot()
    uninstall()  # nothing is installed: it does nothing
    uninstall("out")
    assert same(before, snapshot())
    install("resize", "out")
    assert "resize_" in vars(torch.Tensor)
    uninstall()
    assert same(before, snapshot())
    assert "resize_" not in vars(torch.Tensor)


def test_installations_count_and_may_end_in_any_order() -> None:
    """There is one layer, which stays until the last of them is undone."""
    first = install("resize")
    layer = torch.Tensor.resize_
    second = install("resize", "out", "resize")
    assert repr(second) == "Installation(names=('resize', 'out'), skipped={})"
    assert torchguard.installed() == ("resize", "out")
    assert torch.Tensor.resize_ is layer
    with install("out", "resize") as third:
        assert third.names == ("out", "resize")
        first.uninstall()
        first.uninstall()  # again: it does nothing
        assert torch.Tensor.resize_ is layer
        assert resize_is_safe()
        assert out_is_safe()
    fourth = install("out")
    second.uninstall()
    assert torchguard.installed() == ("out",)
    assert not resize_is_safe()
    fourth.uninstall()
    assert torchguard.installed() == ()


def test_uninstall_by_name_undoes_every_layer_of_that_guard_only() -> None:
    mine = install("resize")
    install("resize", "out")
    uninstall("resize")
    assert torchguard.installed() == ("out",)
    another = install("resize")
    mine.uninstall()  # it was undone by name, and does not undo a later one
    assert "resize" in installed()
    another.uninstall()
    uninstall("out", "resize")
    assert torchguard.installed() == ()


def test_installed_looks_at_the_live_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    with install("resize"):
        assert torchguard.installed() == ("resize",)
        monkeypatch.setattr(torch.Tensor, "set_", torch_has("torch.Tensor.set_"))
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


def test_original_of_what_does_not_exist_or_is_not_torchs_raises() -> None:
    for path in ("torch.Tensor.no_such_method", "torch.no_such_module.add"):
        with pytest.raises(AttributeError):
            torch_has(path)
    for path in ("Tensor.resize_", "numpy.add", "torch", ""):
        with pytest.raises(
            ValueError, match=r"path is .*expected one like 'torch\.Tensor\.resize_'"
        ):
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


def test_one_unknown_name_among_good_ones_or_a_list_of_names_installs_nothing() -> None:
    with pytest.raises(ValueError, match="named 'resise'"):
        install("resize", "resise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"separate arguments: install\('resize', 'out'\)"):
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


@pytest.mark.parametrize("held", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("how", BROKEN)
def test_a_guard_that_fails_midway_undoes_everything_and_leaves_what_was_there_before(
    how: str, monkeypatch: pytest.MonkeyPatch, *, held: bool
) -> None:
    monkeypatch.setitem(GUARDS, "broken", Guard("broken", BROKEN[how], lambda: None))
    with install("resize") if held else contextlib.nullcontext():
        before, names = snapshot(), torchguard.installed()
        scripted = dict(torch.jit._builtins._get_builtin_table())
        with pytest.raises((ZeroDivisionError, AttributeError, TypeError)):
            install("resize", "out", "broken")  # type: ignore[arg-type]
        assert same(before, snapshot())
        assert torchguard.installed() == names == (("resize",) if held else ())
        now = torch.jit._builtins._get_builtin_table()
        assert [name for key, name in now.items() if key not in scripted] == []


def test_two_guards_on_one_path_leave_one_layer_and_the_last_takes_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("second", "third"):
        guard = Guard(name, lambda: {"torch.relu": _passing_on}, lambda: None)
        monkeypatch.setitem(GUARDS, name, guard)
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


def test_a_guard_that_this_torch_does_not_need_is_skipped_with_the_reason_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "resize_", fixed_resize)
    with install("resize") as installation:
        assert installation.skipped == {}  # shared memory is not fixed
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: False)
    installation = install("resize")
    assert installation.names == ()
    assert list(installation.skipped) == ["resize"]
    assert "leaves the tensor as it was on this torch" in installation.skipped["resize"]
    assert not installed()
    assert torch.Tensor.resize_ is fixed_resize
    installation.uninstall()
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


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set what a guard might be tried under, all at once."""
    with torch.device("meta"), torch.inference_mode():
        torch.set_default_dtype(torch.float16)
        torch.use_deterministic_algorithms(mode=True)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("setting", [_settings, torch.no_grad])
def test_no_setting_of_torch_makes_a_needed_guard_look_unneeded(setting: Any) -> None:
    with setting(), install("resize", "out") as installation:
        assert installation.skipped == {}
