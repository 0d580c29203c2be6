"""install(): switch guards on for the whole process, and off again."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from typing_extensions import Self

from torchguard._environment import CHOICE, SWITCH, chosen, is_off
from torchguard._events import record, warn_user
from torchguard._public import called, public
from torchguard._torch import (
    DYNAMO,
    follow_in_dynamo,
    on_import,
    patch,
)
from torchguard.errors import TorchGuardError
from torchguard.patching.guards import GUARDS, NEWEST_TESTED_TORCH, GuardName
from torchguard.patching.selftests import SELF_TESTS, SelfTest

_DEFAULT = ("resize",)

# All of it is read and changed under patch.lock.
_installed: dict[str, set[Installation]] = {}
_scopes: Counter[str] = Counter()
_in_place: set[str] = set()
"""Guards whose replacements stand in torch, on or off."""

_left_out: dict[str, str] = {}
"""Guards that scopes go without on this torch, each with the reason."""


@public
@dataclass(eq=False)
class Installation:
    """What :func:`install` did; call :meth:`uninstall`, or use it in a ``with`` statement.

    Example:
        >>> import torchguard
        >>> installation = torchguard.install("resize")
        >>> installation.names, installation.skipped
        (('resize',), {})
        >>> installation.uninstall()
    """

    names: tuple[str, ...]
    """The guards this installation holds."""

    skipped: dict[str, str]
    """Guards that are not on, each with the reason: PyTorch does not need it, or it does not
    protect.

    A guard can move here from ``names`` at the first ``torch.compile``, when it is tried there.
    """

    def uninstall(self) -> None:
        """End this installation; guards that nothing else needs are removed.

        Calling it again does nothing.

        Raises:
            PatchConflictError: other code has patched on top; nothing is changed then.
        """
        with patch.lock:
            last = [
                name for name in self.names if _installed.get(name) == {self} and not _scopes[name]
            ]
            _remove(last, self._let_go)

    def _let_go(self) -> None:
        for name, holders in list(_installed.items()):
            if self in holders:
                holders.discard(self)
                GUARDS[name].on.on -= 1
                if not holders:
                    del _installed[name]

    def _skip(self, name: str, reason: str) -> None:
        self.names = tuple(each for each in self.names if each != name)
        self.skipped[name] = reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.uninstall()


@called("'resize'")
@public
def install(*names: GuardName, only_if_needed: bool = True, strict: bool = False) -> Installation:
    """Switch guards on for the whole process: for applications, not for libraries.

    Equals PyTorch without torchguard if nothing fails: same results, same tensors, same graphs.
    Installing a guard that is installed already adds nothing, and it stays until every
    installation of it has ended. For a block of code see :func:`guarded`.

    Guards:
        ``"resize"``: ``resize_``, ``set_`` and the other functions that change a shape leave the
        tensor unchanged if they fail, as ``safe_resize_`` does. This is the default.
        ``"out"``: a call with ``out=`` that fails leaves its output unchanged.
        ``"overlap"``: an operation that reads memory it writes (``x -= x[:, :1]``) computes as if
        its operands were copied first, and warns once per line (``OverlapWarning``).
        ``"checks"``: an index, a label, a divisor or a probability that is out of range raises, in
        eager and in compiled code.
        ``"recompute"``: a block under ``torch.utils.checkpoint`` runs in backward as it ran the
        first time, as ``safe_checkpoint`` does.
        ``"numpy"``: a tensor never writes to a read-only array, and memory that is shared with
        ``t.numpy()`` or ``frombuffer`` is not freed while it is in use.
        ``"save"``: ``torch.save``, safetensors, Lightning and ``dcp.save`` replace a file
        atomically, as ``save`` does.
        ``"load"``: ``load_state_dict`` and ``dcp.load`` load everything or nothing, ``torch.load``
        says what is wrong with a file, and tied parameters stay tied.
        ``"verified"``: ``torch.compile`` checks each graph that inductor compiles against eager, as
        ``verified`` does.
        ``"setitem"``: in code compiled from then on, a tensor that is written in place
        (``x[i] = v``) has the right ``requires_grad``, and so have its views.
        ``"all"``: each of these.

    ``"setitem"`` replaces functions of Dynamo when the program imports it, and counts as installed
    until then. Code that is compiled already does not change: install first, or call
    ``torch.compiler.reset()``.

    Each guard is tried after it was installed, and in compiled code at the first ``torch.compile``.
    A guard that does not protect is removed with a warning, ``.skipped`` says why, and the others
    stay. If PyTorch is newer than the tested versions, a warning says so once.

    Args:
        *names: which guards; none for ``"resize"``.
        only_if_needed: skip ``"out"``, ``"overlap"``, ``"save"``, ``"load"`` or ``"recompute"`` if
            this PyTorch does not have the defect (``.skipped`` says why); the others are always
            needed.
        strict: raise if a guard does not protect on this torch.

    Returns:
        An :class:`Installation`, which can be used in a ``with`` statement.

    Raises:
        ValueError: a guard's name is unknown.
        PatchConflictError: other code has patched on top of another guard; nothing is changed then.
        TorchGuardError: with ``strict``, a guard does not protect on this torch; none is installed.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/169179,
    https://github.com/pytorch/pytorch/issues/180164

    Cost:
        Microseconds for each call of a replaced function, and nothing for other functions.

    Example:
        >>> import torch, torchguard
        >>> with torchguard.install("resize", "out") as installation:
        ...     print(torchguard.installed(), installation.skipped)
        ('resize', 'out') {}
    """
    wanted = known(names, "install") or known(chosen(), CHOICE) or _DEFAULT
    if is_off():
        off = f"{SWITCH}=off in the environment"
        return Installation((), dict.fromkeys(wanted, off))
    _warn_if_newer()
    not_needed = _not_needed(wanted) if only_if_needed else {}
    _wait_for_modules(wanted)
    with patch.lock:
        reasons, new = _put_in_place([name for name in wanted if name not in not_needed])
        held = tuple(name for name in wanted if name not in not_needed and name not in reasons)
        installation = Installation(held, {**not_needed, **reasons})
        for name in held:
            _installed.setdefault(name, set()).add(installation)
            GUARDS[name].on.on += 1
    reasons |= _try_new(new)
    if strict and reasons:
        installation.uninstall()
        raise TorchGuardError(
            "install: these guards do not protect: "
            + "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
            + ". Nothing was installed; strict=False installs the others"
        )
    _warn_of(reasons)
    return installation


@public
def uninstall(*names: GuardName) -> None:
    """Remove guards, however often they were installed; without names all of them.

    Every attribute of torch is the object that it was before :func:`install`. If a scope of a guard
    is open (:func:`guarded`), the guard stays until you call this again after the scope.

    Args:
        *names: which guards; without names, all of them.

    Raises:
        ValueError: a guard's name is unknown.
        PatchConflictError: other code has patched on top; nothing is changed then.

    Cost:
        Milliseconds, once.

    Example:
        >>> import torchguard
        >>> installation = torchguard.install("resize")
        >>> torchguard.uninstall()
        >>> torchguard.installed()
        ()
    """
    wanted = known(names, "uninstall") or tuple(GUARDS)

    def let_go() -> None:
        for name in wanted:
            GUARDS[name].on.on -= len(_installed.pop(name, ()))
            _left_out.pop(name, None)

    with patch.lock:
        _remove([name for name in wanted if name in _in_place and not _scopes[name]], let_go)


@public
def installed() -> tuple[str, ...]:
    """Return the names of the guards in force, by :func:`install` or in a scope that is open.

    If other code has patched a function after the guard, or restored it, the guard is left out. A
    guard that waits until the program imports Dynamo is in the tuple.

    Cost:
        The attributes of the guards in force are compared.

    Example:
        >>> import torchguard
        >>> "out" in torchguard.installed()
        False
    """
    with patch.lock:
        names = dict.fromkeys((*_installed, *(name for name in GUARDS if _scopes[name])))
        return tuple(
            name
            for name in names
            if name in _in_place and all(patch.patched(path) for path in patch.paths_of(name))
        )


# ---- scopes ----


def enter(names: tuple[str, ...]) -> tuple[str, ...]:
    """Open a scope; return the guards that are on in it."""
    while True:  # again if another thread has removed a guard meanwhile
        with patch.lock:
            held = tuple(name for name in names if name in _in_place)
            missing = [name for name in names if name not in held and name not in _left_out]
            if not missing:
                _count_scopes(held, 1)
                return held
        _prepare_scope(missing)


def _prepare_scope(missing: Iterable[str]) -> None:
    """Put guards in place for a scope, and try those that are new."""
    _warn_if_newer()
    not_needed = _not_needed(missing)
    _wait_for_modules(missing)
    with patch.lock:
        _left_out.update(not_needed)
        reasons, new = _put_in_place([name for name in missing if name not in not_needed])
        _count_scopes(new, 1)  # so that no other thread removes one while it is tried
    reasons |= _try_new(new)
    with patch.lock:
        _count_scopes(new, -1)
        _left_out.update(reasons)
    _warn_of(reasons)


def leave(held: tuple[str, ...], *, failed: bool) -> None:
    """Close a scope. The replacements stay, and do nothing while nobody needs them."""
    try:
        for name in held:
            ended = GUARDS[name].ended
            if ended is not None:  # "checks" raises what it has not reported yet
                ended(failed=failed)
    finally:
        with patch.lock:
            _count_scopes(held, -1)


def _count_scopes(names: Iterable[str], change: int) -> None:
    for name in names:
        _scopes[name] += change
        GUARDS[name].on.on += change


# ---- one guard ----


def _not_needed(names: Iterable[str]) -> dict[str, str]:
    """Try the defects of guards that are not in place; return why some are not needed."""
    # Not under the lock: a trial may import Dynamo, for which another thread may hold the lock of
    # Python's while it wants ours.
    tried = [name for name in names if name not in _in_place and _why_not_needed(name)]
    with patch.lock:
        # Other threads may have put one in place, so that its trial passed. It is tried again while
        # none of them can.
        reasons = {name: _why_not_needed(name) for name in tried if name not in _in_place}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_not_needed(name: str) -> str | None:
    if not GUARDS[name].tried_by_self_test:
        return None  # every PyTorch so far needs it
    if any(name in tests and tests[name]() is not None for tests in SELF_TESTS.values()):
        return None
    return "its self-test passes on this torch without it"


def _wait_for_modules(names: Iterable[str]) -> None:
    """Let guards hear when a module is imported in which they replace something."""
    for module in (DYNAMO, *(module for name in names for module in GUARDS[name].in_modules)):
        on_import(module, _module_was_imported)


def _put_in_place(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Replace what these guards replace; return why some could not, and which are new."""
    reasons: dict[str, str] = {}
    new: list[str] = []
    try:
        for name in names:
            reason = _replace(name)
            if reason is not None:
                reasons[name] = _of_this_torch(reason)
            elif name not in _in_place:
                new.append(name)
                _in_place.add(name)
                GUARDS[name].changed()
    except BaseException:
        _remove(new, lambda: None)
        raise
    return reasons, new


def _replace(name: str) -> str | None:
    """Replace what a guard replaces, as far as this torch has it; say why that is not possible."""
    guard = GUARDS[name]
    try:
        paths = patch.apply(name, guard.paths(), rank=list(GUARDS).index(name))
    except Exception as error:
        if isinstance(error, TorchGuardError):  # a conflict with other code's patch
            raise
        return f"its functions can't be replaced: {type(error).__name__}: {error}"
    if not paths and not guard.waits():
        return "there is none of the functions that it replaces"
    return None


def _try_new(names: Iterable[str]) -> dict[str, str]:
    """Run the self-tests of guards that are new in place, each when what it needs is imported."""
    reasons: dict[str, str] = {}
    for module, tests in SELF_TESTS.items():
        if module in sys.modules:
            reasons |= _try([name for name in names if name not in reasons], tests)
        else:
            on_import(module, _try_later)
    return reasons


def _try_later(module: ModuleType) -> None:
    on = [name for name in GUARDS if name in _in_place and GUARDS[name].on.on]
    _warn_of(_try(on, SELF_TESTS[module.__name__]))


def _try(names: Iterable[str], tests: Mapping[str, SelfTest]) -> dict[str, str]:
    """Run the self-test of each guard; remove those that do not protect, and return why."""
    reasons: dict[str, str] = {}
    for name in names:
        if name not in tests or tests[name]() is None:
            continue
        with patch.lock:
            # Other threads may have removed it while it was tried. It is tried again while none of
            # them can.
            reason = tests[name]() if name in _in_place else None
            if reason is not None:
                reasons[name] = _of_this_torch(reason)
                _take_off(name, reasons[name])
    return reasons


def _take_off(name: str, reason: str) -> None:
    """Remove a guard whatever holds it, and let the installations know why."""
    holders = _installed.pop(name, set())
    GUARDS[name].on.on -= len(holders)
    _left_out[name] = reason
    for holder in holders:
        holder._skip(name, reason)
    with contextlib.suppress(TorchGuardError):  # under another patch it stays, and does nothing
        _remove([name], lambda: None)


def _remove(names: list[str], then: Callable[[], None]) -> None:
    """Put back what stood where these guards have replaced it."""
    patch.undo(*names)
    with contextlib.ExitStack() as last:  # "checks" raises what it has not reported yet
        last.callback(then)
        for name in names:
            _in_place.discard(name)
            ended = GUARDS[name].ended
            if ended is not None:
                last.callback(ended, failed=False)
            last.callback(GUARDS[name].changed)


def _module_was_imported(module: ModuleType) -> None:
    """Replace what guards in place replace in a module; let Dynamo trace the originals."""
    reasons: dict[str, str] = {}
    with patch.lock:
        if module.__name__ == DYNAMO:
            follow_in_dynamo()
        concerned = [name for name in GUARDS if module.__name__ in GUARDS[name].in_modules]
        for name in concerned:
            reason = _replace(name) if name in _in_place else None
            if reason is not None:
                reasons[name] = _of_this_torch(reason)
                _take_off(name, reasons[name])
    _warn_of(reasons)


def _of_this_torch(reason: str) -> str:
    return f"torch {torch.__version__}: {reason}"


def _warn_of(reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        record("guard_skipped", name, f"it does not protect: {reason}", is_said=True)
        warn_user(
            "guard-skipped",
            f"the guard {name!r} is off, because it does not protect: {reason}",
        )


@functools.cache
def _warn_if_newer() -> None:
    """Warn once if no version of torch as new as this one was tested."""
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        warn_user(
            "torch-newer-than-tested",
            f"torch {torch.__version__} is newer than {newest}, the newest that this "
            "version of torchguard is tested with. Each guard is tried when it is installed, and "
            "is left out if it does not protect",
        )


def known(names: Iterable[object], operation: str) -> tuple[str, ...]:
    """Return the names once each, or raise with the list of guards; ``"all"`` is every guard."""
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{operation}: got {name!r}, expected names of guards as separate arguments: "
                f"{operation}('resize', 'out')"
            )
        if name != "all" and name not in GUARDS:
            close = difflib.get_close_matches(name, GUARDS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            if "," in name:
                parts = ", ".join(repr(part.strip()) for part in name.split(","))
                hint = f"write {operation}({parts}); "
            raise ValueError(
                f"{operation}: there is no guard named {name!r}; {hint}guards are: "
                f"{', '.join(sorted(GUARDS))}, or 'all'"
            )
        found |= dict.fromkeys(GUARDS if name == "all" else (name,))
    return tuple(found)
