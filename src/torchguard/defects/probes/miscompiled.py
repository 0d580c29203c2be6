"""Programs that torch.compile gets wrong; their docstrings say in which step of the compiler."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchguard import verified
from torchguard.defects.catalog import NotRunHere
from torchguard.defects.probes import compile_defect, issues

_Program = Callable[..., Any]
_Compile = Callable[[_Program], _Program]

_miscompiled = partial(compile_defect, guards=("verified",))


def _difference(program: _Program, run: Callable[[_Program], Tensor]) -> str | None:
    """Compare the tensor that ``run`` returns of a program, eager and compiled."""
    eager, compiled = run(program), run(torch.compile(program))
    if torch.equal(eager, compiled):
        return None
    return f"compiled gives {compiled.tolist()} where eager gives {eager.tolist()}"


def _argument_after_it(make: Callable[[], Tensor]) -> Callable[[_Program], Tensor]:
    """Call the program on a tensor and return what it has made of it."""

    def run(program: _Program) -> Tensor:
        values = make()
        program(values)
        return values

    return run


def _argument_after_an_update_of_the_result(program: _Program) -> Tensor:
    """Update the result in place; the argument changes with it only if they share memory."""
    values = torch.zeros(4)
    program(values).add_(1.0)
    return values


# --- an input that is read and written


@_miscompiled(
    "compiled: an index write into x, then an update that reads x flipped, goes wrong",
    title="a write, then a flipped read, gives wrong values",
    upstream=issues(198270, 198033),
    advice="Compute out of place (y = x.index_copy(0, rows, new); return y + y.flip(0)) "
    "and copy the result into x outside the compiled function.",
)
def permuted_read() -> str | None:
    """Write at indices, then add the flipped tensor, which becomes one loop with the copy into x.

    Inductor's scheduler looks for the reads under the name of the input, but after the index write
    the same memory has the name of that write (``Scheduler.fusable_weak_dep``). In-place foreach
    operators do the same by another way.
    """

    def program(values: Tensor) -> None:
        values[torch.arange(4)] = values * 2
        values.add_(values.flip(0))

    return _difference(program, _argument_after_it(lambda: torch.arange(4.0)))


@_miscompiled(
    "compiled: an in-place update through F.dropout(x, training=False) is lost",
    title="a write through F.dropout is lost",
    upstream=issues(195422),
    advice="Update the input itself, not what F.dropout returned.",
)
def mutation_dropped() -> str | None:
    """Add 1 through the dropout, which is the input itself; AOTAutograd traces a clone."""

    def program(values: Tensor) -> None:
        functional.dropout(values, 0.5, training=False).add_(1)

    return _difference(program, _argument_after_it(lambda: torch.zeros(2)))


@_miscompiled(
    "compiled: a clone taken between two writes to x holds both of them",
    title="x.clone() holds a later write",
    upstream=issues(198094, 198131),
    advice="Compute out of place (y = x.index_fill(0, row, 1)) "
    "and copy the result into x outside the compiled function.",
)
def overwritten() -> str | None:
    """Return a clone taken between two writes, which inductor removes as a no-op.

    The reinplacing pass computes the first write in the input's own memory, because a later
    ``copy_`` writes that anyway. A functional ``slice_scatter`` ends the same way, and so does a
    swap of two tensors by way of a clone.
    """

    def program(values: Tensor) -> Tensor:
        values[0] = 1
        between = values.clone()
        values[1] = 2
        return between

    return _difference(program, lambda program: program(torch.zeros(4)))


@_miscompiled(
    "compiled: a value read through a dtype view is computed after a later write",
    title="a value read through view(dtype) is a later one",
    upstream=issues(198101),
    advice="Write the tensor that was viewed outside the compiled function.",
)
def dtype_view() -> str | None:
    """Read through a dtype view, then fill the base: the read comes after the write.

    Where the element sizes differ, the result of ``aten.view.dtype`` has a name of its own. Before
    inductor writes an input it computes what is pending on the input's name
    (``GraphLowering.mark_buffer_mutated``), and what is pending on the view's name later.
    """

    def program(values: Tensor) -> Tensor:
        halves = values.view(torch.int16) * 2
        halves.add_(4)
        values.fill_(7)
        return halves.view(torch.int32)

    return _difference(
        program, lambda program: program(torch.zeros(2, dtype=torch.int32)).view(torch.int16)
    )


@_miscompiled(
    "compiled: a write into an expanded view, or at an index given twice, is wrong",
    title="x[idx] += v with equal indices is wrong",
    upstream=issues(188084, 183986, 175791, 174074, 138908, 197582),
    advice="Write x = x.index_put((index,), x[index] + 1) for x[index] += 1, and clone() an "
    "expanded view before writing into it.",
)
def expand_duplicate() -> str | None:
    """Overwrite the first of 3 rows that are one in memory; add 1 to the first two counts.

    Inductor drops the copy of ``index_put`` in two cases too many: for an expanded view, up to 2.13
    (``can_inplace`` in ``torch/_inductor/fx_passes/reinplace.py``), and up to 2.15 for an index
    that occurs twice, where reads and writes become one loop (in 2.6 everywhere: issue 138908).
    """

    def program(row: Tensor, counts: Tensor) -> Tensor:
        rows = (row * 2).expand(3, 2).index_put((torch.tensor([0]),), row)
        counts[torch.arange(4) % 2] += 1  # 0, 1, 0, 1
        return rows

    def run(program: _Program) -> Tensor:
        counts = torch.arange(4.0)
        return torch.cat([program(torch.ones(1, 2), counts).flatten(), counts])

    return _difference(program, run)


# --- a result that shares memory with the argument


@_miscompiled(
    "compiled: x * 1, x + 0 and x / 1.0 return the input itself",
    title="x * 1 returns x itself; a write changes x",
    upstream=issues(197893),
    advice="Call .clone() on the result outside the compiled function before updating it in place.",
)
def noop_aliases() -> str | None:
    """Return ``logits / 1.0``, which compiled is ``logits`` itself and no new tensor.

    Since 2.14 ``remove_no_ops`` (``torch/_inductor/fx_passes/joint_graph.py``) takes Python numbers
    as neutral elements too, and does not ask whether that makes an output an alias of an input.
    """

    def program(logits: Tensor) -> Tensor:
        return logits / 1.0

    return _difference(program, _argument_after_an_update_of_the_result)


@_miscompiled(
    "compiled: the returned copy is the updated input itself, even through .clone()",
    title="the returned clone is the input itself",
    upstream=issues(195451),
    advice="Call .clone() on the result outside the compiled function before updating it in place.",
)
def result_aliases() -> str | None:
    """Write into the argument and return a copy, which compiled is the argument.

    Inductor carries the update out in the input's own memory (``reinplace_inplaceable_ops`` in
    ``torch/_inductor/fx_passes/reinplace.py``), then replaces the written value by the input
    everywhere, also where the function returns it; a ``clone()`` in between is gone by then
    (``remove_noop_ops`` in ``post_grad.py``).
    """

    def program(x: Tensor) -> Tensor:
        x[0] = 1.0
        return x.clone()

    return _difference(program, _argument_after_an_update_of_the_result)


# --- a kernel that leaves something out

# N images, C channels, P pixels
_N, _C, _P = 2, 4, 9
_KEEP = 20  # two channels, and 2 pixels of the third


@_miscompiled(
    "compiled on CPU: BatchNorm, flatten and a cropping F.pad leave memory unwritten",
    title="conv, BatchNorm and crop return garbage",
    upstream=issues(195582),
    advice="Crop outside the compiled function, or to a whole number of channels.",
)
def bn_crop() -> str | None:
    """Compare a compiled crop (N, C, P) -> (N, KEEP) with the eager one.

    ``CppScheduling.try_loop_split`` splits the flattened loop into ``size // pixels`` blocks and
    drops the remainder. Slicing does it as well, and any other per-channel value.
    """
    norm = torch.nn.BatchNorm1d(_C).eval().requires_grad_(requires_grad=False)

    def crop(images: Tensor) -> Tensor:
        return functional.pad(norm(images).flatten(1), (0, _KEEP - _C * _P))

    images = torch.randn(_N, _C, _P, generator=torch.Generator().manual_seed(0))
    # Compiled first: no memory that eager has freed can hold the right values by chance.
    compiled = torch.compile(crop)(images)
    wrong = ~torch.isclose(compiled, crop(images))
    if not wrong.any():
        return None
    return f"{int(wrong.sum())} of {wrong.numel()} elements are uninitialised memory"


def _on_gpu(program: _Program) -> Tensor:
    if not torch.cuda.is_available():
        raise NotRunHere("needs a CUDA GPU")
    # Inductor sums 8192 elements to a partial sum: 2 of them, and 2 bounds.
    bounds: Tensor = program(torch.ones(1, 16384, dtype=torch.bool, device="cuda"))
    return bounds


@_miscompiled(
    "compiled, GPU: F.pad of a long sum loses its fill value (flash attention cu_seqlens)",
    title="F.pad of a sum loses its fill value",
    upstream=issues(189895),
    advice="Write torch.cat([ends.new_zeros(1), ends]) instead of F.pad(ends, (1, 0)).",
)
def pad_reduction() -> str | None:
    """Return where each sequence of a batch begins and ends (B + 1) from its mask (B, T).

    A long sum is split in two kernels. Where the second one pads too, it reads the sum from a
    register, but ``TritonOverrides.masked`` (``torch/_inductor/codegen/triton.py``) leaves the fill
    value to a masked load: wrong from 2.8 to 2.13, for one sequence of 8193 to 16384 tokens.
    """

    def program(mask: Tensor) -> Tensor:
        ends = mask.sum(dim=-1, dtype=torch.int32).cumsum(dim=0, dtype=torch.int32)
        return functional.pad(ends, (1, 0))

    return _difference(program, _on_gpu)


def _verified(program: _Program, backend: str = "eager") -> _Program:
    checked = verified(program, backend=backend)

    def call(x: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checked(x)

    return call


# --- a backward that fails, and a compiled one that goes through


def _no_code(program: _Program) -> _Program:
    return torch.compile(program, backend="aot_eager")


class _Doubled(torch.autograd.Function):
    """Writes the gradient that it is given, which sum() has expanded from one number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004 - torch's signature
        return gradient.mul_(2)


@_miscompiled(
    "compiled: a backward that writes an expanded gradient gives wrong numbers, and no error",
    title="a write into an expanded gradient spreads",
    upstream=issues(81417),
    guarded_with=partial(_verified, backend="aot_eager"),
    advice="Clone the gradient in backward before you write it.",
    limits="Guarded, backward raises what eager raises.",
)
def expanded_gradient(compile_: _Program = _no_code) -> str | None:
    """Double a gradient in place all of whose elements are one in memory: eager raises.

    AOTAutograd traces the backward with a gradient that has memory for each element, and then runs
    it on the expanded one.
    """
    x = torch.ones(3, requires_grad=True)
    try:
        compile_(lambda x: _Doubled.apply(x).sum())(x).backward()  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - of eager, or of a torch that refuses to compile it
        return None
    return f"eager raises, and the compiled gradient is {[] if x.grad is None else x.grad.tolist()}"


# --- dropout whose mask is drawn again


def _masks_that_differ(compile_: _Compile, program: _Program) -> str | None:
    x = torch.ones(4096, requires_grad=True)
    result = compile_(program)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    different = int(((result != 0) != (gradient != 0)).sum())
    if not different:
        return None
    return (
        f"{different} of {x.numel()} elements have a gradient and are dropped, or none and are not"
    )


@_miscompiled(
    "compiled with activation_memory_budget below 1: the backward draws another mask of dropout",
    title="backward draws other dropout masks",
    upstream=issues(190758),
    advice="Leave torch._functorch.config.activation_memory_budget at 1, and checkpoint blocks.",
)
def recomputed_masks() -> str | None:
    """Train with dropout, and let the partitioner compute everything again in the backward.

    It also moves the seeds there, so that they are drawn twice.
    """
    with importlib.import_module("torch._functorch.config").patch(activation_memory_budget=0.0):
        return _masks_that_differ(
            torch.compile, lambda x: functional.dropout(torch.exp(x), 0.5) * 1.5
        )


def _by_eager(program: _Program) -> _Program:
    return torch.compile(program, backend="eager")


@_miscompiled(
    'compiled with backend="eager": a checkpointed block with dropout gets another mask',
    title='backend="eager": checkpoint() draws other masks',
    guarded_with=_verified,
    advice='Use backend="aot_eager" or inductor for functions that checkpoint blocks.',
    limits='Closed by verified(backend="eager"); install("verified") checks inductor alone.',
)
def checkpoint_eager_graph(compile_: _Compile = _by_eager) -> str | None:
    """Checkpoint a block with dropout: the operator for it does not keep the random state.

    ``tag_activation_checkpoint`` leaves that to the partitioner, which this backend does not have.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_higher_order_ops/wrap.py
    """

    def program(x: Tensor) -> Any:
        return checkpoint(lambda y: functional.dropout(y * 2.0, 0.5), x, use_reentrant=False)

    return _masks_that_differ(compile_, program)
