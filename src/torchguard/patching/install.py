"""install(): switch the guards on for code that knows nothing of them, and off again."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, TracebackType
from typing import Any

import numpy as np
import torch
import wrapt
from typing_extensions import Self

from torchguard._torch import (
    dynamo_is_imported,
    fill_tables,
    has_python_out,
    is_builtin_somebody_wrapped,
    patch,
    paths_behind_python,
    rebuild_dynamo_tables,
)
from torchguard.assignment import dynamo_scatter, dynamo_setitem
from torchguard.checkpoint import guards as checkpoint
from torchguard.interop import numpy_memory
from torchguard.rollback.operation import guard_out
from torchguard.rollback.resize import guard_resize_, guard_resize_as_, guard_set_
from torchguard.rollback.scope import forget
from torchguard.verification.decorator import guard_compile

__all__ = [
    "GUARDS",
    "Guard",
    "Installation",
    "install",
    "installed",
    "is_installed",
    "original",
    "uninstall",
]


@dataclass(frozen=True)
class Guard:
    """What ``install(name)`` does."""

    name: str
    replacements: Callable[[], Mapping[str, patch.Make | patch.Computed]]
    """Paths to patch, each with what makes the replacement from the original."""

    not_needed: Callable[[], str | None]
    """Tries the defect on this torch: why the guard is not needed, or None if it is."""

    patches_dynamo: bool = False
    """Whether it has to wait until something imports Dynamo; it is tried again then."""

    in_packages: Mapping[str, Mapping[str, patch.Make]] = field(default_factory=dict)
    """By module of another package, paths to patch as soon as that module is imported."""

    changed: Callable[[], None] = lambda: None
    """Called after the guard's paths were patched or put back."""

    def paths(self) -> Mapping[str, patch.Make | patch.Computed]:
        """Return what to patch now: in torch, and in what is imported of other packages."""
        found = dict(self.replacements())
        for module, replacements in self.in_packages.items():
            found.update(replacements if module in sys.modules else {})
        return found


def _resize_replacements() -> Mapping[str, patch.Make]:
    return {
        "torch.Tensor.resize_": guard_resize_,
        "torch.Tensor.resize_as_": guard_resize_as_,
        "torch.Tensor.set_": guard_set_,
        "torch.resize_as_": guard_resize_as_,
    }


def _resize_not_needed() -> str | None:
    tensor = torch.from_numpy(np.zeros(1))  # on the CPU, whatever the default device is
    resize_ = patch.original("torch.Tensor.resize_")
    for size in ((5,), (-1,)):
        try:
            resize_(tensor, size)
        except RuntimeError:
            if tuple(tensor.shape) != (1,):
                return None
    if torch.zeros(1, device="cpu").share_memory_().untyped_storage().resizable():
        return None  # growing it would end the process, so it is not tried
    return "a resize_ that fails leaves the tensor as it was on this torch"


_OUT_NAMESPACES = (torch, torch.linalg, torch.special, torch.fft, torch.nn.functional)

# What torch.norm, torch.tensordot and torch.chain_matmul, written in Python, hand
# their out to. (torch.nn.functional.normalize hands it to torch.div.)
_OUT_BEHIND_PYTHON = ("norm", "frobenius_norm", "nuclear_norm", "tensordot", "chain_matmul")


def _out_replacements() -> Mapping[str, patch.Make]:
    paths = [
        f"{namespace.__name__}.{name}"
        for namespace in _OUT_NAMESPACES
        for name, function in sorted(vars(namespace).items())
        if not name.startswith("_")
        and (
            has_python_out(function)
            if isinstance(function, BuiltinFunctionType)
            else is_builtin_somebody_wrapped(namespace, name)
        )
    ]
    paths += paths_behind_python(*_OUT_BEHIND_PYTHON)
    return {**dict.fromkeys(paths, guard_out), **_quantization_replacements()}


_QUANTIZATION = "torch.ao.quantization.quantize_fx"


def _quantization_replacements() -> Mapping[str, patch.Make]:
    """Let FX quantization run with torch's own functions.

    It makes its tables of patterns when it is called, and compares them with a traced
    graph, which holds the originals. It calls no operator with an output.
    """
    module = sys.modules.get(_QUANTIZATION)
    names = ("_prepare_fx", "_convert_fx", "_fuse_fx")
    return {f"{_QUANTIZATION}.{name}": _with_originals for name in names if hasattr(module, name)}


def _with_originals(original: Callable[..., Any]) -> Callable[..., Any]:
    def with_originals(*args: Any, **kwargs: Any) -> Any:
        with patch.originals_in_place():
            return original(*args, **kwargs)

    return with_originals


def _out_not_needed() -> str | None:
    out = torch.from_numpy(np.empty(0))
    try:
        patch.original("torch.add")(torch.from_numpy(np.zeros(5)), 1, out=out)
    except RuntimeError:
        if tuple(out.shape) != (0,):
            return None
    return "an out= call that fails leaves its output as it was on this torch"


def _verified_not_needed() -> str | None:
    return None  # every torch so far compiles something wrong, and to compile takes seconds


GUARDS: dict[str, Guard] = {
    guard.name: guard
    for guard in (
        Guard("resize", _resize_replacements, _resize_not_needed),
        Guard("out", _out_replacements, _out_not_needed),
        Guard(
            "setitem", dynamo_setitem.replacements, dynamo_setitem.not_needed, patches_dynamo=True
        ),
        Guard(
            "slice_scatter",
            dynamo_scatter.replacements,
            dynamo_scatter.not_needed,
            patches_dynamo=True,
        ),
        Guard("verified", lambda: {"torch.compile": guard_compile}, _verified_not_needed),
        Guard(
            "save",
            checkpoint.save_replacements,
            checkpoint.save_not_needed,
            in_packages=checkpoint.SAVE_IN_PACKAGES,
        ),
        Guard("load", checkpoint.load_replacements, checkpoint.load_not_needed),
        Guard(
            "numpy",
            numpy_memory.replacements,
            numpy_memory.not_needed,
            changed=numpy_memory.changed,
        ),
    )
}
"""Every guard that ``install()`` knows, by name."""

_DEFAULT = ("resize",)

# Who holds each guard, and the paths each guard patched.
_holders: dict[str, set[Installation]] = {}
_paths: dict[str, list[str]] = {}
_waiting: list[str] = []  # guards of Dynamo that is not imported yet
_watching_dynamo = False
_watched: set[str] = set()  # modules of other packages


class Installation:
    """What :func:`install` did; call :meth:`uninstall`, or use it in a ``with`` statement."""

    def __init__(
        self, names: tuple[str, ...], skipped: dict[str, str], *, only_if_needed: bool = True
    ) -> None:
        self.names = names
        """The guards this installation holds."""

        self.skipped = skipped
        """Guards this torch does not need, each with the reason.

        A guard of Dynamo can move here from ``names`` when Dynamo is imported.
        """

        self._only_if_needed = only_if_needed

    def uninstall(self) -> None:
        """Let go of this installation's guards; those nobody else holds are undone.

        Calling it again does nothing.

        Raises:
            PatchConflictError: somebody has patched on top; nothing is undone then.
        """
        with patch.lock:
            _undo([name for name in self.names if _holders.get(name) == {self}])
            for name in self.names:
                _holders.get(name, set()).discard(self)

    def _skip(self, name: str, reason: str) -> None:
        self.names = tuple(each for each in self.names if each != name)
        self.skipped[name] = reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"Installation(names={self.names!r}, skipped={self.skipped!r})"


def install(*names: str, only_if_needed: bool = True) -> Installation:
    """Switch guards on for the whole process: for applications, not for libraries.

    Equals plain torch wherever nothing fails: same results, same tensors, same
    graphs. All or nothing: if one guard can't be installed, none is. Installing
    a guard that is installed already adds no second layer, and it stays until
    everybody who installed it has let go of it.

    Guards:
        ``"resize"`` (the default): ``Tensor.resize_``, ``Tensor.resize_as_``,
        ``Tensor.set_`` and ``torch.resize_as_`` leave the tensor as it was when
        they fail, as ``safe_resize_`` does.
        ``"out"``: so do the operators with ``out=`` of ``torch``, ``torch.linalg``,
        ``torch.special``, ``torch.fft`` and ``torch.nn.functional`` with their output.
        ``"setitem"``: in code compiled from then on, ``requires_grad`` is right after
        ``x[i] = v`` (and any other write in place), for ``x`` and whatever shares
        its memory, and a custom autograd function that reads it has its backward.
        ``"slice_scatter"``: in code compiled from then on, ``torch.slice_scatter``,
        ``select_scatter`` and ``diagonal_scatter`` have the gradient they have in eager.
        ``"verified"``: ``torch.compile`` checks every graph that inductor compiles against
        eager before it is trusted, as ``verified()`` does.
        ``"save"``: ``torch.save``, safetensors' ``save_file`` and ``save_model``, and what writes
        through fsspec, as Lightning does, replace a file whole or not at all, as ``save()`` does.
        ``"load"``: ``torch.load`` says what is wrong with a file, as ``load()`` does, and
        ``load_state_dict`` of modules and optimizers loads whole or not at all.
        ``"numpy"``: a tensor never writes to a read-only array or buffer, ``frombuffer`` keeps
        its buffer open, and memory that ``t.numpy()`` looks at is not moved away under it.

    ``"setitem"`` and ``"slice_scatter"`` patch Dynamo. While nothing has imported
    that, they wait for it, and count as installed; they are tried then, and may move
    to ``.skipped``. What was compiled before stays as it is: install first, or call
    ``torch.compiler.reset()``.

    Args:
        *names: which guards; none for the default set.
        only_if_needed: try each defect first, and skip a guard whose defect this
            torch does not have (``.skipped`` says why).

    Returns:
        An :class:`Installation`, which can be used in a ``with`` statement.

    Raises:
        ValueError: there is no guard of that name.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/169179,
    https://github.com/pytorch/pytorch/issues/180164
    """
    wanted = _known(names, "install") or _DEFAULT
    dynamo = dynamo_is_imported()
    with patch.lock:
        skipped = {
            name: reason
            for name in wanted
            if only_if_needed and name not in _holders
            if (reason := GUARDS[name].not_needed()) is not None
        }
        chosen = tuple(name for name in wanted if name not in skipped)
        now = [
            name
            for name in chosen
            if name not in _holders and (dynamo or not GUARDS[name].patches_dynamo)
        ]
        new = {name: GUARDS[name].paths() for name in now}
        _prepare_dynamo()
        fill_tables()
        for name in chosen:
            if _paths.get(name) and not is_installed(name):
                patch.renew(GUARDS[name].paths().items())
        patch.apply(pair for pairs in new.values() for pair in pairs.items())
        _paths.update({name: list(replacements) for name, replacements in new.items()})
        for name in now:
            GUARDS[name].changed()
        installation = Installation(chosen, skipped, only_if_needed=only_if_needed)
        for name in chosen:
            if name not in _holders and name not in now:
                _waiting.append(name)
            _holders.setdefault(name, set()).add(installation)
        _watch_packages(chosen)
    return installation


def uninstall(*names: str) -> None:
    """Undo guards, however often they were installed; without names all of them.

    Every attribute of torch is then the very object it was before, or absent
    if it was absent. Guards that are not installed are passed over. Without names, what
    :func:`guarded` keeps between its scopes goes too.

    Raises:
        ValueError: there is no guard of that name.
        PatchConflictError: somebody has patched on top; nothing is undone then.
    """
    with patch.lock:
        _undo(list(_known(names, "uninstall") or _holders))
        if not names:
            forget()


def is_installed(name: str | None = None) -> bool:
    """Whether a guard is in force, judged by what stands in torch now, not by a flag.

    A guard of Dynamo that waits until Dynamo is imported is. Without a name: whether any is.

    Raises:
        ValueError: there is no guard of that name.
    """
    if name is None:
        return any(is_installed(each) for each in list(_holders))
    if name not in _paths:
        _known((name,), "is_installed")
    if name in _waiting:
        return True
    paths = _paths.get(name, [])
    return bool(paths) and all(patch.patched(path) for path in paths)


def installed() -> tuple[str, ...]:
    """Return the names of the guards in force, in the order they were installed."""
    return tuple(name for name in list(_holders) if is_installed(name))


def original(path: str) -> Any:
    """Return what torch itself has at a path such as ``"torch.Tensor.resize_"``, patched or not.

    Raises:
        AttributeError: torch has nothing there.
        ValueError: the path does not begin with ``torch.``.
    """
    if not path.startswith("torch."):
        raise ValueError(f"original: path is {path!r}, expected one like 'torch.Tensor.resize_'")
    return patch.original(path)


def _undo(names: list[str]) -> None:
    patch.undo([path for name in names for path in _paths.get(name, ())])
    for name in names:
        _holders.pop(name, None)
        _paths.pop(name, None)
        if name in _waiting:
            _waiting.remove(name)
        GUARDS[name].changed()


def _watch_packages(names: Iterable[str]) -> None:
    """Patch modules of other packages when they are imported later."""
    for module in {module for name in names for module in GUARDS[name].in_packages}:
        if module not in _watched:
            _watched.add(module)
            wrapt.register_post_import_hook(_package_was_imported, module)


def _package_was_imported(module: Any) -> None:
    with patch.lock:
        for name in _holders:
            replacements = GUARDS[name].in_packages.get(module.__name__, {})
            new = {path: make for path, make in replacements.items() if path not in _paths[name]}
            try:
                patch.apply(new.items())
            except AttributeError:  # built differently: importing it must not fail for that
                continue
            _paths[name] += new


def _prepare_dynamo() -> None:
    """Let Dynamo's tables know torch's own functions, whenever Dynamo is imported."""
    global _watching_dynamo
    if not _watching_dynamo:
        _watching_dynamo = True
        wrapt.register_post_import_hook(_dynamo_was_imported, "torch._dynamo")
        wrapt.register_post_import_hook(_quantization_was_imported, _QUANTIZATION)


def _quantization_was_imported(_: Any) -> None:
    with patch.lock:
        if "out" in _paths:
            new = {
                path: make
                for path, make in _quantization_replacements().items()
                if path not in _paths["out"]
            }
            patch.apply(new.items())
            _paths["out"] += new


def _dynamo_was_imported(_: Any) -> None:
    with patch.lock:
        with patch.originals_in_place():
            rebuild_dynamo_tables()
        while _waiting:
            _apply_late(_waiting.pop(0))


def _apply_late(name: str) -> None:
    """Patch Dynamo for a guard that has waited for it, or let all its holders know why not."""
    guard, holders = GUARDS[name], _holders[name]
    anyway = any(not holder._only_if_needed for holder in holders)
    reason = None if anyway else guard.not_needed()
    if reason is None:
        try:
            replacements = guard.replacements()
            patch.apply(replacements.items())
        except AttributeError as error:  # importing Dynamo must not fail for it
            reason = f"this torch's Dynamo is built differently: {error}"
        else:
            _paths[name] = list(replacements)
            return
    for holder in holders:
        holder._skip(name, reason)
    del _holders[name]


def _known(names: Iterable[str], operation: str) -> tuple[str, ...]:
    """Return the names once each, or raise with the list of guards."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{operation}: got {name!r}, expected names of guards as separate arguments: "
                f"{operation}('resize', 'out')"
            )
        if name not in GUARDS:
            close = difflib.get_close_matches(name, GUARDS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"{operation}: there is no guard named {name!r}; {hint}guards are: "
                f"{', '.join(sorted(GUARDS))}"
            )
    return tuple(dict.fromkeys(names))
