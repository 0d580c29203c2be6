"""Run a program in a Python of its own: for what may crash, or has to start clean."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from support import forked

if TYPE_CHECKING:
    from pathlib import Path


def run_python(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``program``; modules in ``folder`` can be imported, and it is written there as a file.

    Torch is imported already where that can be, but with ``fresh=True``.
    """
    source = textwrap.dedent(program)
    if not fresh and forked.can_fork():
        path = None if folder is None else folder / "program.py"
        if path is not None:
            path.write_text(source)
        return forked.run(source, arguments, file=path)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": ""}
    start: tuple[str, ...] = ("-c", source)
    if folder is not None:
        # A program that spawns workers has to be a file.
        path = folder / "program.py"
        path.write_text(source)
        start = (str(path),)
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=480,
    )


def output_of(
    program: str, *arguments: str, folder: Path | None = None, fresh: bool = False
) -> str:
    """Return what ``program`` prints; it has to end well."""
    done = run_python(program, *arguments, folder=folder, fresh=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_file(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is there as a file, as :func:`run_python` runs its source."""
    if forked.can_fork():
        return forked.run(path.read_text(encoding="utf-8"), arguments, file=path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=480,
    )


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


def run_ranks(program: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """Run a program on some ranks, given rank, port and count; return the JSON each prints last.

    The program is written to ``folder``, with the line by which a rank ends.
    """
    path = folder / "rank.py"
    path.write_text(f"{textwrap.dedent(program)}\n{END_RANK}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(path), str(rank), port, str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        ended = [rank.communicate(timeout=480) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]
