"""install(): switch the guards on for code that knows nothing of them, and off again."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from typing_extensions import Self

from torchguard._events import record
from torchguard._public import public
from torchguard._torch import (
    DYNAMO,
    dynamo_is_imported,
    dynamo_is_there,
    fill_tables,
    on_import,
    patch,
    rebuild_dynamo_tables,
    warn_user,
)
from torchguard._torch.overlays import forget
from torchguard.errors import PatchConflictError, TorchGuardError
from torchguard.patching.guards import GUARDS, GuardName
from torchguard.patching.selftests import LATER_SELF_TESTS, SELF_TESTS, SelfTest

_DEFAULT = ("resize",)

# Who holds each guard, and the paths each guard patched.
_holders: dict[str, set[Installation]] = {}
_paths: dict[str, list[str]] = {}
_waiting: list[str] = []  # guards of Dynamo that is not imported yet


@public
@dataclass(eq=False)
class Installation:
    """What :func:`install` did; call :meth:`uninstall`, or use it in a ``with`` statement."""

    names: tuple[str, ...]
    """The guards this installation holds."""

    skipped: dict[str, str]
    """Guards this torch does not need, each with the reason.

    A guard of Dynamo can move here from ``names`` when Dynamo is imported.
    """

    _only_if_needed: bool = field(repr=False)

    def uninstall(self) -> None:
        """Let go of this installation's guards; those that no other installation holds are undone.

        Calling it again does nothing.

        Raises:
            PatchConflictError: other code has patched on top; nothing is undone then.
        """
        with patch.lock:
            _undo([name for name in self.names if _holders.get(name) == {self}], self._let_go)

    def _let_go(self) -> None:
        for holders in _holders.values():
            holders.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.uninstall()


@public
def install(*names: GuardName, only_if_needed: bool = True, strict: bool = False) -> Installation:
    """Switch guards on for the whole process: for applications, not for libraries.

    Equals plain torch wherever nothing fails: same results, same tensors, same
    graphs. All or nothing: if one guard can't be installed, none is. Installing
    a guard that is installed already adds no second layer, and it stays until
    every installation of it is undone.

    Guards:
        ``"resize"`` (the default): ``Tensor.resize_``, ``Tensor.resize_as_``,
        ``Tensor.set_`` and ``torch.resize_as_`` leave the tensor as it was when
        they fail, as ``safe_resize_`` does.
        ``"out"``: so do the operators with ``out=`` of ``torch``, ``torch.linalg``,
        ``torch.special``, ``torch.fft`` and ``torch.nn.functional`` with their output.
        ``"overlap"``: an operation that reads what it writes (``x -= x[:, :1]``) computes as if its
        operands were copied first, and warns once per line (``OverlapWarning``).
        ``"setitem"``: in code compiled from then on, ``requires_grad`` is right after
        ``x[i] = v`` (and any other write in place), for ``x`` and whatever shares
        its memory, and a custom autograd function that reads it has its backward.
        ``"slice_scatter"``: in code compiled from then on, ``torch.slice_scatter``,
        ``select_scatter`` and ``diagonal_scatter`` have the gradient they have in eager.
        ``"verified"``: ``torch.compile`` checks every graph that inductor compiles against
        eager before it is trusted, as ``verified()`` does.
        ``"save"``: ``torch.save``, safetensors' ``save_file`` and ``save_model``, and what writes
        through fsspec, as Lightning does, replace a file whole or not at all, as ``save()`` does.
        ``dcp.save`` onto a link of ``checkpoint_folder`` replaces it whole, and onto any other
        checkpoint raises.
        ``"load"``: ``torch.load`` says what is wrong with a file, as ``load()`` does, and
        ``load_state_dict`` of modules and optimizers loads whole or not at all. Tied parameters
        stay tied, in ``Module.to_empty`` too. ``dcp.load`` compares first, as ``load_sharded``.
        ``"recompute"``: a block under ``torch.utils.checkpoint`` runs in backward as it ran the
        first time, as :func:`safe_checkpoint` says, whoever has imported ``checkpoint`` before.
        ``"checks"``: an index, a label, a divisor or a probability that is out of range raises,
        in eager and in compiled code, as in a scope of :func:`checked`.
        ``"numpy"``: a tensor never writes to a read-only array or buffer, ``frombuffer`` keeps
        its buffer open, and memory that ``t.numpy()`` looks at is not moved away under it.

    ``"setitem"`` and ``"slice_scatter"`` patch Dynamo. While nothing has imported
    that, they wait for it, and count as installed; ``"slice_scatter"`` is tried then,
    and may move to ``.skipped``. What was compiled before stays as it is: install
    first, or call ``torch.compiler.reset()``.

    Args:
        *names: which guards; none for the default set.
        only_if_needed: try each defect first, and skip a guard whose defect this
            torch does not have (``.skipped`` says why).
        strict: raise if a guard does not protect on this torch.

    Each guard is tried once it is in place. One that does not protect is taken off again, with a
    warning, and ``.skipped`` says why; the others stay. With ``strict=True`` that raises instead.
    What a guard does in compiled code is tried when the program calls ``torch.compile`` for the
    first time, and a guard that does not protect there is taken off then, with a warning.

    Returns:
        An :class:`Installation`, which can be used in a ``with`` statement.

    Raises:
        ValueError: there is no guard of that name.
        TorchGuardError: with ``strict``, a guard does not protect on this torch; none is installed.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/169179,
    https://github.com/pytorch/pytorch/issues/180164
    """
    wanted = _known(names, "install") or _DEFAULT
    # Every defect is tried before anything is patched: if a trial raises, nothing is. A trial may
    # import Dynamo, for which another thread may hold the lock of Python's while it wants ours.
    reasons = {
        name: GUARDS[name].not_needed()
        for name in wanted
        if only_if_needed and name not in _holders
    }
    # Dynamo fills tables of torch's functions, by identity, when it is imported or first asked:
    # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/trace_rules.py
    on_import(DYNAMO, _dynamo_was_imported)
    dynamo = dynamo_is_imported()
    with patch.lock:
        skipped = {
            name: reason
            for name, reason in reasons.items()
            if reason is not None and name not in _holders
        }
        chosen = tuple(name for name in wanted if name not in skipped)
        new = {
            name: GUARDS[name].paths()
            for name in chosen
            if name not in _holders and (dynamo or not GUARDS[name].patches_dynamo)
        }
        fill_tables()
        for name in chosen:
            if _paths.get(name) and not _is_in_force(name):
                patch.renew(GUARDS[name].paths().items())
        patch.apply(pair for pairs in new.values() for pair in pairs.items())
        _paths.update({name: list(replacements) for name, replacements in new.items()})
        for name in new:
            GUARDS[name].changed()
        installation = Installation(chosen, skipped, only_if_needed)
        for name in chosen:
            if name not in _holders and name not in new:
                _waiting.append(name)
            _holders.setdefault(name, set()).add(installation)
        if dynamo_is_there():  # another thread has imported it in between
            _apply_waiting()
    for name in chosen:
        for module in GUARDS[name].in_modules:
            on_import(module, _module_was_imported)
    _try_new(new, installation, strict=strict)
    return installation


def _try_new(names: Iterable[str], installation: Installation, *, strict: bool) -> None:
    """Run the self-tests of guards that are new in place, the rest of them when they can be run."""
    _try(names, SELF_TESTS, installation, strict=strict)
    for module, tests in LATER_SELF_TESTS.items():
        if module in sys.modules:
            _try(names, tests, installation, strict=strict)
        else:
            on_import(module, _try_later)


def _try_later(module: ModuleType) -> None:
    """Run the self-tests that had to wait for a module."""
    _try(list(_holders), LATER_SELF_TESTS[module.__name__])


def _try(
    names: Iterable[str],
    tests: Mapping[str, SelfTest],
    installation: Installation | None = None,
    *,
    strict: bool = False,
) -> None:
    """Run the self-test of each of these guards; take off those that fail."""
    for name in names:
        reason = _why_it_does_not_protect(name, tests)
        if reason is not None:
            reason = f"torch {torch.__version__}: {reason}"
            with patch.lock:
                _skip(name, reason)
            if strict and installation is not None:
                installation.uninstall()
                raise TorchGuardError(
                    f"install: {name!r} does not protect: {reason}; nothing was installed "
                    "(strict=False installs the other guards)"
                )
            record("guard_skipped", name, reason)
            warn_user(
                f"torchguard: the guard {name!r} is off, because it does not protect: {reason}",
                RuntimeWarning,
            )


def _why_it_does_not_protect(name: str, tests: Mapping[str, SelfTest]) -> str | None:
    test = tests.get(name)
    try:
        return None if test is None else test()
    except Exception as error:  # noqa: BLE001 - whatever it is, the guard does not protect
        return f"its self-test failed with {type(error).__name__}: {error}"


def _skip(name: str, reason: str) -> None:
    """Take a guard off, and let those who hold it know why."""
    holders = _holders.get(name, set())
    with contextlib.suppress(PatchConflictError):  # other code has patched over it: it stays
        _undo([name], lambda: None)
    for holder in holders:
        holder.names = tuple(each for each in holder.names if each != name)
        holder.skipped[name] = reason


@public
def uninstall(*names: GuardName) -> None:
    """Undo guards, however often they were installed; without names all of them.

    Every attribute of torch is then the very object it was before, or absent
    if it was absent. Guards that are not installed are passed over. Without names, what
    :func:`guarded` and :func:`checked` keep between their scopes goes too.

    Raises:
        ValueError: there is no guard of that name.
        PatchConflictError: other code has patched on top; nothing is undone then.
    """
    with patch.lock:
        _undo(list(_known(names, "uninstall") or _holders), lambda: None if names else forget())


@public
def installed() -> tuple[str, ...]:
    """Return the names of the guards in force, in the order they were installed.

    It compares what stands in torch now, not a flag: a guard that other code has patched over, or
    whose function other code has put back, is not in force. A guard of Dynamo that waits until
    Dynamo is imported is. ``if "out" in torchguard.installed():``
    """
    return tuple(name for name in list(_holders) if _is_in_force(name))


@public
def get_original(path: str) -> Any:
    """Return what torch itself has at a path such as ``"torch.Tensor.resize_"``, patched or not.

    Raises:
        AttributeError: torch has nothing there.
        ValueError: the path does not begin with ``torch.``.
    """
    if not path.startswith("torch."):
        raise ValueError(
            f"get_original: path is {path!r}, expected one like 'torch.Tensor.resize_'"
        )
    found = patch.original(path)
    if found is patch.ABSENT:
        raise AttributeError(
            f"get_original: torch has nothing at {path}; torchguard has put it there"
        )
    return found


def _is_in_force(name: str) -> bool:
    paths = _paths.get(name, [])
    return name in _waiting or (bool(paths) and all(patch.patched(path) for path in paths))


def _undo(names: list[str], then: Callable[[], None]) -> None:
    patch.undo([path for name in names for path in _paths.get(name, ())])
    with contextlib.ExitStack() as last:  # "checks" raises what it has not reported yet
        last.callback(then)
        for name in names:
            _holders.pop(name, None)
            _paths.pop(name, None)
            if name in _waiting:
                _waiting.remove(name)
            last.callback(GUARDS[name].changed)


def _module_was_imported(module: ModuleType) -> None:
    """Patch a module that a guard waits for."""
    with patch.lock:
        for name in _holders:
            found = GUARDS[name].paths_in(module.__name__)
            new = {path: make for path, make in found.items() if path not in _paths[name]}
            if new:
                patch.apply(new.items())
                _paths[name] += new


def _dynamo_was_imported(_: ModuleType) -> None:
    """Let Dynamo's tables know torch's own functions, and patch it for those that wait."""
    with patch.lock:
        with patch.originals_in_place():
            rebuild_dynamo_tables()
        _apply_waiting()


def _apply_waiting() -> None:
    """Patch Dynamo for the guards that have waited for it, or let their holders know why not."""
    while _waiting:
        name = _waiting.pop(0)
        # Several may hold it: it is left out if none of them wants it on a torch that is right.
        anyway = any(not holder._only_if_needed for holder in _holders[name])
        reason = None if anyway else GUARDS[name].not_needed()
        if reason is None:
            try:
                replacements = GUARDS[name].replacements()
                patch.apply(replacements.items())
            except AttributeError as error:  # importing Dynamo must not fail for it
                reason = f"this torch's Dynamo is built differently: {error}"
            else:
                _paths[name] = list(replacements)
                continue
        for holder in _holders.pop(name):
            holder.names = tuple(each for each in holder.names if each != name)
            holder.skipped[name] = reason


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
