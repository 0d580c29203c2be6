"""What Inductor has compiled in this process, to save it and to load it.

``torch.compiler.save_cache_artifacts`` keeps graphs and Triton kernels. It leaves out the C++
kernels, so on a CPU everything hits the cache and the C++ compiler still runs for each kernel,
which is most of the time (measured on 2.13: 26 runs for a small transformer). They are shared
libraries below Inductor's cache folder, named by a hash of source and command, and are kept too:
https://github.com/pytorch/pytorch/blob/main/torch/_inductor/codecache.py
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import platform
import secrets
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

__all__ = ["load_artifacts", "save_artifacts"]

_SMALL_SOURCE = 4096  # bytes


def save_artifacts() -> tuple[dict[str, Any] | None, str | None]:
    """Return all that Inductor has compiled or loaded in this process, and why it can't be.

    Both are None where nothing was compiled.
    """
    save: Any = getattr(torch.compiler, "save_cache_artifacts", None)
    if save is None:
        return None, (
            f"torch {torch.__version__} has no torch.compiler.save_cache_artifacts, which 2.7 and "
            "later have"
        )
    saved = save()
    if saved is None:
        return None, None
    libraries = {
        str(path.relative_to(folder)): _encoded(path.read_bytes())
        for folder in _cache_folders()
        for path in (*_mapped_libraries(folder), *_instruction_checks(folder))
    }
    return {"artifacts": _encoded(saved[0]), "machine": _machine(), "libraries": libraries}, None


def load_artifacts(saved: Mapping[str, Any]) -> str | None:
    """Put what :func:`save_artifacts` returned into Inductor's caches; return why it can't be.

    torch unpickles it, and the libraries are code.
    """
    load: Any = getattr(torch.compiler, "load_cache_artifacts", None)
    if load is None:
        return f"torch {torch.__version__} has no torch.compiler.load_cache_artifacts"
    try:
        artifacts = _decoded(saved["artifacts"])
        libraries = {_relative(name): _decoded(each) for name, each in saved["libraries"].items()}
        machine = saved["machine"]
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        return f"it is damaged ({error!r})"
    if load(artifacts) is None:
        return "torch can't read it"
    if libraries and machine != _machine():
        # Compiled with -march=native: another CPU may not know an instruction, and another
        # libc may not have a function.
        return "it is from another machine, so kernels in C++ are compiled again"
    for folder in _cache_folders():
        for name, content in libraries.items():
            _write_if_missing(folder / name, content)
    return None


def _encoded(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode("ascii")


def _decoded(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".so":
        raise ValueError(f"{name!r} is no library in the cache")
    return name


def _cache_folders() -> list[Path]:
    """Return Inductor's cache folder, or nothing where torch does not say."""
    for name in (
        "torch._inductor.runtime.cache_dir_utils",
        "torch._inductor.runtime.runtime_utils",
    ):
        with contextlib.suppress(ImportError):
            folder = getattr(importlib.import_module(name), "cache_dir", None)
            if folder is not None:
                return [Path(folder())]
    return []


def _mapped_libraries(folder: Path) -> list[Path]:
    """Return the libraries below a folder that this process runs, on Linux."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    # address, permissions, offset, device, inode, path
    paths = {parts[5] for parts in (line.split(maxsplit=5) for line in lines) if len(parts) > 5}  # noqa: PLR2004
    found = (Path(path) for path in sorted(paths) if path.endswith(".so"))
    return [path for path in found if folder in path.parents]


def _instruction_checks(folder: Path) -> list[Path]:
    """Return the libraries with which Inductor tries whether the CPU has an instruction.

    It compiles four of them in each process whose cache has none, and loads them in another one.
    https://github.com/pytorch/pytorch/blob/main/torch/_inductor/cpu_vec_isa.py
    """
    small = (path for path in folder.glob("??/*.cpp") if path.stat().st_size < _SMALL_SOURCE)
    found = (path for path in small if b"_chk_kernel" in path.read_bytes())
    return [path.with_suffix(".so") for path in found if path.with_suffix(".so").exists()]


def _write_if_missing(target: Path, content: bytes) -> None:
    """Write a library in one step: another process may be looking for it."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{secrets.token_hex(6)}")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.replace(target)


def _machine() -> str:
    """Return what a library that was compiled for this very machine depends on."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = ("model name", "flags", "Features", "CPU part")
        flags = "\n".join(sorted({line for line in lines if line.startswith(told)}))
    known = [platform.machine(), *platform.libc_ver(), platform.python_version(), flags]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:24]
