"""Memory really runs out while a tensor grows in the middle of a training run.

Each row is a process of its own whose memory is limited. Between its steps a cache is resized to
twice its size, or is the ``out=`` of an operator, until torch raises. Then: do the cache and a view
of it still say what they hold, in the same place, with the same elements? And do the remaining
steps give the parameters, bit for bit, of a run in which nothing grew?
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchguard
from benchmarks.harness import Scope, installed
from benchmarks.processes import in_a_process
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table
from torchguard.rollback.consistency import is_consistent

Resize = Callable[[torch.Tensor, int], Any]

MIB = 2**20
# What has to hold of the cache afterwards: its description, its memory, its view, its next resize.
WHOLE = (
    *("consistent", "same_shape", "same_memory", "same_elements", "view_consistent"),
    *("grows_again", "training_equal"),
)
BEGIN = MIB // 4  # elements of the cache: 1 MiB
STEPS_AFTER = 20
OUT = 'install("out"), out='
WAYS = ("plain torch", "safe_resize_()", "install()", "guarded()", OUT)
SCOPES: dict[str, Scope] = {
    "install()": installed("resize"),
    "guarded()": torchguard.guarded,
    OUT: installed("out"),
}
# Beyond what the process has when it begins. On a GPU the share is of the whole card.
ALLOWED = {"cpu": 1024 * MIB, "cuda": 4096 * MIB}
ALLOWED_QUICK = {"cpu": 192 * MIB, "cuda": 256 * MIB}
# Two runs of the same steps give the same bits on a GPU too: cuBLAS's own condition.
# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Training:
    """A small network on one device; the same steps always give the same parameters."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.done = 0

    def step(self) -> None:
        """Train on the next batch (8, 16)."""
        generator = torch.Generator().manual_seed(self.done)
        device = next(self.model.parameters()).device
        x = torch.randn(8, 16, generator=generator).to(device)
        self.optimizer.zero_grad()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.done += 1


def limit(device: str, allowed: int) -> None:
    """Let this process have so many bytes more, and no more."""
    if device == "cuda":
        torch.cuda.init()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
        return
    import resource  # noqa: PLC0415 - POSIX only

    now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = now * resource.getpagesize() + allowed
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def ended(way: str, device: str, allowed: int) -> dict[str, Any]:
    """Train and grow in this process until memory has run out, and look at what is left."""
    torch.set_num_threads(1)
    training, undisturbed = Training(device), Training(device)
    training.step()  # what is loaded lazily
    cache = torch.arange(BEGIN, dtype=torch.float32, device=device)
    view = cache[: BEGIN // 2]
    with SCOPES.get(way, contextlib.nullcontext)():
        others: dict[str, Resize] = {"safe_resize_()": torchguard.safe_resize_, OUT: _computes_into}
        resize = others.get(way, torch.Tensor.resize_)  # as it is in the scope
        limit(device, allowed)
        found = _until_it_fails(training, cache, view, resize)
        # Less than there was: a tensor that describes its memory can be given any size again.
        grows_again = found["consistent"]
        if grows_again:
            with contextlib.suppress(RuntimeError):
                resize(cache, BEGIN)
            grows_again = cache.numel() == BEGIN and is_consistent(cache)
        for _ in range(STEPS_AFTER):
            training.step()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    while undisturbed.done < training.done:
        undisturbed.step()
    pairs = zip(training.model.parameters(), undisturbed.model.parameters(), strict=True)
    found["grows_again"] = grows_again
    found["training_equal"] = all(torch.equal(ours, other) for ours, other in pairs)
    whole = all(found[name] for name in WHOLE)
    return {**found, "verdict": "nothing lost" if whole else "the cache is lost"}


def _computes_into(cache: torch.Tensor, elements: int) -> torch.Tensor:
    """Let an operator resize its output; what it writes are the elements that were there."""
    return torch.arange(elements, dtype=cache.dtype, device=cache.device, out=cache)


def _until_it_fails(
    training: Training, cache: torch.Tensor, view: torch.Tensor, resize: Resize
) -> dict[str, Any]:
    elements = cache.numel()
    while True:
        training.step()
        before, asked = cache.data_ptr(), 2 * elements
        try:
            resize(cache, asked)
        except RuntimeError as caught:
            error = type(caught).__name__
            break
        elements = asked
    consistent = is_consistent(cache)
    expected = torch.arange(BEGIN, dtype=torch.float32, device=cache.device)
    return {
        "error": error,
        "asked_bytes": asked * cache.element_size(),
        "says_bytes": cache.numel() * cache.element_size(),
        "holds_bytes": cache.untyped_storage().nbytes(),
        "consistent": consistent,
        "same_shape": tuple(cache.shape) == (elements,),
        "same_memory": cache.untyped_storage().data_ptr() == before,
        # None where to read them could end the process.
        "same_elements": bool(torch.equal(cache[:BEGIN], expected)) if consistent else None,
        "view_consistent": is_consistent(view),
    }


def run(setting: Setting) -> Results:
    """Run every way in a process of its own."""
    quick, allowed = setting.quick, (ALLOWED_QUICK if setting.quick else ALLOWED)[setting.device]

    def found(way: str) -> Any:
        call = "bench_out_of_memory", "ended", way, setting.device, allowed
        return in_a_process(*call, environment=DETERMINISTIC, quick=quick)

    cases = (
        ({"way": way, "allowed_bytes": allowed}, partial(found, way))
        for way in (WAYS[:2] if quick else WAYS)
    )
    return {"rows": setting.collect(cases)}


BENCHMARK = Benchmark(
    "out_of_memory",
    "When memory really runs out while a tensor grows: is the tensor whole, does training go on?",
    run,
    rounds=1,
    tables=(
        Table(
            {
                "resized by": "{way}",
                "allowed": "{allowed_bytes:bytes}",
                "fails with": "{error} at {asked_bytes:bytes}",
                "says and has": "{says_bytes:bytes} of {holds_bytes:bytes}",
                "same memory": "{same_memory:yes}",
                "same elements": "{same_elements:yes}",
                "can be resized after": "{grows_again:yes}",
                "training equals a run without": "{training_equal:yes}",
                "then": "{verdict}",
            }
        ),
    ),
)
