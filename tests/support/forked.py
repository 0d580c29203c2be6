"""A process that has imported torch, and forks one for each program: an import takes a second.

What a program sees is what it would see after its own ``import torch``: nothing else of torch's
(no Dynamo, no torchguard) is imported before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["can_fork", "run"]

# The program is the last thing that the forked process does, at the top of its main module: it ends
# as any other, with its exit handlers and the threads that it waits for.
_SERVER = """
import json, os, sys
import gc, torch
gc.freeze()
_ = status = None
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(json.dumps([child, os.waitstatus_to_exitcode(status)]), flush=True)
else:
    os._exit(0)
os.setpgid(0, 0)
for number, name in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["cwd"])
sys.argv, sys.path[0] = asked["argv"], asked["path"]
if asked["file"] != "<string>":
    __file__ = asked["file"]
_code = compile(asked["source"], asked["file"], "exec")
del _, gc, json, os, sys, torch, line, child, status, asked, number, name
exec(globals().pop("_code"), globals())
"""

_server: subprocess.Popen[str] | None = None


def _kept(environment: dict[str, str]) -> dict[str, str]:
    """Return what torch or Python read when they start."""
    names = ("PYTHON", "TORCH", "OMP_", "MKL_", "LD_", "PYTORCH")
    return {name: value for name, value in environment.items() if name.startswith(names)}


_started_with = _kept(dict(os.environ))


def can_fork() -> bool:
    """Whether a forked process would be as one that starts now."""
    return sys.platform == "linux" and _kept(dict(os.environ)) == _started_with


def _start() -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    return _server


def run(
    source: str, arguments: tuple[str, ...], *, file: Path | None = None, timeout: float = 480
) -> subprocess.CompletedProcess[str]:
    """Run a program; as ``python -c``, or as ``python file`` where it has one."""
    server = _start()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        asked = {
            "source": source,
            "argv": ["-c" if file is None else str(file), *arguments],
            "file": "<string>" if file is None else str(file),
            "path": "" if file is None else str(file.parent),
            "cwd": str(Path.cwd()),
            "environment": {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": ""},
            "out": str(out),
            "err": str(err),
        }
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        ready, _, _ = select.select([server.stdout], [], [], timeout)
        if not ready:
            server.kill()
            raise subprocess.TimeoutExpired(["a forked program"], timeout)
        child, status = json.loads(server.stdout.readline())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind
        return subprocess.CompletedProcess(
            ["python", *asked["argv"]], status, out.read_text(), err.read_text()
        )
