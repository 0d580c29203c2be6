"""Sizes that vary from call to call: graphs too many, too slow or out of bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchguard import Buckets, bucketed
from torchguard.defects.catalog import NotRunHere
from torchguard.defects.probes import compile_defect, issues

_bucketed_defect = partial(compile_defect, guards=("bucketed",))

_Backend = Callable[..., Any]
_Wrap = Callable[[_Backend], Callable[[Tensor], object]]
"""Compiles ``_double`` with a backend."""


def _double(values: Tensor) -> Tensor:
    return values * 2


def _is_symbolic(value: object) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _has_symbol_by_graph(wrap: _Wrap, lengths: Iterable[int]) -> list[bool]:
    """Call a wrapped function with each length; return of each graph whether a dim is symbolic."""
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(any(map(_is_symbolic, inputs)))
        return graph.forward

    double = wrap(backend)
    for length in lengths:
        double(torch.ones(length))
    return found


def _compiled(backend: _Backend) -> Callable[[Tensor], object]:
    return torch.compile(_double, backend=backend)


def _static(backend: _Backend) -> Callable[[Tensor], object]:
    return torch.compile(_double, backend=backend, dynamic=False)


def _padded_by_hand(backend: _Backend) -> Callable[[Tensor], object]:
    double = _compiled(backend)
    return lambda x: double(functional.pad(x, (0, _PADDING)))


def _in_buckets(sizes: Iterable[int]) -> _Wrap:
    return lambda backend: bucketed(
        _double, dims={"values": {0: "t"}}, buckets=Buckets(sizes), compile={"backend": backend}
    )


_20_BUCKETS, _PADDING = range(8, 168, 8), 3


@_bucketed_defect(
    "padding to buckets does not keep a plain torch.compile from a symbolic dim",
    title="sizes become symbolic in spite of padding",
    upstream=issues(190631),
    guarded_with=_in_buckets(_20_BUCKETS),
)
def auto_dynamic(wrap: _Wrap = _padded_by_hand) -> str | None:
    """Call with 20 lengths, one per bucket, and ask for symbolic sizes in the graphs.

    Dynamo marks a dim that changed as dynamic (``automatic_dynamic_shapes``).
    """
    symbolic = _has_symbol_by_graph(wrap, (bucket - _PADDING for bucket in _20_BUCKETS))
    if len(symbolic) == len(_20_BUCKETS) and not any(symbolic):
        return None
    return f"20 buckets gave {len(symbolic)} graphs, {sum(symbolic)} with a symbolic dim"


_16_LENGTHS = range(2, 18)


@_bucketed_defect(
    "past 8 variants of a compiled function every new one runs eager, with one log line",
    title="hit config.recompile_limit (8): runs eager",
    upstream=issues(128071),
    guarded_with=_in_buckets(_16_LENGTHS),
)
def recompile_limit(wrap: _Wrap = _static) -> str | None:
    """Compile one variant per length: of a code object Dynamo keeps ``recompile_limit``."""
    eager_calls = len(_16_LENGTHS) - len(_has_symbol_by_graph(wrap, _16_LENGTHS))
    return f"{eager_calls} of 16 lengths ran eager, with no exception" if eager_calls else None


_NINE_LENGTHS = range(16, 25)


def _model(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def _recorded() -> int:
    from torch._dynamo.utils import counters  # noqa: PLC0415  importing it imports the compiler

    # Rises by the number of inputs with every graph that is recorded; nothing public tells.
    return counters["inductor"]["cudagraph_recorded_non_static_inputs"]


def _for_any_length() -> Callable[[Tensor], object]:
    compiled = torch.compile(_model, mode="reduce-overhead")

    def run(x: Tensor) -> None:
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)

    return run


def _for_2_buckets() -> Callable[[Tensor], object]:
    mode = {"mode": "reduce-overhead"}
    return bucketed(_model, dims={"x": {0: "t"}}, buckets=[16, 24], compile=mode)


@_bucketed_defect(
    'mode="reduce-overhead", GPU: one CUDA graph recorded for every input size',
    title="a CUDA graph is recorded for every size",
    upstream=issues(188150),
    guarded_with=_for_2_buckets,
)
def cudagraph_shapes(
    compiled: Callable[[], Callable[[Tensor], object]] = _for_any_length,
) -> str | None:
    """Count the CUDA graphs recorded for one model and nine lengths.

    ``deferred_cudagraphify`` (``torch/_inductor/cudagraph_trees.py``) keeps one per combination of
    symbolic sizes, without a limit; torch warns at the ninth size (up to 2.9 at the fifty-first).
    """
    if not torch.cuda.is_available():
        raise NotRunHere("needs a CUDA GPU")
    run, recordings = compiled(), 0
    for length in _NINE_LENGTHS:
        x = torch.ones(length, 4, device="cuda")
        before = _recorded()
        for _ in range(2):  # the first call with a new size warms up, the second records
            torch.compiler.cudagraph_mark_step_begin()
            run(x)
        recordings += _recorded() > before
    if recordings == 0:
        raise NotRunHere("torch records no CUDA graph here")
    if recordings < len(_NINE_LENGTHS):
        return None
    return f"{len(_NINE_LENGTHS)} input lengths: {recordings} CUDA graphs recorded"


# T time, padded from 3 to 4; F features: 2 in, 1 out. So little that what is written behind
# the 12 bytes of the last tensor stays in the space that malloc leaves there.


def _pad(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pad ``x`` (T, F), and a product of it, to an even T."""
    missing = -x.shape[0] % 2
    padding = (0, 0, 0, missing)
    return functional.pad(x, padding), functional.pad(torch.relu(x @ weight), padding)


def _padded(x: Tensor, weight: Tensor) -> Any:
    torch._dynamo.mark_dynamic(x, 0)
    return torch.compile(_pad)(x, weight)


def _padded_in_buckets(x: Tensor, weight: Tensor) -> Any:
    # The program pads with zeros too, so what is behind x has to be zeros.
    zeros = {"x": 0}
    pad = bucketed(_pad, dims={"x": {0: "t"}}, buckets=[4, 8], fill=zeros, compile=True)
    return pad(x, weight)


@_bucketed_defect(
    "compiled: padding a dynamic dim by -n % 16 reads or writes out of bounds",
    title="padding a dynamic size reads out of bounds",
    upstream=issues(169760),
    guarded_with=_padded_in_buckets,
)
def pad_dynamic(run: Callable[[Tensor, Tensor], Any] = _padded) -> str | None:
    """Compare the padding with eager, and the result's size with that of its memory.

    On the CPU, and on a GPU where there is one: inductor writes other code for it.

    Up to 2.9 torch bounded Python's ``%`` with C's rule (``torch/utils/_sympy/interp.py``), so
    ``-n % 2`` lay in [-1, 0]. Inductor then leaves out the test for the end of the input (2.6),
    or pads in place, in a buffer that is too small (2.8 and 2.9).
    """
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        memory = torch.ones(4, 2, device=device)
        x, weight = memory[:3], torch.ones(2, 1, device=device)
        eager, _ = _pad(x, weight)
        padded, product = run(x, weight)
        where = "" if device == "cpu" else "on the GPU: "
        if not torch.equal(padded, eager):
            return f"{where}F.pad(x, (0, 0, 0, -n % 2)) filled in what lies behind x in memory"
        if product.untyped_storage().nbytes() < product.numel() * product.element_size():
            return f"{where}F.pad(y, (0, 0, 0, -n % 2)) wrote behind the end of the memory of y"
    return None


_SIZES = (4, 5, 6, 7)
_WAIT = 60.0  # seconds; the other thread may be compiling


def _overlapping_calls() -> None:
    """Let two threads be in a function compiled for static sizes; the first to enter leaves first.

    It puts back what ``dynamic=False`` has changed. The second saved what the first had set,
    and puts that back.
    """
    first_entered, second_entered, first_left = (threading.Event() for _ in range(3))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def meet() -> None:
        if threading.current_thread() is first:
            first_entered.set()
            second_entered.wait(_WAIT)
        else:
            second_entered.set()
            first_left.wait(_WAIT)

    @torch.compile(dynamic=False)
    def served(x: Tensor) -> Tensor:
        meet()
        return x

    def call_first() -> None:
        served(torch.ones(2))
        first_left.set()

    first = threading.Thread(target=call_first)
    first.start()
    first_entered.wait(_WAIT)
    served(torch.ones(2))
    first.join()


@compile_defect(
    "2 threads that call torch.compile(dynamic=False) code switch dynamic shapes off",
    title="threads with dynamic=False switch it off",
    upstream=issues(118260),
    advice="Upgrade to torch 2.12.",
)
def static_threads() -> str | None:
    """Compile something else after two threads have called what ``dynamic=False`` compiled.

    That sets ``automatic_dynamic_shapes`` to False around each call (``make_set_enable_dynamic`` in
    ``torch/_dynamo/eval_frame.py``), up to 2.11 for the process, since 2.12 for the thread:
    https://github.com/pytorch/pytorch/issues/186537
    """
    _overlapping_calls()
    graphs = len(_has_symbol_by_graph(_compiled, _SIZES))
    if graphs < len(_SIZES):
        return None
    return f"{len(_SIZES)} sizes gave {graphs} graphs of another function, after 2 threads"
