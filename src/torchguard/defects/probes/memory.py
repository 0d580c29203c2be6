"""Memory that is used as it must not be: numpy's or a file's, read-only, out of bounds."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchguard.defects.catalog import NotRunHere
from torchguard.defects.probes import compile_defect, issues, memory_defect, share


@memory_defect(
    "a tensor made from a read-only array writes to immutable memory or crashes",
    title="writes to read-only numpy memory, or a crash",
    upstream=issues(46741, 5442),
    guards=("numpy",),
    advice="Copy what is read-only: torch.from_numpy(a if a.flags.writeable else a.copy()).",
)
def numpy_readonly() -> str | None:
    """Write through a tensor into a bytes object; a write to a read-only mapping is a SIGSEGV."""
    immutable = bytes(bytearray(b"immutable"))  # an object of its own, no interned constant
    with suppress(RuntimeError, ValueError, TypeError):
        torch.from_numpy(np.frombuffer(immutable, dtype=np.uint8)).fill_(ord("x"))
    if immutable == b"immutable":
        return None
    return f"fill_ changed an immutable bytes object to {immutable!r}"


@memory_defect(
    "t.numpy() dangles after share_memory_(), a queue put or a spawned DataLoader",
    title="t.numpy() dangles after t.share_memory_()",
    upstream=issues(51849),
    guards=("numpy",),
    advice="Call t.share_memory_() before t.numpy(), or keep t.numpy().copy().",
)
def numpy_view_share() -> str | None:
    """Share a tensor and see whether the memory under its array still has an owner."""
    share(torch.ones(1))
    # Memory of numpy's, because its end of life can be watched.
    owner = np.ones(1000, dtype=np.float32)
    address = owner.ctypes.data
    owner_is_alive = weakref.ref(owner)
    t = torch.from_numpy(owner)
    view = t.numpy()
    del owner
    try:
        t.share_memory_()
    except RuntimeError:
        return None  # refused: the memory stays where the array looks
    if view.ctypes.data != address or owner_is_alive() is not None:
        return None
    return "share_memory_() freed the memory that t.numpy() still points at"


_MAPPING_SIZE = 16 * mmap.PAGESIZE


@memory_defect(
    "torch.frombuffer lets go of the buffer: close() or clear() frees a live tensor",
    title="closing the buffer frees a tensor's memory",
    guards=("numpy",),
    advice="Write torch.frombuffer(memoryview(buffer), ...): then close() raises BufferError.",
)
def frombuffer_lifetime() -> str | None:
    """Close a mapping under a tensor, map other memory, and read the tensor.

    ``torch.frombuffer`` keeps the object and releases its buffer, so ``close()`` finds no user. The
    same hazard elsewhere: https://github.com/numpy/numpy/issues/9537
    https://github.com/python/cpython/issues/102349
    """
    mapping = mmap.mmap(-1, _MAPPING_SIZE)
    mapping[:] = b"\x01" * _MAPPING_SIZE
    t = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        mapping.close()
    except BufferError:  # what a live memoryview brings about
        return None
    # The kernel puts a mapping of the same size where the closed one was; where it
    # does not, reading the tensor faults.
    other = mmap.mmap(-1, _MAPPING_SIZE)
    other[:] = b"\x02" * _MAPPING_SIZE
    seen = int(t[-1])
    return None if seen == 1 else "after mmap.close() the tensor reads another mapping's memory"


def _is_intact(path: Path, saved: Tensor) -> bool:
    try:
        return torch.equal(torch.load(path, weights_only=True), saved)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        return False


@memory_defect(
    "torch.load(mmap=True), then torch.save to the same path: crash, checkpoint lost",
    title="saving over an mmapped file: Bus error, file lost",
    upstream=("https://github.com/meta-pytorch/torchtune/issues/1018",),
    guards=("save",),
    advice="Save to a temporary file in the same folder, then os.replace() it over the old one.",
)
def mmap_load_save() -> str | None:
    """Load and save one checkpoint in a child process and see what is left of both."""
    if not hasattr(os, "fork"):
        raise NotRunHere("no fork on this system")
    saved = torch.ones(2**18)  # 1 MiB: many pages
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save(saved, path)
        child = os.fork()
        if child == 0:
            try:
                torch.save(torch.load(path, mmap=True, weights_only=True), path)
            finally:
                os._exit(0)  # without the parent's clean-up
        _, status = os.waitpid(child, 0)
        if _is_intact(path, saved):
            return None
        left = path.stat().st_size
    end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an exception"
    return f"torch.save ended in {end}; {left} bytes are left of the checkpoint"


def _by_memory_behind(compute: Callable[[float], float], sentence: str) -> str | None:
    """Compute twice: only memory that must not be read is different; None if it is not read."""
    try:
        found = compute(1.0), compute(2.0)
    except (RuntimeError, IndexError, ValueError):
        return None
    read = found[0] != found[1]
    return f"{sentence.format(*found)}, by the memory behind" if read else None


_CLASSES = 3


def _loss(beyond: float) -> float:
    """Return the loss of a target one past the last class, with -2 ``beyond`` in memory there."""
    # T = 2 steps, N = 1 sequence; the classes are the first columns of a wider tensor, so
    # the read out of bounds lands in memory of ours.
    memory = torch.full((2, 1, 2 * _CLASSES), -1.0)
    memory[..., _CLASSES:] = -2 * beyond
    log_probs = memory[..., :_CLASSES]
    lengths = torch.tensor([2]), torch.tensor([1])
    return functional.ctc_loss(log_probs, torch.tensor([[_CLASSES]]), *lengths).item()


@memory_defect(
    "ctc_loss on CPU does not check targets: a loss from out-of-bounds memory, or a crash",
    title="ctc_loss reads out-of-bounds memory, or crashes",
    upstream=issues(193794),
    guards=("checks",),
    advice="Check targets first: assert 0 <= targets.min() and targets.max() < log_probs.size(-1).",
)
def ctc_target() -> str | None:
    """Compute one loss with a target slightly out of range; one far out kills the process."""
    return _by_memory_behind(_loss, "target 3 of classes 0 to 2: loss {:.3g} or {:.3g}")


_COLUMNS = 3


def _product(beyond: float) -> float:
    """Return a (1, 3) @ (3, 1) product whose column index is 3, with ``beyond`` in memory there."""
    # The dense factor is the start of a longer tensor, so the read out of bounds lands in
    # memory of ours.
    memory = torch.zeros(4 * _COLUMNS, 1)
    memory[_COLUMNS:] = beyond
    sparse = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([_COLUMNS]), torch.ones(1), size=(1, _COLUMNS)
    )
    return (sparse @ memory[:_COLUMNS]).item()


@memory_defect(
    "sparse CSR indices are not checked: a product reads out of bounds",
    title="sparse product reads out-of-bounds memory",
    upstream=issues(190045, 141004, 195547),
    guards=("checks",),
    advice="Build sparse tensors under `with torch.sparse.check_sparse_tensor_invariants():`.",
)
def csr_unchecked() -> str | None:
    """Compute one product with a column index past the last column."""
    return _by_memory_behind(_product, "column 3 of columns 0 to 2: product {:g} or {:g}")


def _call_checked_operators(
    selected: Tensor, added: Tensor, copied: Tensor, chance: Tensor
) -> tuple[Tensor, ...]:
    rows = torch.ones(3, 2)
    return (
        rows.index_select(0, selected),
        rows.index_add(0, added, rows[:1]),
        rows.index_copy(0, copied, rows[:1]),
        functional.binary_cross_entropy(chance, torch.ones(1)),
    )


@compile_defect(
    "compiled: index -1 or a probability of 1.5 gives a value where eager raises",
    title="an index of -1 gives a value where eager raises",
    upstream=issues(197554, 183608, 151918, 169779, 185885, 182965),
    guards=("checks",),
    advice="Check indices and probabilities before they enter the compiled function.",
)
def checks_lost() -> str | None:
    """Call each operator with the one input that eager rejects.

    Inductor's decompositions leave out what the eager kernels check: an index of -1 is the last
    row, and the test of the range of ``binary_cross_entropy`` is a comment.
    """
    first, last = torch.tensor([0]), torch.tensor([-1])
    valid = [first, first.clone(), first.clone(), torch.tensor([0.5])]
    invalid = [last, last.clone(), last.clone(), torch.tensor([1.5])]
    compiled = torch.compile(_call_checked_operators)
    compiled(*valid)  # a failing compilation must not pass for a check that is kept
    lost = []
    names = "index_select", "index_add", "index_copy", "binary_cross_entropy"
    for position, name in enumerate(names):
        inputs = [*valid[:position], invalid[position], *valid[position + 1 :]]
        if _raises(_call_checked_operators, inputs) and not _raises(compiled, inputs):
            lost.append(name)
    return f"accepted where eager raises: {', '.join(lost)}" if lost else None


def _raises(function: Callable[..., object], inputs: list[Tensor]) -> bool:
    try:
        function(*inputs)
    except (IndexError, RuntimeError):
        return True
    return False


def _divide(dividend: Tensor, divisor: Tensor) -> tuple[Tensor, ...]:
    truncated = torch.div(dividend, divisor, rounding_mode="trunc")
    return dividend // divisor, dividend % divisor, truncated


@compile_defect(
    "compiled on CPU: an integer division by a zero element kills the process",
    title="integer division by zero kills the process",
    upstream=issues(143649, 183610, 178013),
    guards=("checks",),
    advice="Replace zeros first: divisor = torch.where(divisor == 0, 1, divisor).",
)
def int_div_zero() -> str | None:
    """Divide by zero: eager raises, and inductor's bare C++ operators trap on x86 (SIGFPE).

    Since 2.13 ``//`` and ``%`` look at the divisor first; ``rounding_mode="trunc"`` does not.
    """
    try:
        results = torch.compile(_divide)(torch.tensor([7]), torch.tensor([0]))
    except RuntimeError as error:
        if "ZeroDivisionError" in str(error):  # as eager raises
            return None
        raise
    floored, remainder, truncated = (result.item() for result in results)
    return f"compiled: 7 // 0 = {floored}, 7 % 0 = {remainder}, 7 / 0 = {truncated}; eager raises"
