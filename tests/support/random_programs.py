"""Random programs of indexed and in-place assignment, compiled and compared with eager.

A program is a few statements on two tensors, of the kinds that are compiled wrong. Every statement
is one that eager defines: no copy over overlapping memory, no index that occurs twice where the
order of writes would count. The comparison shares nothing with ``equivalence/``, which it judges.
"""

from __future__ import annotations

import contextlib
import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS, COLUMNS = 4, 6
SIZES = (2, 3, 4, 6, 9, 16, 33, 64, 150, 300)
"""How many rows the calls of a program have, small numbers first: each program makes sense
for 2 rows and more. What a vectorized loop writes wrong shows only where it runs twice."""

# {a} and {b}: tensors of n rows and COLUMNS columns, {b} another one than {a} where it matters.
# {i}, {j}: rows, {k} < {l}: columns, {c}: a number, {p}: the rows in some order,
# {r}: some rows, each once, {d}: as many rows, some twice, {m}: how many those are.
_WRITES = (
    "{a}[{i}] = {c}",
    "{a}[{i}] = {b}[{j}]",
    "{a}[{i}] = {a}[{j}]",
    "{a}[1:] = {a}[:-1].clone()",
    "{a}[:-1] = {a}[1:].clone()",
    "{a}[:, 1:] = {b}[:, :-1].clone()",
    "{a}[:, {k}] = {b}[:, {l}] * 2",
    "{a}[:, {k}:{l}] = {b}[:, {k}:{l}] + {c}",
    "{a}[{i}] += {b}[{j}]",
    "{a}[{r}] = {b}[:{m}]",
    "{a}[{r}] = {b}[{d}]",
    "{a}[{d}] += 1",
    "{a}[torch.arange(n) % 2] += 1",
    "{a}[{b} > 0] = {c}",
    "{a}.index_put_(({r},), {b}[:{m}])",
    "{a}.index_put_(({d},), {b}[:{m}], accumulate=True)",
    "{a}.index_copy_(0, {r}, {b}[:{m}])",
    "{a}.index_add_(0, {d}, {b}[:{m}])",
    "{a}.index_fill_(0, {r}, {c})",
    "{a}.scatter_(0, {p}[:, None].expand(n, 6), {b})",
    "{a}.scatter_add_(0, {d}[:, None].expand({m}, 6), {b}[:{m}])",
    "{a}.masked_fill_({b} > 0, {c})",
    "{a}.add_({b})",
    "{a}.mul_({c})",
    "{a}.copy_({b})",
    "{a}.neg_()",
    "{a}.clamp_(-1, 1)",
    "{a}.zero_()",
    "{a}.lerp_({b}, 0.5)",
    "{a}.t()[{k}] = {c}",
    "{a}.view(-1)[{i}::7] = {c}",
    "{a}.diagonal().add_({c})",
    # One view only: eager itself can't differentiate _foreach_add_ on two views of one tensor
    # ("fn_edge.is_valid() == this_edge.is_valid() INTERNAL ASSERT FAILED", 2.6 to 2.15).
    "torch._foreach_add_([{a}[1:]], [{b}[1:]])",
    "F.dropout({a}, 0.5, training=False).add_({c})",
    "({a} + 0).mul_(2)",
)
_SWAP = "{new} = {a}.clone(); {a}.copy_({b}); {b}.copy_({new})"
_VALUES = (
    "{a}.clone()",
    "{a} + {b}",
    "{a} * {c}",
    "{a} * 1",
    "{a} / 1.0",
    "{a}.flip(0)",
    "{a}.flip(1) + {b}",
    "{a}.roll(1, 0)",
    "{a}[{p}]",
    "{a}.index_select(0, {p})",
    "torch.gather({a}, 0, {p}[:, None].expand(n, 6))",
    "torch.where({a} > 0, {a}, {b})",
    "torch.cat([{a}[2:], {b}[:2]])",
    "torch.cat([{a}[:, 3:], {a}[:, :3]], 1)",
    "F.pad({a}[:, 1:], (1, 0))",
    "F.pad({a}, (0, 2))[:, :6]",
    "{a} - {b}.mean(0)",
    "{a} * {b}.sum(1, keepdim=True)",
    "{a}.cumsum(0)",
    "{a}.softmax(1)",
    "{a}.sigmoid() * {b}",
    "{a}.index_put(({r},), {b}[:{m}])",
    "{a}.index_put(({d},), {b}[:{m}], accumulate=True)",
    "{a}[:1].expand(n, 6).index_put(({r},), {b}[:{m}])",
    "{a}.scatter(0, {p}[:, None].expand(n, 6), {b})",
    "torch.slice_scatter({a}, {b}[:-1], 0, 1)",
    "torch.select_scatter({a}, {b}[{i}], 0, {j})",
    "torch.diagonal_scatter({a}, {b}.diagonal())",
    "{a}.t().contiguous().t()",
)
_VIEWS = ("{a}[:]", "{a}.view(6, n).view(n, 6)", "{a}.view_as({a})", "{a}.t().t()")
_BITS = (
    "{new} = {a}.view(torch.int32).view(torch.float32)",
    "{new} = ({a}.view(torch.int32) & -2).view(torch.float32)",
    "{new} = ({a}.view(torch.int16) & -2).view(torch.float32); {a}.fill_({c})",
    "{a}.view(torch.int32).bitwise_and_(-256)",
)
_PAIRS = (("0", "1"), ("0", "-1"), ("1", "-1"), ("0", "n // 2"), ("n // 2", "-1"), ("-2", "-1"))
_ROWS = (  # {r}, {d}, {m}
    ("torch.arange(0, n, 2)", "(torch.arange((n + 1) // 2) // 2)", "(n + 1) // 2"),
    ("torch.arange(1, n)", "(torch.arange(n - 1) // 2)", "n - 1"),
    ("torch.arange(n - 1).flip(0)", "(torch.arange(n - 1) % (n // 2))", "n - 1"),
    ("torch.arange(n // 2)", "(torch.arange(n // 2) // 2 + 1)", "n // 2"),
)
_ORDERS = ("torch.arange(n).flip(0)", "torch.arange(n).roll(1)", "((torch.arange(n) + n // 2) % n)")
_RESULTS = ("{a}", "{a}", "{a}", "{a}[1:]", "{a}.sum()", "{a}.t()", "{a} * 2")


@dataclass(frozen=True)
class Program:
    """A function of two tensors of shape (n, 6), made from a seed; n is 2 or more."""

    seed: int
    source: str
    gradients: bool
    """Whether ``x`` requires grad; ``y`` is then what a module would keep in a buffer."""

    def function(self) -> Callable[..., Any]:
        """Return the function, new each time: nothing of it is compiled yet."""
        file = f"<program {self.seed}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[file] = len(self.source), None, lines, file
        scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, file, "exec"), scope)  # noqa: S102 - it was written here
        function: Callable[..., Any] = scope["program"]
        return function

    def inputs(self, call: int = 0, rows: int = ROWS) -> list[torch.Tensor]:
        """Return the inputs of a call; each call has other numbers."""
        generator = torch.Generator().manual_seed(1000 * self.seed + call)
        x, y = (torch.randn(rows, COLUMNS, generator=generator, device="cpu") for _ in "xy")
        return [x.requires_grad_(self.gradients), y]


def program(seed: int) -> Program:
    """Make a program from a number; the same number makes the same program everywhere.

    What eager refuses to run is made anew.
    """
    generator = random.Random(seed)  # noqa: S311 - not for cryptography
    while True:
        made = Program(seed, *_written(generator))
        # Autograd may not allow this order of reads and writes.
        with contextlib.suppress(RuntimeError), torch.random.fork_rng(devices=[]):
            for rows in (2, 3, ROWS):
                _seen(made.function(), made, 0, rows)
            return made


def _written(generator: random.Random) -> tuple[str, bool]:
    gradients = generator.random() < 1 / 3
    names = ["x", "y"]
    lines = []
    for number in range(generator.randint(3, 6)):
        new = "abcdef"[number]
        kind = generator.choices(
            (_WRITES, _VALUES, _VIEWS, _BITS, (_SWAP,)),
            (50, 32, 8, 0 if gradients else 5, 5),
        )[0]
        template = generator.choice(kind)
        if kind in (_VALUES, _VIEWS):
            template = f"{{new}} = {template}"
        lines.append(_filled(template, names, new, generator))
        if "{new}" in template:
            names.append(new)
    count = generator.randint(0 if not gradients else 1, 3)
    results = [_filled(generator.choice(_RESULTS), names, "", generator) for _ in range(count)]
    lines.append(f"return ({''.join(f'{result}, ' for result in results)})")
    body = "\n".join(f"    {line}" for line in lines)
    return f"def program(x, y):\n    n = x.shape[0]\n{body}\n", gradients


def _filled(template: str, names: list[str], new: str, generator: random.Random) -> str:
    a = generator.choice(names)
    # It may be a view of {a}: where eager does not define that it raises, and this is made anew.
    b = generator.choice([name for name in names if name != a])
    i, j = generator.choice(_PAIRS)
    k, l = sorted(generator.sample(range(COLUMNS), 2))  # noqa: E741
    rows, twice, count = generator.choice(_ROWS)
    return template.format(
        a=a, b=b, i=i, j=j, k=k, l=l, c=generator.choice((0.0, 1.0, 2.0, -3.0)), new=new,
        r=rows, d=twice, m=count, p=generator.choice(_ORDERS),
    )  # fmt: skip


# ---- one program, eager and compiled: what a caller could see of a difference ----


def attempt(
    program: Program, compile_: Callable[..., Any], sizes: Sequence[int] = SIZES
) -> list[str]:
    """Compile the program with ``compile_``, and return what its calls do that eager does not.

    There are two calls with the first number of rows, the second with numbers that no check
    has seen, and then one with each of the others: from there on the graph is dynamic.
    """
    eager, compiled = program.function(), compile_(program.function())
    wrong: list[str] = []
    for call, rows in enumerate((sizes[0], *sizes)):
        want = _seen(eager, program, call, rows)
        try:
            got = _seen(compiled, program, call, rows)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            wrong.append(f"{rows} rows: raises {type(error).__name__}: {first}")
            continue
        wrong += [f"{rows} rows: {name}" for name in want if not _equal(want[name], got.get(name))]
    return wrong


def _seen(function: Callable[..., Any], program: Program, call: int, rows: int) -> dict[str, Any]:
    x, y = program.inputs(call, rows)
    given = [x * 1 if program.gradients else x, y]
    results = list(function(*given))
    seen: dict[str, Any] = {}
    named = {f"result {i}": value for i, value in enumerate(results)}
    named.update(zip(("x after the call", "y after the call"), given, strict=True))
    for name, value in named.items():
        seen[f"{name}, requires_grad"] = value.requires_grad
        if 0 not in value.stride():  # what eager expands may be written out
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            seen[f"{name}, order of strides"] = order
        seen[name] = value.detach().clone()
    ends = [value for value in named.values() if value.requires_grad]
    if ends:
        weights = torch.linspace(0.5, 1.5, x.numel(), device="cpu")
        sums = [(end * weights[: end.numel()].view(end.shape)).sum() for end in ends]
        (gradient,) = torch.autograd.grad(sum(sums[1:], sums[0]), x, allow_unused=True)
        seen["gradient of x"] = torch.zeros_like(x) if gradient is None else gradient
    # Write into one after the other and see what else changes: that is what sharing means.
    tensors = {name: value.detach() for name, value in named.items()}
    for name, value in tensors.items():
        before = {other: tensor.clone() for other, tensor in tensors.items()}
        value.fill_(12345.0)
        for other, tensor in tensors.items():
            changed = not torch.equal(tensor.nan_to_num(), before[other].nan_to_num())
            seen[f"writing into {name} changes {other}"] = changed
        for other, tensor in before.items():
            tensors[other].copy_(tensor)
    return seen


def _equal(want: Any, got: Any) -> bool:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if want.shape != got.shape or want.dtype != got.dtype:
            return False
        return torch.allclose(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    return bool(want == got)
