"""A file of planted defects beside those of the catalog: every end of a probe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchguard
from torchguard.defects import probes
from torchguard.defects.catalog import all_defects
from torchguard.defects.diagnosis import DefectRow, DoctorReport

PLANTED = """
import ctypes, json, os, pathlib, resource, subprocess, sys, time
from torchguard.defects.catalog import Defect, NotRunHere

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
def crashes_guarded(): ctypes.string_at(0)
def not_run_guarded(): raise NotRunHere("only the bare run works here")
def raises_guarded(): raise OSError("nothing to see")
def still_open(): return "still 5"
def or_given(probe): return lambda given=probe: given()

def planted(name, probe, **more):
    return Defect(id=f"planted-{name}", summary=f"planted: {name}", upstream=(), family="memory",
                  probe=or_given(probe), **more)

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
    planted("closed", segfault, guards=CHECK, guarded_with=absent),
    planted("detected", segfault, guards=CHECK, guarded_with=absent, only_detects=True,
            limits="look before you read"),
    planted("open", live, guards=CHECK, guarded_with=still_open),
    planted("detects-nothing", live, guards=CHECK, guarded_with=still_open, only_detects=True),
    planted("guarded-crash", live, guards=CHECK, guarded_with=crashes_guarded),
    planted("guarded-not-run", live, guards=CHECK, guarded_with=not_run_guarded),
    planted("guarded-raises", live, guards=CHECK, guarded_with=raises_guarded),
    planted("no-such-guard", live, guards=("no-such-guard",)),
]
globals().update((each.id, each) for each in DEFECTS)
"""

# What each interpreter runs first, if it finds it.
STARTED = """
from torchguard.defects import probes
probes.__path__.append({folder!r})
"""


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Add the file in ``folder`` to the catalog, for this process and those it starts."""
    (folder / "planted.py").write_text(PLANTED)
    (folder / "sitecustomize.py").write_text(STARTED.format(folder=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "__path__", [*probes.__path__, str(folder)])
        path = [str(folder), os.environ.get("PYTHONPATH", "")]
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield
        sys.modules.pop(f"{probes.__name__}.planted", None)


STEPS: list[DefectRow] = []
"""What ``progress`` was called with for the report of every planted defect."""


def examined() -> DoctorReport:
    """Probe every planted defect once; probes that hang take seconds, and wait together."""
    names = [row.id for row in all_defects() if row.id.startswith("planted-")]
    return torchguard.doctor(names, timeout=12, jobs=4, progress=STEPS.append)


def planted(*names: str) -> list[str]:
    """Return the identifiers of planted defects."""
    return [f"planted-{name}" for name in names]


def row(report: DoctorReport, name: str) -> DefectRow:
    """Return the row of a planted defect."""
    (found,) = (row for row in report.rows if row.id == f"planted-{name}")
    return found


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder in which the file is, and in which its probes leave others."""
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def with_planted(planted_folder: Path) -> Iterator[Path]:
    """Have the planted defects in the catalog in the tests of a file."""
    with installed(planted_folder):
        yield planted_folder


@pytest.fixture(scope="session")
def report(planted_folder: Path) -> DoctorReport:
    """Give the doctor's report of every planted defect: it takes half a minute, once."""
    with installed(planted_folder):
        return examined()
