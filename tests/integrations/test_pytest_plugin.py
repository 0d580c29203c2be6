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

from support.child_process import run_python

SUITE = """
    import numpy as np
    import pytest
    import torch

    kept = []

    class Model(torch.nn.Linear):
        pass

    def test_resize():
        tensor = torch.from_numpy(np.zeros(4))
        try:
            tensor.resize_(5, 5)
        except RuntimeError:
            shape = tuple(tensor.shape)
            tensor.set_(torch.ones(1, dtype=torch.float64))
            assert shape == (4,)

    def test_out():
        out = torch.from_numpy(np.zeros(0))
        try:
            torch.add(torch.ones(3, dtype=torch.float64), 1, out=out)
        except RuntimeError:
            shape = tuple(out.shape)
            out.set_(torch.ones(1, dtype=torch.float64))
            assert shape == (0,)

    def test_leaves_it_behind():
        kept.append(Model(3, 3))
        kept[0].weight.untyped_storage().resize_(0)

    def test_innocent():
        assert kept

    def breaks():
        kept.append(torch.ones(3))
        kept[-1].untyped_storage().resize_(0)

    def test_skips_in_the_middle():
        breaks()
        pytest.skip()

    def test_after_a_skip():
        pass

    @pytest.fixture
    def skips():
        breaks()
        pytest.skip()

    def test_whose_fixture_skips(skips):
        pass

    def test_after_a_fixture_that_skips():
        pass

    def test_fails_for_another_reason():
        breaks()
        raise KeyError("another reason")

    def test_after_a_failure():
        pass

    def test_cleans_up():
        broken = torch.ones(3)
        broken.untyped_storage().resize_(0)

    def test_shifts():
        x = torch.arange(8.0)[::2]
        before = x.clone()
        try:
            x[1:] = x[:-1]
        except UserWarning:
            assert x.equal(before)  # nothing is written where it is an error
            raise

    def test_reads_other_elements():
        x = torch.arange(8.0)
        x[::2] += x[1::2]
"""
Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(SUITE))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if "PYTEST" in name]:
        monkeypatch.delenv(name)

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        # By name, because in a bare checkout there is no entry point that names it.
        plugin = ("-p", "no:torchguard", "-p", "pytest_torchguard", "-p", "no:cacheprovider")
        program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
        return run_python(program, "-ra", *plugin, *options)

    return run


def failed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The tests that failed."""
    lines = done.stdout.splitlines()
    names = [line.partition("::")[2].partition(" ")[0] for line in lines if "FAILED" in line[:6]]
    return sorted(name.removeprefix("test_") for name in names)


def test_off(run: Run) -> None:
    """Without --torchguard it changes nothing, and imports neither torch nor torchguard."""
    assert failed(run()) == ["fails_for_another_reason", "out", "resize"]
    program = "import sys, pytest_torchguard; print({'torch', 'torchguard'} & set(sys.modules))"
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_default(run: Run) -> None:
    """--torchguard installs the default guard, and fails the test that leaves a broken tensor.

    Under xdist too.
    """
    done = run("--torchguard", "-n", "1")
    assert "torchguard: installed resize\n" in done.stdout
    assert failed(done) == ["fails_for_another_reason", "leaves_it_behind", "out"]
    assert "torchguard: the test leaves an inconsistent tensor behind: obj" in done.stdout
    assert "shape (3, 3)" in done.stdout
    assert "36 bytes needed, the storage holds 0" in done.stdout
    assert "fails_for_another_reason - KeyError" in done.stdout


def test_named(run: Run) -> None:
    """--torchguard=NAMES installs those guards; --torchguard-overlap one that raises."""
    done = run("--torchguard=resize, out", "--torchguard-overlap")
    assert "torchguard: installed resize, out, overlap" in done.stdout
    assert failed(done) == ["fails_for_another_reason", "leaves_it_behind", "shifts"]
    assert "FAILED test_it.py::test_shifts - torchguard" in done.stdout, done.stdout
    alone = ["fails_for_another_reason", "leaves_it_behind", "out", "resize", "shifts"]
    assert failed(run("--torchguard-overlap")) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--torchguard=resise"], "'resise'"),
        (["--torchguard", "test_it.py"], "write --torchguard=resize test_it.py"),
    ],
)
def test_no_guard(run: Run, options: list[str], message: str) -> None:
    """A guard that does not exist is a usage error, which says so when it was a path."""
    done = run(*options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--torchguard: " in done.stderr
    assert message in done.stderr
    assert "resize" in done.stderr
