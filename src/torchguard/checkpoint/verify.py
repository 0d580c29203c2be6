"""verify_checkpoint(): whether a checkpoint on the disk is whole, without a model."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchguard._public import public
from torchguard.checkpoint.folder import MARK, marked
from torchguard.checkpoint.loading import guard_load
from torchguard.errors import DamagedFileError

METADATA = ".metadata"
_METADATA_NAME = re.compile(r"(__\d+)?\.metadata(\.tmp)?")
_CHUNK = 1 << 20
_MARKED_AS_FOLDER = 0x10
_HEADER_SIZE = 8
_OLDER_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # a pickled number
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "C64": 64}

Read = Callable[[int], object]
"""Called with the number of bytes that were read, for progress."""


@dataclass(frozen=True)
class CheckpointCheck:
    """What :func:`verify_checkpoint` has found; true where nothing is wrong."""

    path: str
    faults: tuple[str, ...]
    """One line for each thing that is wrong: the file, and the tensors that are in the place."""
    files: int
    """How many files were read."""
    size: int
    """How many bytes they have."""
    limits: tuple[str, ...] = ()
    """What can't be known, because the file holds no checksum and there is no manifest."""

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
    size and sha256 of each file in its manifest; a folder of ``torch.distributed.checkpoint``
    without one, which may lie deeper, by the CRC that ``torch.save`` has put into every tensor,
    which does not tell shards of two saves apart; other folders file by file. A ``.safetensors``
    file has no checksums: only its header and its size are compared.
    Of a folder of DCP ``.metadata`` is unpickled, as DCP does: verify what you trust.

    Args:
        path: a file, a folder, or a link to one.
        progress: called with the bytes read so far and those in all.

    Returns:
        An object that is true if the checkpoint is whole; ``.faults`` names files and tensors.

    Raises:
        FileNotFoundError: there is nothing at ``path``.

    Example:
        >>> import tempfile, torch, torchguard
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torch.save({"weight": torch.ones(2)}, path)
        >>> bool(torchguard.verify_checkpoint(path))
        True
    """
    target = Path(path)
    if not target.exists():
        raise FileNotFoundError(f"verify_checkpoint: there is nothing at {target}")
    files = [target] if target.is_file() else [f for f in target.rglob("*") if f.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    done, total = 0, sum(sizes.values())

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    limits: list[str] = []
    manifest = None if target.is_file() else manifest_of(target)
    if manifest is not None:
        faults = [
            _with_tensors(target, name, fault)
            for name in manifest
            if (fault := manifest_fault(target, name, manifest, read)) is not None
        ]
        known = {*manifest, MARK}
        limits += [
            f"{name} is not in the manifest"
            for file in files
            if (name := file.relative_to(target).as_posix()) not in known
        ]
    else:
        faults = list(_of_files(files, limits, read))
        if not any(map(_is_known, files)):
            faults.append(f"{target} holds no checkpoint of a format that is known here")
    return CheckpointCheck(str(path), tuple(faults), len(files), total, tuple(limits))


def manifest_of(folder: Path) -> Mapping[str, Any] | None:
    """Return size and hash of each file, if a group has written the folder."""
    files = marked(folder).get("files")
    return files if isinstance(files, dict) else None


def manifest_fault(
    folder: Path, name: str, manifest: Mapping[str, Any], read: Read = lambda _: None
) -> str | None:
    """Compare one file with the manifest."""
    expected = manifest.get(name)
    if expected is None:
        return f"{name} is not in the manifest of {folder}"
    try:
        size = (folder / name).stat().st_size
        if size != expected["size"]:
            return f"{name} has {size:,} bytes, expected {expected['size']:,}"
        if sha256_of(folder / name, read) != expected["sha256"]:
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
    read: Read = lambda _: None,
    limits: list[str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Compare the tensors and objects in a folder of DCP with their CRC.

    Args:
        folder: with ``.metadata``.
        items: indices and places, as in ``storage_data`` of the metadata; all by default.
        read: for progress.
        limits: takes the names of files that hold no CRC.

    Yields:
        What is wrong, and the name of the tensor or the object.
    """
    if items is None:
        try:
            items = _stored_items(folder)
        except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
            yield f"{METADATA} can't be read: {type(error).__name__}: {error}", METADATA
            return
    unknown = set()
    for index, place in sorted(items, key=lambda e: (e[1].relative_path, e[1].offset)):
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
        read(len(piece))
        if len(piece) != place.length:
            yield f"{place.relative_path} ends before {name} does", name
        elif (fault := _zip_fault(io.BytesIO(piece))) is not None:
            yield f"{place.relative_path} does not hold what was written at {name}: {fault}", name
    if limits is not None:
        limits += [f"{name} has no CRC that is known here" for name in sorted(unknown)]


def sha256_of(path: Path, read: Read = lambda _: None) -> str:
    """Return the hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest()


def _stored_items(folder: Path) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for path in metadata_files(folder):
        with path.open("rb") as file:
            found += pickle.load(file).storage_data.items()  # noqa: S301  as DCP does
    return found


def _with_tensors(folder: Path, name: str, fault: str) -> str:
    """Add to what is wrong with a shard the tensors in it that are damaged."""
    if name.endswith(METADATA):
        return fault
    try:
        inside = [(i, place) for i, place in _stored_items(folder) if place.relative_path == name]
        tensors = sorted({tensor for _, tensor in item_faults(folder, inside)})
    except Exception:  # noqa: BLE001  no DCP, or its metadata is damaged too
        return fault
    return f"{fault} ({', '.join(tensors)})" if tensors else fault


def _zip_fault(file: io.BytesIO) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.external_attr & _MARKED_AS_FOLDER:
                    return f"{record.filename} is marked as a folder"
                # torch.serialization.set_crc32_options(False) writes zeros.
                with archive.open(record) as contents:
                    while record.CRC and contents.read(_CHUNK):
                        pass
    except Exception as error:  # noqa: BLE001  zipfile raises four kinds, by the byte
        return str(error) or type(error).__name__
    return None


def _of_files(files: list[Path], limits: list[str], read: Read) -> Iterator[str]:
    """Compare files without a manifest; those of DCP by folder, as ``.metadata`` says."""
    for folder in sorted({file.parent for file in files if _is_of_dcp(file)}):
        if not metadata_files(folder):
            yield f"{folder} has no {METADATA}: a save was stopped before its end"
        elif any(folder.glob(f"*{METADATA}.tmp")):  # DCP renames it when a save ends
            yield f"{folder} has {METADATA}.tmp: a save into it was stopped before its end"
        else:
            yield from (fault for fault, _ in item_faults(folder, read=read, limits=limits))
    for file in files:
        if not _is_of_dcp(file):
            yield from _of_file(file, limits, read)


def _is_of_dcp(file: Path) -> bool:
    return file.suffix == ".distcp" or _METADATA_NAME.fullmatch(file.name) is not None


def _is_known(file: Path) -> bool:
    return _is_of_dcp(file) or file.suffix == ".safetensors" or _is_of_torch(file)


def _is_of_torch(file: Path) -> bool:
    if file.suffix in {".pt", ".pth", ".bin", ".ckpt", ".tar"} or zipfile.is_zipfile(file):
        return True
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_OLDER_MAGIC)) == _OLDER_MAGIC
    return False


def _of_file(path: Path, limits: list[str], read: Read) -> Iterator[str]:
    if path.suffix == ".safetensors":
        limits.append(f"{path.name}: safetensors has no checksums; header and size were compared")
        fault = _safetensors_fault(path)
        if fault is not None:
            yield f"{path} {fault}"
    elif path.name.endswith(".index.json"):  # transformers' list of the files of a large model
        yield from _missing_files(path)
    elif _is_of_torch(path):
        try:
            guard_load(_has_no_checksums)(path)
        except DamagedFileError as error:
            yield str(error)
        except _NoChecksumsError:
            limits.append(f"{path.name}: torch's older format has no checksums")
    else:
        limits.append(f"{path.name} was not read: no format that is known here")
    read(path.stat().st_size)


def _missing_files(index: Path) -> Iterator[str]:
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        yield f"{index} is damaged: it does not list files ({error})"
        return
    missing = (name for name in sorted(named) if not index.with_name(name).is_file())
    yield from (f"{index.with_name(name)} is missing; {index.name} lists it" for name in missing)


class _NoChecksumsError(Exception):
    pass


def _has_no_checksums(path: str | os.PathLike[str]) -> None:
    """Stand in for ``torch.load`` after the archive was compared."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise _NoChecksumsError


def _safetensors_fault(path: Path) -> str | None:
    """Compare the header with itself and with the size of the file.

    https://github.com/huggingface/safetensors#format
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_SIZE), "little")
        if size < _HEADER_SIZE or length > size - _HEADER_SIZE:
            return f"is cut off in its header, after {size:,} bytes"
        try:
            header = json.loads(file.read(length))
            tensors = sorted(
                ((*each["data_offsets"], name, each) for name, each in header.items()
                 if name != "__metadata__"), key=lambda each: each[:3],
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"is damaged: its header is not what was written ({error})"
    end, data = 0, size - _HEADER_SIZE - length
    for begin, stop, name, each in tensors:
        bits = _BITS.get(each["dtype"]) or int("".join(filter(str.isdigit, each["dtype"]))[:2])
        bits = 8 if each["dtype"].startswith("F8") else bits
        if begin != end or (stop - begin) * 8 != math.prod(each["shape"]) * bits:
            return f"is damaged: the header gives {name} another place than its size"
        if stop > data:
            return f"is cut off: {name} ends at byte {stop:,}, the file holds {data:,} of them"
        end = stop
    return None if end == data else f"has {data - end:,} bytes after its last tensor"
