"""verify_checkpoint(): whether a checkpoint on the disk is whole, without a model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchguard._files import is_temporary_name
from torchguard._public import public
from torchguard._torch import open_archive
from torchguard.checkpoint.folder import MARK, marked, sha256_of
from torchguard.checkpoint.loading import guard_load, record_fault
from torchguard.errors import DamagedFileError

METADATA = ".metadata"
_PICKLES = {".pkl", ".pickle"}  # accelerate writes its random states so
_NOT_READ = "was not read: no format that is known here"
_GIT_LFS = b"version https://git-lfs"
_METADATA_NAME = re.compile(r"(__\d+)?\.metadata(\.tmp)?")


@dataclass(frozen=True)
class CheckpointCheck:
    """What :func:`verify_checkpoint` has found; true where nothing is wrong.

    Example:
        >>> import tempfile, torch, torchguard
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torchguard.save(torch.ones(2), path)
        >>> bool(torchguard.verify_checkpoint(path))
        True
    """

    path: str
    faults: tuple[str, ...]
    """One line for each thing that is wrong: the file, and the tensors that are in the place."""
    files: int
    """How many files were read."""
    size: int
    """How many bytes they have."""
    limits: tuple[str, ...] = ()
    """What was not compared: files without checksums, of unknown formats, or in no manifest."""

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        verdict = "is NOT whole" if self.faults else "is whole"
        lines = [f"{self.path} {verdict}: {self.files} files, {self.size:,} bytes", *self.faults]
        return "\n  ".join([*lines, *self.limits])


@public
def verify_checkpoint(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> CheckpointCheck:
    """Say whether a checkpoint is whole: a folder, a ``.pt`` or a ``.safetensors`` file.

    Nothing is loaded into a model. A folder of ``checkpoint_folder(group=)`` is compared with the
    sizes and hashes in its manifest, another folder of ``torch.distributed.checkpoint`` with the
    CRC of every tensor, which does not tell shards of two saves apart. Both may lie deeper. Other
    files are compared one by one. A ``.safetensors`` file has no checksums: only its header and its
    size are compared. JSON is parsed, and a pickle (``.pkl``) is read to its end without being
    executed. ``.metadata`` of DCP is unpickled, as DCP does: verify what you trust.

    Args:
        path: a file, a folder, or a link to one.
        progress: called after each file with the bytes that were compared so far, and in all.

    Returns:
        An object that is true if the checkpoint is whole; ``.faults`` names files and tensors.

    Raises:
        TypeError: ``path`` is not a path.
        FileNotFoundError: there is nothing at ``path``.

    Cost:
        Each file is read once.

    Example:
        >>> import tempfile, torch, torchguard
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torch.save({"weight": torch.ones(2)}, path)
        >>> bool(torchguard.verify_checkpoint(path))
        True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"verify_checkpoint: path is {path!r} ({type(path).__name__}), expected the path of a "
            "file or a folder"
        )
    target = Path(path)
    if not target.exists():
        raise FileNotFoundError(f"verify_checkpoint: there is nothing at {target}")
    if target.is_dir():  # a save that lets the link lead elsewhere meanwhile changes nothing here
        target = Path(os.path.realpath(target))
    files = [target] if target.is_file() else list(_files_in(target))
    total, compared = _count(files, progress)
    faults: list[str] = []
    limits: list[str] = []
    files_left = files
    for folder in [file.parent for file in files if file.name == MARK]:
        try:
            manifest = manifest_of(folder)
        except DamagedFileError as error:
            faults.append(str(error))
            continue
        if manifest is None:
            continue
        inside = {f.relative_to(folder).as_posix(): f for f in files if f.is_relative_to(folder)}
        files_left = [file for file in files_left if file not in inside.values()]
        more = inside.keys() - {*manifest, MARK}
        limits += [f"{inside[name]} is not in the manifest" for name in sorted(more)]
        for name in manifest:
            fault = manifest_fault(folder, name, manifest)
            if fault is not None:
                faults.append(f"{folder}/{with_tensors(folder, name, fault)}")
            compared(folder / name)
        compared(*inside.values())
    faults += _of_files(files_left, limits, compared)
    known = (
        _is_of_dcp(each) or each.suffix in {".safetensors", *_PICKLES} or _is_of_torch(each)
        for each in files
    )
    if files == files_left and not any(known):
        faults.append(f"{target} holds no checkpoint of a format that is known here")
    return CheckpointCheck(str(path), tuple(faults), len(files), total, tuple(limits))


def _count(
    files: Iterable[Path], progress: Callable[[int, int], object] | None
) -> tuple[int, Callable[..., None]]:
    """Return how many bytes there are, and what tells ``progress`` that files were compared."""
    left = {file: file.stat().st_size for file in files}
    total = sum(left.values())

    def compared(*done: Path) -> None:
        for file in done:
            left.pop(file, None)
        if progress is not None:
            progress(total - sum(left.values()), total)

    return total, compared


def _files_in(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        writing = any(map(is_temporary_name, file.relative_to(folder).parts))
        if not writing and file.is_file():
            yield file


def manifest_of(folder: Path) -> Mapping[str, Any] | None:
    """Return size and hash of each file, if a group has written the folder."""
    if not (folder / MARK).exists():
        return None
    mark = marked(folder)
    files: Mapping[str, Any] | None = mark.pop("files", None)
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        entries = {(type(file["size"]), type(file["sha256"])) for file in (files or {}).values()}
        if set(mark) == {"made by", "for", "folder"} and entries <= {(int, str)}:
            return files
    raise DamagedFileError(f"{folder / MARK} does not hold what checkpoint_folder wrote")


def manifest_fault(folder: Path, name: str, manifest: Mapping[str, Any]) -> str | None:
    """Compare one file with the manifest."""
    expected = manifest.get(name)
    if expected is None:
        return f"{name} is not in the manifest of {folder}"
    try:
        size = (folder / name).stat().st_size
        if size != expected["size"]:
            return f"{name} has {size:,} bytes, expected {expected['size']:,}"
        if sha256_of(folder / name) != expected["sha256"]:
            return f"{name} does not hold what was written: its sha256 is another"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} can't be read: {error}"
    return None


def metadata_files(folder: Path) -> list[Path]:
    """Return ``.metadata``, or what ``dcp.save(use_collectives=False)`` writes for each rank."""
    common = folder / METADATA
    return [common] if common.is_file() else sorted(folder.glob(f"__*{METADATA}"))


def item_faults(
    folder: Path,
    items: Iterable[tuple[Any, Any]] | None = None,
    *,
    limits: list[str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in a folder of DCP by the CRC of each item, with the tensor's name.

    ``items`` are those of ``storage_data`` in the metadata, all by default; ``limits`` takes the
    names of files that hold no CRC.
    """
    try:
        found = _stored_items(folder) if items is None else items
        found = sorted(
            found, key=lambda e: (e[1].relative_path, e[1].offset, e[1].length, e[0].fqn)
        )
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything, or lacks a field
        yield f"{METADATA} can't be read: {type(error).__name__}: {error}", METADATA
        return
    unknown = set()
    for index, place in found:
        name = index.fqn
        if getattr(place, "transform_descriptors", None) or place.relative_path.endswith(
            ".safetensors"
        ):
            unknown.add(place.relative_path)
            continue
        try:
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = file.read(place.length)
        except OSError as error:
            yield f"{place.relative_path} can't be read ({name}): {error}", name
            continue
        if len(piece) != place.length:
            yield f"{place.relative_path} ends before {name} does", name
            continue
        fault = _fault_of(piece)
        if fault is not None:
            yield f"{place.relative_path} does not hold what was written at {name}: {fault}", name
        elif not _has_checksums(io.BytesIO(piece)):
            unknown.add(place.relative_path)
    if limits is not None:
        limits += [f"{name} has no CRC that is known here" for name in sorted(unknown)]


def _stored_items(folder: Path) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for path in metadata_files(folder):
        with path.open("rb") as file:
            found += pickle.load(file).storage_data.items()  # noqa: S301  as DCP does
    return found


def with_tensors(
    folder: Path, name: str, fault: str, items: Iterable[tuple[Any, Any]] | None = None
) -> str:
    """Add to what is wrong with a shard the tensors in it that are damaged."""
    if name.endswith(METADATA):
        return fault
    try:
        stored = _stored_items(folder) if items is None else items
        inside = [(index, place) for index, place in stored if place.relative_path == name]
        tensors = sorted({tensor for _, tensor in item_faults(folder, inside)})
    except Exception:  # noqa: BLE001  no DCP, or its metadata is damaged too
        return fault
    return f"{fault} ({', '.join(tensors)})" if tensors else fault


def _fault_of(piece: bytes) -> str | None:
    try:
        fault = record_fault(io.BytesIO(piece))
        if fault is None:
            open_archive(io.BytesIO(piece))
    except Exception as error:  # noqa: BLE001  as many kinds as the directory has fields
        return str(error) or type(error).__name__
    return fault


def _has_checksums(file: Path | io.BytesIO) -> bool:
    """Whether an archive has them; after ``set_crc32_options(False)`` torch writes zeros."""
    with zipfile.ZipFile(file) as archive:
        return all(record.CRC or not record.file_size for record in archive.infolist())


def _of_files(files: list[Path], limits: list[str], compared: Callable[..., None]) -> Iterator[str]:
    """Compare files without a manifest; those of DCP by folder, as ``.metadata`` says."""
    for folder in sorted({file.parent for file in files if _is_of_dcp(file)}):
        if not metadata_files(folder):
            yield f"{folder} has no {METADATA}: a save was stopped before its end"
        elif any(folder.glob(f"*{METADATA}.tmp")):  # DCP renames it when a save ends
            yield f"{folder} has {METADATA}.tmp: a save into it was stopped before its end"
        else:
            for fault, _ in item_faults(folder, limits=limits):
                yield f"{folder}/{fault}"
        compared(*(file for file in files if file.parent == folder and _is_of_dcp(file)))
    for file in files:
        if not _is_of_dcp(file):
            yield from _of_file(file, limits)
            compared(file)


def _is_of_dcp(file: Path) -> bool:
    return file.suffix == ".distcp" or _METADATA_NAME.fullmatch(file.name) is not None


def _is_of_torch(file: Path) -> bool:
    """Whether torch has written a file, or should have: by its name, and by what is in it."""
    if file.suffix in {".pt", ".pth", ".ckpt"}:
        return True
    with contextlib.suppress(OSError), file.open("rb") as opened:
        begins = opened.read(len(_GIT_LFS))
        if begins.startswith(b"PK\x03\x04"):
            with contextlib.suppress(zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):
                with zipfile.ZipFile(opened) as archive:
                    inside = {name.partition("/")[2] for name in archive.namelist()}
                return not inside.isdisjoint({"version", ".data/version", "data.pkl"})
            return True  # damaged, whoever wrote it
        # What a download has left in the place of a file of transformers.
        return file.suffix == ".bin" and (begins == _GIT_LFS or begins.startswith(b"<"))
    return False


def _of_file(path: Path, limits: list[str]) -> Iterator[str]:
    if path.suffix == ".safetensors" and find_spec("safetensors") is None:
        limits.append(f"{path.name} was not read: type pip install safetensors")
    elif path.suffix == ".safetensors":
        limits.append(f"{path.name}: safetensors has no checksums; header and size were compared")
        fault = _safetensors_fault(path)
        if fault is not None:
            yield f"{path} {fault}"
    elif path.name.endswith((".safetensors.index.json", ".bin.index.json")):  # of transformers
        yield from _missing_files(path)
    elif _is_of_torch(path):
        try:
            guard_load(_open)(path)
            if not _has_checksums(path):
                limits.append(f"{path.name} was saved without checksums")
        except DamagedFileError as error:
            yield str(error)
        except pickle.UnpicklingError:
            limits.append(f"{path.name}: torch's older format has no checksums")
        except RuntimeError as error:
            yield f"{path} can't be read: {error}"
    else:
        yield from _of_other_file(path, limits)


def _missing_files(index: Path) -> Iterator[str]:
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{index} is damaged: it does not list files ({error})"
        return
    missing = (name for name in named if not index.with_name(name).is_file())
    yield from (f"{index.with_name(name)} is missing; {index.name} lists it" for name in missing)


def _of_other_file(path: Path, limits: list[str]) -> Iterator[str]:
    """Look at what trainers write besides tensors."""
    if path.name == MARK:
        return  # its manifest was read
    if path.suffix == ".json":
        yield from _json_faults(path, limits)
    elif path.suffix in _PICKLES:
        yield from _pickle_faults(path, limits)
    else:
        limits.append(f"{path.name} {_NOT_READ}")


def _json_faults(path: Path, limits: list[str]) -> Iterator[str]:
    try:
        json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON Lines, which end anywhere
            limits.append(f"{path.name} {_NOT_READ}")
            return
        yield f"{path} is cut off or damaged: {error}"
    except (OSError, ValueError) as error:
        yield f"{path} can't be read: {error}"
    else:
        limits.append(f"{path.name} has no checksum; it is complete JSON")


def _pickle_faults(path: Path, limits: list[str]) -> Iterator[str]:
    """Read the opcodes of a pickle up to the last one, ``STOP``; none is executed."""
    try:
        with path.open("rb") as file:
            if file.peek(1)[:1] not in {b"\x80", b""}:  # compressed, or of a protocol before 2
                limits.append(f"{path.name} {_NOT_READ}")
                return
            more = True  # an empty file is cut off; several pickles may follow each other
            while more:
                for _, argument, _ in pickletools.genops(file):
                    if isinstance(argument, str) and argument.startswith("joblib."):
                        limits.append(f"{path.name} {_NOT_READ}")  # arrays lie between the opcodes
                        return
                more = bool(file.peek(1))
    except (OSError, ValueError) as error:
        yield f"{path} is cut off or damaged: {error}"
    else:
        limits.append(f"{path.name} has no checksum; its pickle is complete, and was not executed")


def _open(path: str | os.PathLike[str]) -> None:
    """Stand in for ``torch.load`` after the archive was compared."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise pickle.UnpicklingError  # the older format, which has no archive
    open_archive(os.fspath(path))


def _safetensors_fault(path: Path) -> str | None:
    """Let safetensors compare the header with itself and with the size of the file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  it need not be there

    try:
        with safe_open(path, "pt"):
            return None
    except SafetensorError as error:
        return f"is cut off or damaged: {error}"
