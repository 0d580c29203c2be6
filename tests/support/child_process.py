"""Run a program in a Python of its own: for what may crash, or has to start clean.

Where that can be, the program runs in a fork of a process that has imported torch: an import takes
a second. What it sees is what it would see after its own ``import torch``: nothing else of torch's
(no Dynamo, no torchguard) is imported before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

_TIMEOUT = 480  # seconds

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


def _read_at_start() -> dict[str, str]:
    """Return what torch or Python read of the environment when they start."""
    names = ("PYTHON", "TORCH", "OMP_", "MKL_", "LD_", "PYTORCH")
    # Read when a program imports the compiler, and set by inductor in a process that has compiled.
    later = ("TORCHINDUCTOR_", "TORCHDYNAMO_")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(names) and not name.startswith(later)
    }


_STARTED_WITH = _read_at_start()


def run_python(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``program``; modules in ``folder`` can be imported, and it is written there as a file.

    Torch is imported already where that can be, but with ``fresh=True``.
    """
    global _server
    source = textwrap.dedent(program)
    start, file, path = ["-c", source], "<string>", ""
    if folder is not None:  # a program that spawns workers has to be a file
        file, path = str(folder / "program.py"), str(folder)
        start = [file]
        Path(file).write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": ""}
    if fresh or sys.platform != "linux" or _read_at_start() != _STARTED_WITH:
        line = [sys.executable, *start, *arguments]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, env=environment, timeout=_TIMEOUT
        )
    if _server is None or _server.poll() is not None:
        line = [sys.executable, "-W", "ignore", "-c", _SERVER]
        _server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert _server.stdin is not None
    assert _server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        argv = [start[0], *arguments]
        asked = {
            "source": source, "argv": argv, "file": file, "path": path, "cwd": str(Path.cwd()),
            "environment": environment, "out": out.name, "err": err.name,
        }  # fmt: skip
        _server.stdin.write(json.dumps(asked) + "\n")
        _server.stdin.flush()
        ready, _, _ = select.select([_server.stdout], [], [], _TIMEOUT)
        if not ready:
            # The program, with what it has started; a kernel may not list it.
            with contextlib.suppress(OSError):
                listed = Path(f"/proc/{_server.pid}/task/{_server.pid}/children")
                for child in listed.read_text().split():
                    os.killpg(int(child), signal.SIGKILL)
            _server.kill()
            raise subprocess.TimeoutExpired(["a forked program"], _TIMEOUT)
        child, status = json.loads(_server.stdout.readline())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind
        printed, errors = out.read().decode(), err.read().decode()
        return subprocess.CompletedProcess(["python", *argv], status, printed, errors)


def output_of(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> str:
    """Return what ``program`` prints; it has to end well."""
    done = run_python(program, *arguments, folder=folder, fresh=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# How a rank ends. Gloo's threads may hold tensors that Python knows; one that frees such a tensor
# while the interpreter finalizes ends the process with "terminate called without an active
# exception", whether or not the group was destroyed: DDP and Dynamo's cache keep it alive.
# https://github.com/pytorch/pytorch/issues/190489, https://github.com/pytorch/pytorch/pull/179291
END_RANK = "import os, sys; sys.stdout.flush(); os._exit(0)"


JOIN_RANKS = """
import datetime, json, os, sys
import torch
import torch.distributed as dist

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
world_size, timeout = int(sys.argv[3]), datetime.timedelta(seconds=120)
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
"""
"""How a program for :func:`run_ranks` begins."""


# What the program imports of torch is imported once, before the ranks fork; the rest, such as a
# launcher, may read the environment that a rank sets.
_FORK_RANKS = """
import ast, contextlib, os, sys
_, path, port, count = sys.argv
sys.path[0] = os.path.dirname(path)
with open(path) as stream:
    source = stream.read()
for each in ast.parse(source).body:
    if isinstance(each, (ast.Import, ast.ImportFrom)) and "torch" in ast.unparse(each):
        with contextlib.suppress(ImportError):  # a rank may expect that
            exec(compile(ast.Module([each], []), path, "exec"), {})
children = []
for rank in range(int(count)):
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    ended = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    print(ended)
    sys.exit(any(ended))
for number, name in ((1, "out"), (2, "err")):
    file = os.open(f"{path}.{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, number)
sys.argv, __file__ = [path, str(rank), port, count], path
_code = compile(source, path, "exec")
del ast, contextlib, os, sys, path, port, count, stream, source, each, children, rank, child
del number, name, file
exec(globals().pop("_code"), globals())
"""


def run_ranks(program: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """Run a program on some ranks, given rank, port and count; return the JSON each prints last.

    The program is written to ``folder``, with the line by which a rank ends.
    """
    path = folder / "rank.py"
    path.write_text(f"{textwrap.dedent(program)}\n{END_RANK}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    leader = run_python(_FORK_RANKS, str(path), port, str(count))
    errors = [each.read_text() for each in sorted(folder.glob("rank.py.*.err"))]
    assert leader.returncode == 0, [leader.stdout, leader.stderr, *errors]
    outputs = (Path(f"{path}.{rank}.out").read_text() for rank in range(count))
    return [json.loads(output.splitlines()[-1]) for output in outputs]
