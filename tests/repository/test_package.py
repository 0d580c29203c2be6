"""What people install: wheel and source distribution hold everything, and work without ``src/``."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import torchguard
from support.child_process import run_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torchguard", "pytest_torchguard")


def build(source: Path, target: Path, *kinds: str) -> dict[str, Path]:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    line = [sys.executable, "-m", "build", "--no-isolation", *kinds, "-o", str(target), str(source)]
    done = run_command(line, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.suffix: path for path in target.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both from the checkout."""
    return build(ROOT, tmp_path_factory.mktemp("dist"), "--sdist", "--wheel")


@pytest.fixture(scope="module")
def installed(dist: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own, with nothing that it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--quiet", "--target", str(folder))
    line = [sys.executable, "-m", "pip", "install", *options, str(dist[".whl"])]
    assert run_command(line).returncode == 0
    return folder


def modules_in(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith(tuple(f"{each}/" for each in PACKAGES))}


def test_wheel(dist: dict[str, Path]) -> None:
    """The wheel holds every file of the packages, and names what they import."""
    with zipfile.ZipFile(dist[".whl"]) as wheel:
        held = modules_in(wheel.namelist())
        [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        required = re.findall(
            r"^Requires-Dist: ([\w-]+)[^;\n]*$", wheel.read(metadata).decode(), re.MULTILINE
        )
    assert sorted(required) == ["numpy", "torch", "typing-extensions", "wrapt"]
    there = {
        str(path.relative_to(ROOT / "src"))
        for package in PACKAGES
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there
    assert "torchguard/py.typed" in held


def test_source_distribution(dist: dict[str, Path], tmp_path: Path) -> None:
    """It is whole, and builds the same bytes again: in another folder, at another time."""
    shutil.unpack_archive(dist[".gz"], tmp_path)
    [source] = tmp_path.iterdir()
    files = ("tests/repository/test_package.py", "docs/conf.py", "CONTRIBUTING.md", "SECURITY.md")
    for name in files:
        assert (source / name).exists(), name
        (source / name).touch()
    again = build(source, tmp_path / "again", "--sdist", "--wheel")
    for kind, path in dist.items():
        assert path.read_bytes() == again[kind].read_bytes(), path.name


def test_changelog() -> None:
    """The changelog has a section for this version, or one head for what is not released."""
    version = torchguard.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{version}]" in changes or changes.count("\n## ") == changes.count(
        "\n## [Unreleased]"
    )


def run_installed(installed: Path, *arguments: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    line = [sys.executable, *arguments]
    done = run_command(line, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installed(installed: Path, tmp_path: Path) -> None:
    """The installed package works without the checkout."""
    program = f"""
import numpy as np, torch, torchguard
assert torchguard.__file__.startswith({str(installed)!r}), torchguard.__file__
torchguard.install("resize", "out")
tensor = torch.from_numpy(np.zeros(4))
try:
    tensor.resize_(5, 5)
except RuntimeError:
    print(tuple(tensor.shape))
"""
    assert run_installed(installed, "-c", program, folder=tmp_path) == "(4,)\n"
    shown = run_installed(installed, "-m", "torchguard", "--version", folder=tmp_path)
    # The version is written in one place; the installed metadata has it from there.
    [metadata] = installed.glob("torchguard_runtime-*.dist-info")
    assert shown == f"torchguard {metadata.name.split('-')[1].removesuffix('.dist')}\n"


def test_pytest_plugin(installed: Path, tmp_path: Path) -> None:
    """pytest finds the plug-in of the installed package."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    shown = run_installed(
        installed, "-m", "pytest", "--torchguard", "-p", "no:cacheprovider", folder=tmp_path
    )
    assert "torchguard: installed resize" in shown
    assert "1 passed" in shown
