"""Random programs: with the check none is wrong, and none that is right is a mismatch."""

from __future__ import annotations

import itertools
import operator
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchguard
from support.child_process import output_of
from torchguard.__main__ import main
from torchguard.equivalence.compare import COMPILING, judge
from torchguard.equivalence.copies import run_on_copies as run
from torchguard.equivalence.outcome import Outcome
from torchguard.verification.backend import verified_backend
from torchguard.verification.fuzz import Program, attempt, program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Of the first 150, 34 are compiled wrong by 2.13: of these three, 124 from 4 rows on, and 9 and 11
# from 3 rows on.
SEEDS, FEW_SIZES = (9, 11, 124), (4, 9)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TORCHGUARD_REPRODUCERS", str(tmp_path / "reproducers"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_seed_is_the_same_program_everywhere() -> None:
    line = (
        "from torchguard.verification.fuzz import program; "
        "print([program(s).source for s in range(20)])"
    )
    assert output_of(line).strip() == str([program(seed).source for seed in range(20)])


def test_programs_are_of_every_kind() -> None:
    sources = "".join(program(seed).source for seed in range(400))
    for word in (
        "x[", ".clone()", "scatter_", "gather", "index_put_", "accumulate=True", "cat(", "flip(",
        "roll(", "where(", "F.pad(", "sum(", "mean(", "view(torch.int", "copy_(", "expand(",
    ):  # fmt: skip
        assert word in sources, word
    assert 50 < sum(program(seed).gradients for seed in range(400)) < 250


def test_eager_is_right_about_itself() -> None:
    for seed in range(100):
        assert attempt(program(seed), lambda function: function).wrong == ()


def test_each_program_runs_at_ten_sizes_small_ones_first() -> None:
    rows = []

    def noting(function: Any) -> Any:
        def run(x: torch.Tensor, y: torch.Tensor) -> Any:
            rows.append(x.shape[0])
            return function(x, y)

        return run

    assert attempt(program(0), noting).wrong == ()
    assert rows[1:] == sorted(set(rows)) == [2, 3, 4, 6, 9, 16, 33, 64, 150, 300]


def test_the_comparison_sees_a_wrong_value_a_wrong_write_and_a_wrong_alias() -> None:
    seen = []
    for seed in range(40):

        def spoiled(function: Any) -> Any:
            def run(x: torch.Tensor, y: torch.Tensor) -> Any:
                results = function(x, y)
                y.data[-1, 5] += 1
                return results

            return run

        seen.append(
            any("y after the call" in line for line in attempt(program(seed), spoiled).wrong)
        )
    assert all(seen)


def _inputs(seed: int) -> list[torch.Tensor]:
    made = program(seed)
    x, y = made.inputs()
    return [x * 1 if made.gradients else x, y]


def test_eager_does_what_eager_does() -> None:
    for seed in range(150):
        function = program(seed).function()
        eager, again = (run(function, _inputs(seed)) for _ in range(2))
        assert eager.error is None
        assert judge(eager, again, COMPILING).equal, program(seed).source


def together(programs: list[Program]) -> Callable[..., tuple[Any, ...]]:
    """Make one function of several programs: one graph, which compiles in less time."""
    functions = [made.function() for made in programs]

    def run_all(*inputs: torch.Tensor) -> tuple[Any, ...]:
        results: list[Any] = []
        for number, function in enumerate(functions):
            results += function(inputs[2 * number], inputs[2 * number + 1])
        return tuple(results)

    return run_all


def inputs_of(programs: list[Program], call: int = 0) -> list[torch.Tensor]:
    found = []
    for made in programs:
        x, y = made.inputs(call)
        found += [x * 1 if made.gradients else x, y]
    return found


def batches(seeds: range, size: int) -> list[list[Program]]:
    """Sort programs into batches, those with gradients apart from those without."""
    # AOTAutograd loses what is written through a dropout that does nothing, up to 2.13.
    # https://github.com/pytorch/pytorch/issues/195422
    made = [program(seed) for seed in seeds if "F.dropout" not in program(seed).source]
    found = []
    for gradients in (False, True):
        alike = [one for one in made if one.gradients is gradients]
        found += [alike[start : start + size] for start in range(0, len(alike), size)]
    return found


def mismatched(programs: list[Program], backend: str) -> bool:
    torch._dynamo.reset()
    checked = verified_backend(backend)
    torch.compile(together(programs), backend=checked)(*inputs_of(programs))
    assert checked.stats().unverified == 0
    return bool(checked.stats().mismatched)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_no_program_that_is_compiled_right_is_a_mismatch() -> None:
    """Programs go through AOTAutograd, which writes each of them anew."""
    for batch in batches(range(150), 15):
        for made in batch if mismatched(batch, "aot_eager") else ():
            if mismatched([made], "aot_eager"):
                torch._dynamo.reset()
                bare = attempt(made, lambda function: torch.compile(function, backend="aot_eager"))
                assert bare.wrong, made.source


def test_there_are_programs_of_both_kinds_in_the_batches() -> None:
    found = batches(range(150), 15)
    assert sum(map(len, found)) >= 125
    assert {batch[0].gradients for batch in found} == {False, True}


def known(outcome: Outcome) -> Callable[[], Outcome]:
    return lambda: outcome


def test_programs_that_compute_in_double_precision_are_no_mismatch() -> None:
    """Other rounding, the same numbers: the reference in double precision has to forgive it."""
    for seed in range(80):
        made = program(seed)
        if "torch.int" in made.source:
            continue
        function = made.function()

        def rounded(*inputs: torch.Tensor, function: Any = function) -> Any:
            return [result * (1 + 5e-7) for result in function(*inputs)]

        eager = run(function, _inputs(seed))
        exact = run(function, _inputs(seed), cast=lambda _: torch.float64)
        compiled = run(rounded, _inputs(seed))
        found = [
            difference
            for difference in judge(eager, compiled, COMPILING, known(exact)).differences
            if difference.finite
        ]
        assert found == [], made.source


@pytest.mark.slow
def test_with_the_check_no_program_is_wrong_and_without_it_some_are() -> None:
    wrong, mismatched = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in SEEDS:
            torch._dynamo.reset()
            made = program(seed)
            backend = verified_backend("inductor")
            trial = attempt(made, partial(torch.compile, backend=backend), FEW_SIZES)
            assert trial.wrong == (), made.source
            assert backend.stats().unverified == 0
            if backend.stats().mismatched:
                mismatched.append(seed)
    for seed in mismatched:
        torch._dynamo.reset()
        if attempt(program(seed), torch.compile, FEW_SIZES).wrong:
            wrong.append(seed)
    assert wrong == mismatched  # no mismatch that the other comparison finds right
    assert len(wrong) >= 2


@pytest.fixture(scope="module")
def spoiled_backend() -> str:
    """A backend known by name that writes into an input it should leave alone."""
    name = "torchguard_tests_spoiled"

    def spoiled(graph: fx.GraphModule, _: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            results = graph(*inputs)
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            tensors[0].data[-1, -1] += 1
            return results

        return run

    torch._dynamo.register_backend(spoiled, name)
    return name


def test_the_command_finds_nothing_wrong_with_the_check(
    spoiled_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", "--seed", "1", "--count", "2", "--backend", spoiled_backend]) == 0
    shown = capsys.readouterr()
    assert "2 programs: 0 wrong with the check; " in shown.out
    assert "; 0 graphs were compiled wrong" not in shown.out
    assert "[2/2] program 2: right" in shown.err


def test_the_command_shows_what_is_wrong_without(
    spoiled_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seed", "2", "--count", "1", "--backend", spoiled_backend, "--bare"]
    assert main(["fuzz", *options]) == 1
    shown = capsys.readouterr().out
    assert program(2).source in shown
    assert "1 programs: 1 wrong, without the check" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "argument --count"),
        (["--minutes", "0"], "argument --minutes"),
        (["--backend", "inducktor"], "unknown torch.compile backend 'inducktor'"),
    ],
)
def test_bad_usage_ends_with_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fuzz", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- torch's own samples


# What AOTAutograd returns with other strides than eager on some release is no false alarm.
OPERATORS = (
    "add", "sub", "mul", "div", "addmm", "addcmul", "addcdiv", "matmul", "bmm", "baddbmm", "mv",
    "sum", "mean", "var", "std", "prod", "amax", "amin", "argmax", "cumsum", "cumprod",
    "logsumexp", "softmax", "log_softmax", "exp", "log", "sin", "tanh", "sigmoid", "erf", "rsqrt",
    "pow", "abs", "sign", "floor", "clamp", "maximum", "masked_fill", "gather", "scatter",
    "scatter_add", "index_select", "index_add", "index_copy", "index_put", "take_along_dim",
    "cat", "stack", "flip", "roll", "tril", "sort", "topk", "nn.functional.gelu",
    "nn.functional.silu", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.mse_loss", "nn.functional.avg_pool2d", "nn.functional.conv2d",
    "nn.functional.pad",
)  # fmt: skip


def _function(name: str) -> Any:
    """Return the operator as a user calls it: its entry in the database may be a lambda."""
    namespace = torch.nn.functional if name.startswith("nn.functional.") else torch
    return getattr(namespace, name.removeprefix("nn.functional."))


def _graph(function: Any, sample: Any) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Write one call of an operator as a graph of which every tensor is an input."""
    graph = fx.Graph()
    given: list[torch.Tensor] = []
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    placed = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            placed.append(graph.placeholder(f"input_{len(given)}"))
            given.append(leaf)
        else:
            placed.append(leaf)
    first, args, kwargs = pytree.tree_unflatten(placed, spec)
    result = graph.call_function(function, (first, *args), kwargs)
    returned = function(sample.input, *sample.args, **sample.kwargs)
    single = isinstance(returned, torch.Tensor)
    count = 1 if single else len(returned)
    graph.output(
        (result,)
        if single
        else tuple(graph.call_function(operator.getitem, (result, i)) for i in range(count))
    )
    return fx.GraphModule({}, graph), given


SAMPLES = 1  # of each operator


def _status(name: str, sample: Any) -> str | None:
    """Check one call; None where Dynamo would break the graph: the result's size is in the data."""
    graph, given = _graph(_function(name), sample)
    backend = verified_backend("aot_eager")
    try:
        backend(graph, given)(*given)
    except DynamicOutputShapeException:
        return None
    (record,) = backend.stats().graphs
    return record.status if record.status == "verified" else str(backend.stats())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_samples_raise_no_false_alarm(dtype: torch.dtype) -> None:
    by_name = {info.name: info for info in reversed(op_db)}  # the first of its variants
    checked, mismatched = set(), []
    for name in OPERATORS:
        info = by_name[name]
        if dtype not in info.supported_dtypes("cpu"):
            continue
        grad = dtype in info.supported_backward_dtypes("cpu")
        samples = info.sample_inputs("cpu", dtype, requires_grad=grad)
        for number, sample in enumerate(itertools.islice(samples, SAMPLES)):
            status = _status(name, sample)
            checked |= {name} if status is not None else set()
            if status not in {None, "verified"}:
                mismatched.append((name, number, status))
    assert mismatched == []
    assert len(checked) >= 60 - (dtype == torch.bfloat16)


# Programs with a shift, of which the plain eager run without its copy is wrong.
SHIFTS = [
    seed for seed in range(60) if program(seed).without_copies().source != program(seed).source
][:8]


def test_programs_that_overlap_are_wrong_in_plain_eager() -> None:
    """The operand's copy is what makes the program right; eager without it is not."""
    wrong = [
        seed
        for seed in SHIFTS
        if attempt(
            program(seed), lambda function: function, compiles=program(seed).without_copies()
        ).wrong
    ]
    assert len(wrong) > len(SHIFTS) // 2


@pytest.mark.filterwarnings("ignore::torchguard.OverlapWarning")
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_programs_that_overlap_are_right_where_they_are_verified() -> None:
    """Overlapping writes, verified: each does what the same program does with copies."""
    backend = verified_backend("aot_eager")
    for seed in SHIFTS:
        torch._dynamo.reset()
        tried = attempt(
            program(seed),
            lambda function: torch.compile(function, backend=backend),
            sizes=(4, 9, 33),
            compiles=program(seed).without_copies(),
        )
        assert tried.wrong == (), tried.program.source


@pytest.mark.filterwarnings("ignore::torchguard.OverlapWarning")
def test_programs_that_overlap_are_right_with_the_guard() -> None:
    """The same, eager, with the guard installed."""
    with torchguard.install("overlap"):
        for seed in range(60):
            made = program(seed)
            tried = attempt(made, lambda function: function, compiles=made.without_copies())
            assert tried.wrong == (), made.source
