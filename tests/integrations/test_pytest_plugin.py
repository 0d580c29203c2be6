"""``pytest --torchguard``: guards for a whole session; who leaves a broken tensor behind fails."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from typing import Any, TypeAlias

import pytest

from support.child_process import run_command, started

pytestmark = pytest.mark.slow

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

    def test_fails_for_another_reason():
        breaks()
        raise KeyError("another reason")

    def test_after_a_failure():
        pass

    def test_shifts():
        x = torch.arange(8.0)[::2]
        before = x.clone()
        try:
            x[1:] = x[:-1]
        except UserWarning:
            assert x.equal(before)  # nothing is written where it is an error
            raise
"""
SESSIONS = {
    "off": [],
    "default": ["--torchguard", "-p", "xdist", "-n", "1"],
    "named": ["--torchguard=resize, out,overlap", "-W", "error::torchguard.OverlapWarning"],
    "misspelled": ["--torchguard=resise"],
    "a path": ["--torchguard", "test_it.py"],
}

Sessions: TypeAlias = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """What each session returned and printed, by name."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_it.py").write_text(textwrap.dedent(SUITE))
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading the others takes a second
    # By name, because in a bare checkout there is no entry point that names the plug-in.
    start = [sys.executable, "-m", "pytest", "-ra", "-p", "pytest_torchguard"]
    start += ["-p", "no:cacheprovider"]
    options: Any = {"cwd": folder, "env": environment, "stderr": subprocess.STDOUT}
    with contextlib.ExitStack() as all_of_them:
        running = {
            name: all_of_them.enter_context(started([*start, *arguments], **options))
            for name, arguments in SESSIONS.items()
        }
        printed = {name: each.communicate()[0] for name, each in running.items()}
    return {name: (each.returncode, printed[name]) for name, each in running.items()}


def failed(printed: str) -> list[str]:
    """The tests that failed."""
    lines = printed.splitlines()
    names = [line.partition("::")[2].partition(" ")[0] for line in lines if "FAILED" in line[:6]]
    return sorted(name.removeprefix("test_") for name in names)


def test_off(sessions: Sessions) -> None:
    """Without --torchguard it changes nothing, and imports neither torch nor torchguard."""
    assert failed(sessions["off"][1]) == ["fails_for_another_reason", "out", "resize"]
    program = "import sys, pytest_torchguard; print({'torch', 'torchguard'} & set(sys.modules))"
    line = [sys.executable, "-c", program]
    assert run_command(line).stdout == "set()\n"


def test_default(sessions: Sessions) -> None:
    """--torchguard installs the default guard, and fails the test that leaves a broken tensor.

    Under xdist too.
    """
    _, printed = sessions["default"]
    assert "torchguard: installed resize\n" in printed
    assert failed(printed) == ["fails_for_another_reason", "leaves_it_behind", "out"]
    assert "torchguard: the test leaves an inconsistent tensor behind: obj" in printed
    assert "shape (3, 3)" in printed
    assert "36 bytes needed, the storage holds 0" in printed
    assert "fails_for_another_reason - KeyError" in printed


def test_named(sessions: Sessions) -> None:
    """--torchguard=NAMES installs those guards; a warning of overlap can be an error."""
    _, printed = sessions["named"]
    assert "torchguard: installed resize, out, overlap" in printed
    assert failed(printed) == ["fails_for_another_reason", "leaves_it_behind", "shifts"]
    assert "FAILED test_it.py::test_shifts - torchguard" in printed, printed


@pytest.mark.parametrize(
    ("name", "message"),
    [("misspelled", "'resise'"), ("a path", "write --torchguard=resize test_it.py")],
)
def test_no_guard(sessions: Sessions, name: str, message: str) -> None:
    """A guard that does not exist is a usage error, which says so when it was a path."""
    code, printed = sessions[name]
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--torchguard: " in printed
    assert message in printed
    assert "resize" in printed
