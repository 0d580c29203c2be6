"""``pytest --torchguard``: guards for a whole session; who leaves a broken tensor behind fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

SUITE = """
    import numpy as np
    import torch
    import torchguard

    kept = []

    def shape_after_a_failed_resize():
        tensor = torch.from_numpy(np.zeros(4))
        kept.append(tensor)
        try:
            tensor.resize_(5, 5)
        except RuntimeError:
            return tuple(tensor.shape)

    def shape_after_a_failed_add():
        out = torch.from_numpy(np.zeros(0))
        kept.append(out)
        try:
            torch.add(torch.ones(3, dtype=torch.float64), 1, out=out)
        except RuntimeError:
            return tuple(out.shape)

    def test_resize():
        assert shape_after_a_failed_resize() == (4,)

    def test_out():
        assert shape_after_a_failed_add() == (0,)
"""
BREAKS = """
    import torch

    class Model(torch.nn.Linear):
        pass

    kept = []

    def test_leaves_it_behind():
        kept.append(Model(3, 3))
        kept[0].weight.untyped_storage().resize_(0)

    def test_innocent():
        assert kept

    def test_cleans_up():
        broken = torch.ones(3)
        broken.untyped_storage().resize_(0)

    def test_fails_for_another_reason():
        kept.append(torch.ones(3))
        kept[1].untyped_storage().resize_(0)
        raise KeyError("another reason")
"""
Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(suite: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(textwrap.dedent(suite))
        # By name, because in a bare checkout there is no entry point that names it.
        plugin = ("-p", "no:torchguard", "-p", "pytest_torchguard", "-p", "no:cacheprovider")
        line = (sys.executable, "-m", "pytest", "-ra", *plugin, str(tmp_path), *options)
        environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        return subprocess.run(
            line, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    return run


def test_off(run: Run) -> None:
    """Without --torchguard it changes nothing."""
    done = run(SUITE)
    assert "2 failed" in done.stdout
    assert "(5, 5) == (4,)" in done.stdout


def test_default(run: Run) -> None:
    """--torchguard installs the default guard."""
    done = run(SUITE, "--torchguard")
    assert "torchguard: installed resize" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED test_it.py::test_out" in done.stdout


def test_named(run: Run) -> None:
    """--torchguard=NAMES installs those guards."""
    done = run(SUITE, "--torchguard=resize, out")
    assert "torchguard: installed resize, out" in done.stdout
    assert "2 passed" in done.stdout, done.stdout
    assert done.returncode == 0


def test_unknown(run: Run) -> None:
    """A guard that does not exist is a usage error."""
    done = run(SUITE, "--torchguard=resise")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--torchguard: " in done.stderr
    assert "'resise'" in done.stderr
    assert "resize" in done.stderr


def test_path(run: Run) -> None:
    """The error says so when a path was taken for a guard."""
    done = run(SUITE, "--torchguard", "test_it.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "write --torchguard=resize test_it.py" in done.stderr


def test_broken_tensor(run: Run) -> None:
    """The test that leaves a broken tensor behind fails, and no other."""
    assert "3 passed" in run(BREAKS).stdout
    done = run(BREAKS, "--torchguard")
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "FAILED test_it.py::test_leaves_it_behind" in done.stdout
    assert "torchguard: the test leaves an inconsistent tensor behind: obj" in done.stdout
    assert "shape (3, 3)" in done.stdout
    assert "36 bytes needed, the storage holds 0" in done.stdout
    assert "FAILED test_it.py::test_fails_for_another_reason - KeyError" in done.stdout


def test_xdist(run: Run) -> None:
    """It works under xdist."""
    done = run(BREAKS, "--torchguard", "-n", "2")
    assert "FAILED test_it.py::test_leaves_it_behind" in done.stdout
    assert "torchguard: the test leaves an inconsistent tensor behind" in done.stdout


def test_import() -> None:
    """The plug-in imports neither torch nor torchguard."""
    program = "import sys, pytest_torchguard; print({'torch', 'torchguard'} & set(sys.modules))"
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


OVERLAPS = """
    import torch

    def test_shifts():
        x = torch.arange(8.0)[::2]
        before = x.clone()
        try:
            x[1:] = x[:-1]
        finally:
            assert x.equal(before)  # nothing is written where it is an error

    def test_innocent():
        x = torch.arange(8.0)
        x[::2] += x[1::2]
"""


def test_overlap(run: Run) -> None:
    """--torchguard-overlap fails the test that reads what it writes, and no other."""
    assert "OverlapWarning" not in run(OVERLAPS).stdout
    done = run(OVERLAPS, "--torchguard-overlap")
    assert "torchguard: installed overlap" in done.stdout, done.stderr
    assert "FAILED test_it.py::test_shifts - torchguard" in done.stdout, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    both = run(OVERLAPS, "--torchguard", "--torchguard-overlap")
    assert "torchguard: installed resize, overlap" in both.stdout, both.stderr
