"""``load()`` and ``load_state_dict()``: from a file that is whole, into a module that takes all.

torch copies a state tensor by tensor, collects what does not match and raises at the end: by
then everything that did match is overwritten. No upstream issue is known.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchguard._public import public
from torchguard._torch import patch, tensors_loaded_by_copies, without_assign_marks
from torchguard.checkpoint.names import hint_for, warn_if_none_fits
from torchguard.checkpoint.ties import named_tensors, require_one_value, tie_again, ties_of
from torchguard.equivalence.operands import are_apart
from torchguard.errors import DamagedFileError
from torchguard.rollback.on_error import Rollback
from torchguard.state.containers import Containers
from torchguard.state.optimizer_state import load_optimizer
from torchguard.state.process import DeferredSignals, roll_back
from torchguard.state.training import Modules, containers_of

_ZIP_BEGINS = b"PK\x03\x04"
_UNREADABLE = ("PytorchStreamReader failed reading zip archive", "Couldn't parse the version")
_PICKLED_TEXT = f"L{0x1950A86A20F9469CFC6C}"  # torch's older format, with pickle_protocol=0
_SHOWN = 80  # characters of a text
_MARKED_AS_FOLDER = 0x10
_CHUNK = 1 << 20
_NAMES = 10  # of the files in a folder, for an error
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_LAZY = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]


@public
def load(f: Any, *args: Any, check: bool | None = None, **options: Any) -> Any:
    """Load what was saved, from a file that is whole.

    Equals ``torch.load(f, *args, **options)`` on success. PyTorch compares no checksum, and loads a
    file in which a bit has changed. This compares the checksums that ``torch.save`` has written.

    Args:
        f: a path, or a file object, which goes to ``torch.load`` as it is.
        *args: as for ``torch.load``.
        check: compare checksums. The default is to do so, except with ``mmap=True``: then only the
            directory and the sizes are compared, so that not the whole file is read.
        **options: as for ``torch.load``.

    Raises:
        DamagedFileError: a ``RuntimeError``: the file is empty, cut off, or holds other bytes
            than were written; says which file and what is wrong with it.
        IsADirectoryError: the path is that of a folder; names the files in it.

    Upstream: https://github.com/pytorch/pytorch/issues/31620

    Cost:
        The file is read once more than by ``torch.load``, unless ``check=False``.

    Example:
        >>> import pathlib, tempfile, torch, torchguard
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
        >>> torchguard.save({"weight": torch.ones(2)}, path)
        >>> torchguard.load(path)
        {'weight': tensor([1., 1.])}
        >>> _ = path.write_bytes(path.read_bytes()[:-100])  # as if the writer had died
        >>> try:
        ...     torchguard.load(path)
        ... except torchguard.DamagedFileError:
        ...     print("not whole")
        not whole
    """
    if not isinstance(f, (str, os.PathLike)) and not hasattr(f, "read"):
        raise TypeError(f"load: f is of type {type(f).__name__}, expected a path or a file")
    return guard_load(patch.original("torch.load"), check)(f, *args, **options)


def guard_load(original: Callable[..., Any], check: bool | None = None) -> Callable[..., Any]:
    """Make ``torch.load`` what :func:`load` is."""

    def load(f: Any, *args: Any, **options: Any) -> Any:
        path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else None
        if isinstance(path, str) and os.path.isdir(path):
            raise IsADirectoryError(_of_folder(path))
        if not isinstance(path, str) or not os.path.isfile(path):
            return original(f, *args, **options)
        with open(path, "rb") as file:
            first_bytes = file.read(len(_ZIP_BEGINS))
        size = os.path.getsize(path)
        if not size:
            raise DamagedFileError(f"{path} is empty: it was created and never written")
        if _ZIP_BEGINS.startswith(first_bytes):
            _check_zip(path, size, checksums=not options.get("mmap") if check is None else check)
        try:
            return original(f, *args, **options)
        except Exception as error:
            damage = _damage_of(path, size, error, is_zip=first_bytes == _ZIP_BEGINS)
            if damage is None:
                raise
            raise damage from error

    return load


def _of_folder(path: str) -> str:
    """Say what to type if the path is that of a folder."""
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    what = "with no file in it"
    if os.path.exists(os.path.join(path, ".metadata")):
        what = f"of torch.distributed.checkpoint: torchguard.load_sharded(state, {path!r})"
    elif names:
        example = os.path.join(path, names[0])
        what = f"with {', '.join(names[:_NAMES])}: load a file, as in load({example!r})"
    return f"load: {path} is a folder {what}"


def _damage_of(path: str, size: int, error: Exception, *, is_zip: bool) -> DamagedFileError | None:
    """Say what is wrong with a file that could not be read; None if it may be whole."""
    if (instead := _text_instead(path)) is not None:
        return instead
    if is_zip:
        if any(text in str(error) for text in _UNREADABLE):
            return DamagedFileError(f"{path} is damaged: its directory is not what was written")
    elif isinstance(error, EOFError) or "unexpected EOF" in str(error):
        return _cut_off(path, size)
    elif zipfile.is_zipfile(path):  # looks for the directory, which is at the end
        return DamagedFileError(f"{path} is damaged: its first bytes are not what was written")
    return None


def _text_instead(path: str) -> DamagedFileError | None:
    """Say what a file that is text begins with: it came in the place of a checkpoint."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_SHOWN).strip()
    except UnicodeDecodeError:
        return None
    if text.startswith(_PICKLED_TEXT) or not "".join(text.split()).isprintable():
        return None
    what = "text, and no checkpoint"
    if text.startswith("version https://git-lfs"):
        what = "a git-lfs pointer; fetch the file it stands for with: git lfs pull"
    elif text.startswith("<"):
        what = "a web page; the download needs a login, or another address"
    return DamagedFileError(f"{path} is {what}. It begins with {text!r}")


def _check_zip(path: str, size: int, *, checksums: bool) -> None:
    """Compare what is in a zip archive with its directory and, with ``checksums``, its contents."""
    try:
        fault = record_fault(path, checksums=checksums)
    except zipfile.BadZipFile as error:  # the directory is at the end of the file
        raise _cut_off(path, size) from error
    except (NotImplementedError, UnicodeDecodeError):  # versions and names are in it
        fault = "its directory is not what was written"
    if fault is not None:
        raise DamagedFileError(f"{path} is damaged: {fault}; use another copy of the file")


def record_fault(file: Any, *, checksums: bool = True) -> str | None:
    """Say which record of a zip archive does not hold what was written; None if all do."""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.external_attr & _MARKED_AS_FOLDER and record.file_size:
                # torch reads nothing of a folder: the tensor is the memory it has just allocated.
                return f"{record.filename} is marked as a folder"
            try:
                with archive.open(record) as contents:  # compares the header
                    # torch writes zeros after torch.serialization.set_crc32_options(False), and for
                    # what was left out under torch.serialization.skip_data(), to be filled later.
                    while checksums and record.CRC and contents.read(_CHUNK):
                        pass  # the checksum is compared with the last one
            except Exception as error:  # noqa: BLE001  zipfile raises four kinds, by the byte
                return (
                    f"{record.filename} ({record.file_size:,} bytes) does not hold what was "
                    f"written ({error or type(error).__name__})"
                )
    return None


def _cut_off(path: str, size: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is not whole: it ends after {size:,} bytes, before its last part. The process "
        "that wrote it was stopped, or is still writing; torchguard.save() leaves no such files"
    )


# ---- load_state_dict() ----


@public
def load_state_dict(
    target: torch.nn.Module | torch.optim.Optimizer,
    state: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """Load a state into a module or an optimizer, whole or not at all.

    Equals ``target.load_state_dict(state, strict=strict, assign=assign)`` on success (without
    ``strict`` and ``assign`` for an optimizer), what it returns included. On failure the
    exception is PyTorch's, and every parameter, buffer, moment and group is unchanged. Tied
    parameters stay one parameter, with ``assign=True`` too, which leaves no mark in ``state``.
    Ctrl-C waits. If the load could fail
    (names or shapes that do not fit, hooks, a loader of its own), a copy of the module's tensors is
    kept while it loads. A module with lazy parameters is loaded by PyTorch alone.

    An optimizer's state goes to the parameters of the same names if both sides have names
    (``Adam(model.named_parameters())``); PyTorch goes by position. If only one side has names, it
    goes by position, and a warning says so.

    Args:
        target: a module or an optimizer.
        state: what ``state_dict()`` returned.
        strict: as for a module's ``load_state_dict``. With False, a warning says if no name of the
            state fits, and what to type.
        assign: as for a module's ``load_state_dict``.

    Raises:
        TypeError: ``target`` is none of these.
        RuntimeError: PyTorch's, or a tied parameter has two values in ``state``.
        ValueError: an optimizer's state has tensors of another shape than its parameters (torch
            accepts them, and a fused ``step()`` then writes past their end), or both have names,
            and they are not the same, or occur several times in another order.

    Cost:
        Names and shapes are compared. Tensors are copied only if the load could fail.

    Example:
        >>> import torch, torchguard
        >>> model = torch.nn.Linear(2, 1)
        >>> weight = model.weight.clone()
        >>> state = {"weight": torch.zeros(1, 2), "bias": torch.zeros(9)}  # the bias does not fit
        >>> try:
        ...     torchguard.load_state_dict(model, state)
        ... except RuntimeError:
        ...     print(torch.equal(model.weight, weight))
        True
    """
    if isinstance(target, torch.nn.Module):
        return _load_module(target.load_state_dict, target, state, strict, assign)
    if isinstance(target, torch.optim.Optimizer):
        load = target.load_state_dict  # which calls copy()
        return load_optimizer(
            lambda given: load(dict(given) if isinstance(given, Mapping) else given), target, state
        )
    raise TypeError(
        f"load_state_dict: target is of type {type(target).__name__}, expected a torch.nn.Module "
        "or a torch.optim.Optimizer, and after it the state"
    )


def guard_module_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``torch.nn.Module.load_state_dict`` what :func:`load_state_dict` is."""

    def load_state_dict(
        self: Any, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        load = functools.partial(original, self)
        return _load_module(load, self, state_dict, strict, assign)

    return load_state_dict


def guard_optimizer_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``torch.optim.Optimizer.load_state_dict`` what :func:`load_state_dict` is."""

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        return load_optimizer(functools.partial(original, self), self, state_dict)

    return load_state_dict


# ---- modules ----


def _load_module(
    load: Callable[..., Any],
    module: torch.nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    assign: bool,
) -> Any:
    if not isinstance(state, Mapping):
        try:
            return load(state, strict=strict, assign=assign)
        except TypeError as error:
            text = f"load_state_dict: state is {state!r:.80}, expected what state_dict() returned; "
            error.args = (f"{text}a file is loaded first: torchguard.load(path)",)
            raise
    state = without_assign_marks(state, assign=assign)
    call = functools.partial(load, state, strict=strict, assign=assign)
    try:
        result = _load_whole(call, module, state, strict, assign)
    except RuntimeError as error:
        hint = hint_for(module, state)
        if hint and len(error.args) == 1:
            error.args = (f"{error.args[0]}\n\t{hint}",)
        raise
    if not strict:
        warn_if_none_fits(module, state, result)
    return result


def _load_whole(
    call: Callable[[], Any],
    module: torch.nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    assign: bool,
) -> Any:
    held = (*module.parameters(), *module.buffers())
    # A lazy tensor has no shape to compare, and nothing to restore.
    if any(isinstance(each, _LAZY) for each in (*held, *state.values())):
        return call()
    tensors = None if assign else tensors_loaded_by_copies(module)
    ties = ties_of(named_tensors(module) if tensors is None else tensors)
    if not assign:
        require_one_value(module, ties, state)
    if tensors is None or not _fits(tensors, state, strict):
        with _rolled_back_on_error(module, state):
            result = call()
            tie_again(module, ties, state)
            return result
    signals = DeferredSignals()
    try:
        return call()
    except BaseException:
        call()  # what fits is loaded whole, even if another signal or a mode of the user's raises
        raise
    finally:
        signals.restore_handlers()


def _fits(tensors: list[tuple[str, torch.Tensor]], state: Mapping[Any, Any], strict: bool) -> bool:
    """Whether torch loads a state without an error: by names, shapes, and what a copy needs."""
    given = [(tensor, state[name]) for name, tensor in tensors if name in state]
    if strict and not len(given) == len(tensors) == len(state):
        return False
    return all(isinstance(name, str) for name in state) and all(
        _copy_succeeds(*pair) for pair in given
    )


def _copy_succeeds(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``tensor.copy_(value)`` can't raise, or warn, under no_grad."""
    if type(tensor) not in _PLAIN or type(value) not in _PLAIN or tensor.shape != value.shape:
        return False
    if tensor.layout is not torch.strided or value.layout is not torch.strided:
        return False
    if tensor.is_inference() or not tensor.is_contiguous():
        return False
    if tensor.is_meta or value.is_meta or tensor.is_quantized or value.is_quantized:
        return False
    same = tensor.dtype is value.dtype
    if tensor.is_cpu and value.is_cpu:
        # Of the conversions, only that from complex to real warns.
        allowed = same or tensor.is_complex() or not value.is_complex()
    else:  # another dtype needs memory, and between devices another layout does
        allowed = same and value.is_contiguous()
    return allowed and are_apart(tensor, value)


@contextlib.contextmanager
def _rolled_back_on_error(module: torch.nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Keep copies of a module's tensors; restore them, and all it holds, if the block raises."""
    modules = list(module.modules())
    structure = Modules(modules).snapshot()
    containers = Containers(held for each in modules for held in containers_of(each))
    # assign=True gives the parameters of the state the requires_grad of the module's.
    flags = [(v, v.requires_grad) for v in state.values() if isinstance(v, torch.nn.Parameter)]
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}

    def restore() -> None:
        structure.restore()
        containers.restore()
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)

    try:
        with Rollback((list(tensors.values()),), data=True):
            yield
    except BaseException:
        roll_back(restore)
        raise
