"""``save()``: ``torch.save`` that never leaves half a file, nor a file of two training steps."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from torchguard._files import is_replaceable, is_temporary, replace_file
from torchguard._public import public
from torchguard._torch import patch, version_of, versions_after, without_torch_function
from torchguard.errors import SaveError, TornSaveError
from torchguard.rollback.consistency import is_container, tensors_in

OnTorn = Literal["raise", "retry", "ignore"]

# A zip archive begins with a record and ends with 22 bytes that say where its directory is.
_ZIP_BEGINS, _ZIP_ENDS, _ZIP_END_SIZE = b"PK\x03\x04", b"PK\x05\x06", 22
_MANY = 20_000  # objects, of which most checkpoints have fewer
_TRIES = 5  # with on_torn="retry": a loop that steps faster than it saves would never end


@public
def save(
    obj: Any,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = torch.serialization.DEFAULT_PROTOCOL,
    *,
    fsync: bool = True,
    on_torn: OnTorn = "raise",
    **options: Any,
) -> None:
    """Save an object so that the path holds the old file or the new one, whole, at every instant.

    Equals ``torch.save(obj, f, pickle_module, pickle_protocol)`` on success, byte for byte. On
    failure, whatever is raised, the old file is as it was, and the exception is torch's own.
    The same holds when the process is killed or the disk is full: the new file is written beside
    the old one and takes its place in one step. Memory mapped from the old file
    (``torch.load(mmap=True)``) stays valid.

    Args:
        obj: what to save.
        f: a path; a symbolic link is followed to its file. A file object, a pipe or a device
            goes to ``torch.save`` as it is.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.
        fsync: wait until the file is on the disk. Without it a process that is killed loses
            nothing, but a machine that loses power may keep neither file.
        on_torn: what to do if a tensor was changed in place, by another thread, while it was
            being saved: ``"raise"``, ``"retry"`` (save again, five times at most, then raise)
            or ``"ignore"``. Writes through ``tensor.data`` or numpy are not seen.
        **options: further options of ``torch.save``.

    Raises:
        SaveError: the folder of ``f`` takes no new file, or torch's writer stopped before the end.
        TornSaveError: a tensor changed while it was being saved; names it.
        ValueError: ``on_torn`` is none of these.

    Upstream: https://github.com/pytorch/pytorch/issues/2883,
    https://github.com/pytorch/pytorch/issues/144657

    Example:
        >>> import tempfile, torch, torchguard
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torchguard.save({"weight": torch.ones(2)}, path)
        >>> torchguard.load(path)
        {'weight': tensor([1., 1.])}
    """
    save = guard_save(patch.original("torch.save"), fsync=fsync, on_torn=on_torn)
    save(obj, f, pickle_module, pickle_protocol, **options)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    fsync: bool = True,
    on_torn: OnTorn = "raise",
) -> None:
    """Save tensors in the safetensors format, whole or not at all.

    Equals ``safetensors.torch.save_file(tensors, filename, metadata)`` on success; for failures
    see :func:`save`. ``install("save")`` does the same for ``save_file`` and ``save_model``.

    Raises:
        ImportError: safetensors is not installed.
        SaveError, TornSaveError, ValueError: as :func:`save`.
    """
    import safetensors.torch  # noqa: F401, PLC0415  a package that need not be there

    original = patch.original("safetensors.torch.save_file")
    guard_save_file(original, fsync=fsync, on_torn=on_torn)(tensors, filename, metadata)


def guard_save(
    original: Callable[..., None], *, fsync: bool = True, on_torn: OnTorn = "raise"
) -> Callable[..., None]:
    """Make ``torch.save`` what :func:`save` is."""
    _check_on_torn(on_torn)

    def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        path = _path_to_replace(f)
        if path is None:
            original(obj, f, *args, **options)
            return
        module, *others = args or (options.pop("pickle_module", pickle),)

        def write(temporary: str, versions: Versions) -> None:
            with_callback = _pickle_module_calling(module, versions.saved)
            original(obj, temporary, with_callback, *others, **options)
            _check_end(temporary, path)

        _write_watched(obj, path, write, fsync=fsync, on_torn=on_torn)

    return save


def guard_save_file(
    original: Callable[..., None], *, fsync: bool = True, on_torn: OnTorn = "raise"
) -> Callable[..., None]:
    """Make ``safetensors.torch.save_file`` what :func:`save_file` is; ``save_model`` calls it."""
    _check_on_torn(on_torn)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        path = _path_to_replace(filename)
        if path is None:
            original(tensors, filename, metadata=metadata)
            return

        def write(temporary: str, versions: Versions) -> None:
            for tensor in tensors.values():
                versions.saved(tensor)
            original(tensors, temporary, metadata=metadata)

        _write_watched(tensors, path, write, fsync=fsync, on_torn=on_torn)

    return save_file


def guard_serialize_file(original: Callable[..., None]) -> Callable[..., None]:
    """Guard what ``save_file`` calls, for those who imported ``save_file`` before the guard."""

    def serialize_file(flattened: Any, filename: Any, metadata: Any = None) -> None:
        path = _path_to_replace(filename)
        if path is None:
            original(flattened, filename, metadata=metadata)
        else:
            replace_file(path, lambda new: original(flattened, new, metadata=metadata))

    return serialize_file


def guard_commit(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard the last step of fsspec's local files, which Lightning writes checkpoints through.

    They are written in the system's temporary folder and moved; where that is another file
    system, ``shutil.move`` copies onto the target.
    """

    def commit(self: Any) -> None:
        path = None if self.autocommit else _path_to_replace(self.path)
        if path is None:
            original(self)
            return
        if not self.f.closed:
            self.f.close()
        replace_file(path, lambda temporary: shutil.move(self.temp, temporary))

    return commit


def _check_end(temporary: str, path: str) -> None:
    """Raise if an archive has no end: up to 2.6 torch's writer drops an error in its last bytes."""
    with open(temporary, "rb") as file:
        if file.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
            return
        file.seek(-_ZIP_END_SIZE, os.SEEK_END)
        ended = file.read(len(_ZIP_ENDS)) == _ZIP_ENDS
    if not ended:
        raise SaveError(
            f"save: torch has written {os.path.getsize(temporary):,} bytes, and not the end of the "
            f"file; the disk may be full. {path} is as it was"
        )


def _path_to_replace(f: Any) -> str | None:
    """Return the path if it is to be replaced; None where the original writer is called with it."""
    path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else None
    if not isinstance(path, str) or is_temporary(path) or not is_replaceable(path):
        return None
    # What may not be written to may not be replaced either; torch's own error says so.
    return None if os.path.exists(path) and not os.access(path, os.W_OK) else path


def _write_watched(
    obj: Any,
    path: str,
    write: Callable[[str, Versions], None],
    *,
    fsync: bool,
    on_torn: OnTorn,
) -> None:
    for left in reversed(range(_TRIES if on_torn == "retry" else 1)):
        versions = Versions(obj)

        def write_and_compare(temporary: str, versions: Versions = versions) -> None:
            write(temporary, versions)
            name = None if on_torn == "ignore" else versions.changed(os.path.getsize(temporary))
            if name is not None:
                raise TornSaveError(
                    f"save: {name} was changed in place while it was being saved, so the file "
                    f"would have held parts of two states; {path} is as it was. Let the thread "
                    "that changes it wait, save a copy, or pass on_torn='retry'"
                )

        try:
            replace_file(path, write_and_compare, fsync=fsync)
        except TornSaveError:
            if not left:
                raise
        else:
            return


class Versions:
    """The version counters of the tensors that are saved, from before the first is read."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        # The tensors are held, so that no id is used again.
        self._before = {id(each): (each, version_of(each)) for each in _tensors_around(obj)}
        self._saved: dict[int, torch.Tensor] = {}

    def saved(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is part of what is saved; its elements are read later."""
        self._saved[id(tensor)] = tensor
        if id(tensor) not in self._before:  # in an object that only pickle looks into
            self._before[id(tensor)] = tensor, version_of(tensor)

    def saved_all(self) -> int:
        """Note that all tensors are part of what is saved; return how many bytes they have."""
        self._saved = {key: tensor for key, (tensor, _) in self._before.items()}
        return sum(tensor.nbytes for tensor in self._saved.values())

    def changed(self, size: int) -> str | None:
        """Name a tensor that has been written to since, or is; ``size`` is the file's, in bytes."""
        saved = [self._before[key] for key in self._saved]
        name = self._changed(saved, [version_of(tensor) for tensor, _ in saved])
        if name is None and _another_thread_runs():
            # torch increments a version counter when the operation has ended, and runs it without
            # the GIL. While this thread sleeps with the GIL, those that run end, and none begins.
            # https://github.com/pytorch/pytorch/blob/main/tools/autograd/gen_inplace_or_view_type.py
            # An operation takes about as long as its tensor is large.
            counted = [each for each in saved if each[1] is not None]
            seconds = min(0.02 + size / 4e9, 0.1)
            with without_torch_function():
                now = versions_after(seconds, [tensor for tensor, _ in counted])
            name = self._changed(counted, now)
        return name

    def _changed(
        self, saved: list[tuple[torch.Tensor, int | None]], now: Iterable[int | None]
    ) -> str | None:
        moved = (t for (t, before), version in zip(saved, now, strict=True) if version != before)
        tensor = next(moved, None)
        return None if tensor is None else _name_of(tensor, self._obj)


def _tensors_around(obj: Any) -> list[torch.Tensor]:
    """Return the tensors in containers, modules and optimizers, however deep.

    What is in other objects, or behind very many containers, is seen when pickle meets it: an
    object may have a million of them, and to look at each takes as long as to save it.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    candidates = [obj]
    while candidates and len(seen) < _MANY:
        inside: list[Any] = []
        for each in candidates[:_MANY]:
            kind = _kind(type(each))  # type: ignore[arg-type]  # a class can be hashed
            if kind is not None and id(each) not in seen:
                seen.add(id(each))
                (found if kind is torch.Tensor else inside).append(each)
        candidates = gc.get_referents(*inside)
    return found


@functools.cache
def _kind(cls: type) -> type | None:
    """Return what a class is to :func:`_tensors_around`; None for what has no tensors in it."""
    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, dict, list, tuple, set)
    return next((kind for kind in kinds if issubclass(cls, kind)), None)


def _name_of(tensor: torch.Tensor, obj: Any) -> str:
    """Say which tensor it is, for an error."""
    with without_torch_function():
        names = tensors_in(obj, "obj", {}) if is_container(obj) else ()
        name = next((name for name, each in names if each is tensor), None)
        shape = f"{tensor.numel()} elements" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
        return name or f"a tensor of {shape}"


def _another_thread_runs() -> bool:
    """Whether a thread of Python may be in an operation: idle ones wait in the standard library."""
    own, library = threading.get_ident(), os.path.dirname(os.__file__) + os.sep
    files = [f.f_code.co_filename for i, f in sys._current_frames().items() if i != own]
    return any(not each.startswith(library) or "-packages" in each for each in files)


def _pickle_module_calling(pickle_module: Any, saved: Callable[[torch.Tensor], None]) -> Any:
    """Return the pickle module with a ``Pickler`` that calls ``saved`` with each tensor it meets.

    ``torch.save`` derives its own pickler from this one, and calls nothing else of the module
    but ``dump``; what is written is the same.
    """
    base: Any = getattr(pickle_module, "Pickler", None)
    if not isinstance(base, type):
        return pickle_module

    inherited = getattr(base, "reducer_override", lambda *_: NotImplemented)

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                saved(obj)
            return inherited(self, obj)

    module = ModuleType(pickle_module.__name__)
    module.__dict__.update(vars(pickle_module), Pickler=Pickler)
    return module


def _check_on_torn(on_torn: str) -> None:
    if on_torn not in get_args(OnTorn):
        raise ValueError(
            f"save: on_torn is {on_torn!r}, expected {' or '.join(map(repr, get_args(OnTorn)))}"
        )
