"""A plug-in of planted defects: every end of a probe, and every fault of a plug-in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchguard
from torchguard.defects import all_defects
from torchguard.defects.diagnosis import DoctorReport, Row

PLANTED = """
import ctypes, json, os, pathlib, resource, subprocess, sys, time
from torchguard.defects import Defect, NotRunHere

HERE = pathlib.Path(__file__).parent

def absent(): return None
def live(): return "two plus two was 5"
def noisy():
    print('{"kind": "absent", "text": ""}', flush=True)
    os.write(1, b'{"kind": "absent"}')
    os.write(2, b"bytes that are no text: \\xff\\xfe")
    return "printed a verdict and meant another"
def segfault(): ctypes.string_at(0)
def abort(): os.abort()
def quits(): os._exit(3)
def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "hanging").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
def leaves_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "left").write_text(str(child.pid))
def leaves_a_fork():
    pid = os.fork()
    if pid == 0: time.sleep(600)
    (HERE / "forked").write_text(str(pid))
def hangs_closed():
    os.closerange(0, 256)
    time.sleep(600)
def not_run(): raise NotRunHere("needs two moons")
def raises():
    print("on the way to the error")
    raise KeyError("the probe's own fault")
def exits(): sys.exit(0)
def true(): return True
def limits(): return f"core files of {resource.getrlimit(resource.RLIMIT_CORE)[0]} bytes"
def switches():
    return json.dumps({name: os.environ.get(name) for name in
                       ("TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")})
def installed():
    import torchguard
    return None if "resize" in torchguard.installed() else "the guard is off"
def in_scope():
    import numpy, torch
    t = torch.from_numpy(numpy.ones(4))
    try: t.unsqueeze_(0).resize_(5, 5)
    except RuntimeError: pass
    return None if tuple(t.shape) == (1, 4) else f"shape is {tuple(t.shape)}"
def closed_when_called(): return None
def still_open(): return "still 5"
def crashes_guarded(): ctypes.string_at(0)
def not_run_guarded(): raise NotRunHere("only the bare run works here")
def raises_guarded(): raise OSError("nothing to see")

def planted(name, probe, **more):
    return Defect(id=f"planted-{name}", summary=f"planted: {name}", upstream=(), family="memory",
                  probe=probe, **more)

CHECK = ("check_consistent",)  # a guard that is called by the probe itself
DEFECTS = [
    planted("absent", absent), planted("live", live, advice="count again"),
    planted("noisy", noisy), planted("segfault", segfault), planted("abort", abort),
    planted("quits", quits), planted("hang", hang), planted("leaves-a-child", leaves_a_child),
    planted("leaves-a-fork", leaves_a_fork), planted("hangs-closed", hangs_closed),
    planted("not-run", not_run, guards=CHECK), planted("raises", raises, guards=CHECK),
    planted("exits", exits), planted("true", true), planted("limits", limits),
    planted("switches", switches),
    planted("absent-with-guard", absent, guards=("resize",)),
    planted("installed", installed, guards=("resize",)),
    planted("in-scope", in_scope, guards=("resize", "out")),
    planted("closed", segfault, guards=CHECK, guarded_probe=closed_when_called),
    planted("detected", segfault, guards=CHECK, guarded_probe=closed_when_called,
            only_detects=True, limits="look before you read"),
    planted("open", live, guards=CHECK, guarded_probe=still_open),
    planted("detects-nothing", live, guards=CHECK, guarded_probe=still_open, only_detects=True),
    planted("guarded-crash", live, guards=CHECK, guarded_probe=crashes_guarded),
    planted("guarded-not-run", live, guards=CHECK, guarded_probe=not_run_guarded),
    planted("guarded-raises", live, guards=CHECK, guarded_probe=raises_guarded),
    planted("no-such-guard", live, guards=("no-such-guard",)),
]
SINGLE = planted("single", absent)
AGAIN = planted("live", absent)
NOT_ONE = "a text is no defect"
WRONG = [planted("wrong-guards", absent, guards="resize"), planted("wrong-probe", "absent")]
"""

ENTRY_POINTS = """
[torchguard.defects]
a-planted = planted:DEFECTS
b-single = planted:SINGLE
c-again = planted:AGAIN
d-not-one = planted:NOT_ONE
e-missing = no_such_module_anywhere:DEFECT
f-exits = planted_exit:DEFECT
g-wrong = planted:WRONG
"""


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write what makes importlib.metadata believe that a package is installed in ``folder``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install the plug-in in ``folder``, for this process and those it starts."""
    (folder / "planted.py").write_text(PLANTED)
    (folder / "planted_exit.py").write_text("print('noise'); import sys; sys.exit('bye')")
    if not list(folder.glob("*.dist-info")):
        distribution(folder, "planted", "1.0", ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        path = [str(folder), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield
        for name in ("planted", "planted_exit"):
            sys.modules.pop(name, None)


STEPS: list[Row] = []
"""What ``progress`` was called with for the report of every planted defect."""


def examined() -> DoctorReport:
    """Probe every planted defect once; probes that hang take seconds, and wait together."""
    prefixes = ("planted-", "c-", "d-", "e-", "f-", "g-")
    names = [row.id for row in all_defects() if row.id.startswith(prefixes)]
    return torchguard.doctor(names, timeout=12, jobs=4, progress=STEPS.append)


def planted(*names: str) -> list[str]:
    """Return the identifiers of planted defects."""
    return [f"planted-{name}" for name in names]


def only(*names: str) -> list[str]:
    """Return the options of the command line that choose planted defects."""
    return [part for name in planted(*names) for part in ("--only", name)]


def row(report: DoctorReport, name: str) -> Row:
    """Return the row of a planted defect."""
    (found,) = (row for row in report.rows if row.id == f"planted-{name}")
    return found


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder in which the plug-in is, and in which its probes leave files."""
    return tmp_path_factory.mktemp("plugin")


@pytest.fixture(scope="module")
def plugin(planted_folder: Path) -> Iterator[Path]:
    """Install the plug-in for the tests of a file."""
    with installed(planted_folder):
        yield planted_folder


@pytest.fixture(scope="session")
def report(planted_folder: Path) -> DoctorReport:
    """Give the doctor's report of every planted defect: it takes half a minute, once."""
    with installed(planted_folder):
        return examined()
