"""Let eager and inductor's code draw the same random numbers while a graph is checked.

Eager draws from the generator; inductor's code draws one seed for each operator from it, and
computes the operator's numbers from that. So dispatch modes choose what both draw in a check:

* in compiled code, the seeds that it draws; and the generator's, before each operator that
  inductor leaves to eager (:class:`CompiledDraws`);
* in eager, the numbers of each random operator: those of a graph of this operator alone, compiled
  by the same inductor, with the seeds of the same draw (:class:`EagerDraws`).

Neither what is compiled nor what the program itself draws changes. This shows that a graph is
right for equal random numbers, not that inductor's numbers are random.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from torchguard._torch import (
    OPERATOR_CLASSES,
    SeesEveryOperator,
    SymbolicInputs,
    compiling_outside_dynamo,
    in_backward,
    operator_name,
    schema_of,
    without_torch_function,
)
from torchguard.state.process import RNGState
from torchguard.verification.backend import Inner

aten = torch.ops.aten


class Seeds(NamedTuple):
    """Which seed a draw gets, by its number."""

    first: int
    apart: bool = False
    """Whether each draw has a seed of its own; else they share one, and no order matters."""
    later: int = 0
    """Is added for draws that begin in a backward."""

    def of(self, number: int, *, late: bool) -> int:
        """Return the seed of a draw; a ``late`` one begins in a backward."""
        return (self.first + number * self.apart + self.later * late) * 0x9E3779B97F4A7C15 % 2**62


ORDERED = Seeds(1, apart=True)
"""The first draw of eager and that of the compiled code have one seed, and so on."""
EQUAL = (Seeds(77), Seeds(1234))
FORWARD_AND_BACKWARD = Seeds(77, later=4321)


class Draw(NamedTuple):
    """A kind of draw, to be counted."""

    device: torch.device
    name: str
    """``seed``: one of inductor's; else the operator that draws from the generator."""
    late: bool
    """Whether it begins in a backward; what a block computes again begins in the forward."""

    @property
    def is_seed(self) -> bool:
        """Whether it is a seed of inductor's."""
        return self.name == "seed"


_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
_TORCHS = {"aten", "prims"}
_NARROW = {torch.float16, torch.bfloat16}


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of an operator draws numbers from the generator of its device."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return False
    if func is aten.native_dropout.default:
        return bool(args[2]) and args[1] != 0
    return bool(dropout_in_attention(func, args, kwargs) != 0)


def dropout_in_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the ``dropout_p`` of fused attention, None for another operator."""
    names = [argument.name for argument in schema_of(func).arguments]
    if "dropout_p" not in names:
        return None
    place = names.index("dropout_p")
    return args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)


def device_of(args: Any, kwargs: Any) -> torch.device:
    """Return the device that an operator with these arguments draws on."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return torch.device(tensors[0].device if tensors else kwargs.get("device") or "cpu")


def generators() -> dict[torch.device, torch.Generator]:
    """Return the generators of the process, by device."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return {generator.device: generator for generator in found}


class CompiledDraws(SeesEveryOperator):
    """A scope in which compiled code gets chosen seeds."""

    def __init__(
        self, seeds: Seeds, first: tuple[int, int] = (0, 0), late: bool | None = None
    ) -> None:
        """``first``: the numbers of the first seed, and of the first operator left to eager.

        ``late``: whether what is drawn began in a backward; None: ask autograd.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Draw] = Counter()
        self.narrow = False
        """Whether an operator that is left to eager has drawn in half precision."""
        self._seeds, self._first, self._late = seeds, first, late
        self._seeds_by_state: dict[bytes, torch.Tensor] = {}

    def _seeds_of(self, draw: Draw, count: int) -> list[int]:
        """Count draws, and return their seeds."""
        kinds = [each for each in self.counts if each.device == draw.device]
        done = sum(self.counts[each] for each in kinds if each.is_seed == draw.is_seed)
        self.counts[draw] += count
        number = self._first[not draw.is_seed] + done
        return [self._seeds.of(number + place, late=draw.late) for place in range(count)]

    def _is_late(self) -> bool:
        return in_backward() if self._late is None else self._late

    def seed_generator(self, name: str, device: torch.device) -> None:
        """Choose what the operator draws that eager is about to run."""
        # bernoulli_ is bernoulli in compiled code.
        (seed,) = self._seeds_of(Draw(device, name.rstrip("_"), self._is_late()), 1)
        generators()[device].manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.randint.low_out and tuple(args[:2]) == (_LEAST, _MOST):
            out = kwargs["out"]
            seeds = self._seeds_of(Draw(out.device, "seed", self._is_late()), out.numel())
            return out.copy_(torch.tensor(seeds, dtype=torch.int64).view(out.shape))
        name = operator_name(func)
        if name == "higher_order::run_and_save_rng_state":
            return self._saved(func, *args, **kwargs)
        if name == "higher_order::run_with_rng_state" and _key(args[0]) in self._seeds_by_state:
            return self._seeds_by_state[_key(args[0])].clone()
        is_draw = isinstance(func, OPERATOR_CLASSES) and draws(func, args, kwargs)
        if is_draw:
            self.seed_generator(schema_of(func).name, device_of(args, kwargs))
        result = func(*args, **kwargs)
        self.narrow |= is_draw and _dtype_of(result) in _NARROW
        return result

    def _saved(self, func: Any, drawing: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose what a checkpointed block draws; it keeps the state, to draw the same again."""
        if schema_of(drawing).name != "prims::inductor_seeds":
            self.seed_generator(schema_of(drawing).name, device_of(args, kwargs))
            return func(drawing, *args, **kwargs)
        count, device = args[0], torch.device(args[1])
        chosen = self._seeds_of(Draw(device, "seed", self._is_late()), count)
        seeds = torch.tensor(chosen, device=device)
        state = generators()[device].manual_seed(len(self._seeds_by_state)).get_state()
        self._seeds_by_state[_key(state)] = seeds
        return state, seeds.clone()


def _key(state: torch.Tensor) -> bytes:
    """Return what tells states of generators apart."""
    return bytes(state.cpu().numpy())


# ---- eager ----


class _Drawn(NamedTuple):
    """A draw that has been made."""

    late: bool
    function: str
    """The function of the program; a mode that notes it is not called in a backward."""
    dtypes: list[torch.dtype | None]
    """Of the arguments of the operator."""
    in_float32: bool = False
    """Whether compiled code draws it in float32, also for narrower dtypes."""


# The seed of a generator is the count of what was drawn so far, seeds and other draws. So a block
# that is computed again begins with the state of its forward, and gets the same seeds.
_BEGIN, _CALLS = 2**60, 2**30

# On a CPU, dropout is bernoulli_ in eager, and native_dropout where AOTAutograd traces it, also in
# attention. The others are bernoulli_ in both.
_DROPOUT = {"dropout", "scaled_dot_product_attention", "multi_head_attention_forward"}
_BERNOULLI = re.compile("bernoulli|dropout.|.dropout")


class EagerDraws(SeesEveryOperator):
    """A scope in which eager draws what compiled code draws; without ``seeds`` it only counts."""

    def __init__(
        self,
        seeds: Seeds | None = None,
        inner: Any = None,
        like: EagerDraws | None = None,
        *,
        dynamic: bool = False,
        doubt_drops: bool = False,
    ) -> None:
        """``inner`` compiles. ``like``: a run in narrower dtypes, whose numbers are drawn again.

        ``doubt_drops``: whether that of which :attr:`doubt` tells is taken for a dropout.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Draw] = Counter()
        self.problem = ""
        """Why its numbers can't be chosen."""
        self.doubt = ""
        """What may be a dropout or not, of all that draws."""
        self.function = ""
        """The function that runs."""
        self._seeds, self._inner, self._dynamic = seeds, inner, dynamic
        self._doubt_drops = doubt_drops
        self._drawn: dict[tuple[torch.device, int], _Drawn] = {}
        """By the seed of a generator, at which it begins."""
        self._like = {} if like is None else like._drawn
        self._names = _Names(self)

    def __enter__(self) -> Any:
        for generator in generators().values() if self._seeds is not None else ():
            generator.manual_seed(_BEGIN)
        self._names.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._names.__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_operator = isinstance(func, OPERATOR_CLASSES)
        if is_operator and draws(func, args, kwargs):
            with torch.no_grad(), without_torch_function():
                return self._draw(func, args, kwargs)
        if is_operator and func.namespace in _TORCHS:
            return func(*args, **kwargs)
        states = RNGState.capture()
        result = func(*args, **kwargs)
        if any(states.changed()[:-2]):  # numpy's and Python's are the last
            self.counts[Draw(device_of(args, kwargs), str(func), in_backward())] += 1
            self.problem = f"{func} draws them inside"
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = device_of(args, kwargs)
        generator = generators().get(device)
        if self._seeds is None or generator is None:
            self.counts[Draw(device, schema_of(func).name, in_backward())] += 1
            self.problem = f"no generator is known for {device}"
            return func(*args, **kwargs)
        place = device, generator.initial_seed()
        calls, seeds = divmod(place[1] - _BEGIN, _CALLS)
        dtypes = [_dtype_of(value) for value in (*args, *kwargs.values())]
        now = _Drawn(in_backward(), self.function, dtypes)
        is_new = place not in self._drawn
        now = self._drawn.setdefault(place, self._like.get(place, now))
        drawn = CompiledDraws(self._seeds, (seeds, calls), now.late)
        try:
            if (
                func.namespace not in _TORCHS
                or dropout_in_attention(func, args, kwargs) is not None
            ):
                drawn.seed_generator(schema_of(func).name, device)  # eager's kernel in both runs
                return func(*args, **kwargs)
            return self._numbers(drawn, now, func, args, kwargs)
        finally:
            if is_new:
                self.counts += drawn.counts
                self._drawn[place] = now._replace(in_float32=not drawn.narrow)
            used = sum(
                count * (1 if each.is_seed else _CALLS) for each, count in drawn.counts.items()
            )
            generator.manual_seed(place[1] + used)

    def _numbers(self, drawn: CompiledDraws, now: _Drawn, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as eager does, and put the numbers of its own graph in the results."""
        target, given, dtypes = func, (args, kwargs), now.dtypes
        writes = any(each.alias_info is not None for each in schema_of(func).returns)
        result = kwargs.get("out", args[0] if args else None) if writes else func(*args, **kwargs)
        filled = [] if writes else list(result) if isinstance(result, tuple) else [result]
        if func is aten.native_dropout.default:
            filled = filled[1:]
        elif func is aten.bernoulli_.float and args[0].device.type == "cpu":
            is_dropout = now.function in _DROPOUT
            if not is_dropout and not _BERNOULLI.search(now.function):
                self.doubt, is_dropout = now.function or "a backward", self._doubt_drops
            if is_dropout:
                keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
                target, filled = aten.native_dropout.default, [result]
                given, dtypes = ((args[0], round(1 - keep, 12), True), {}), dtypes[:1]
        # Of a dropout the mask alone: the scale is eager's, and is checked.
        is_mask = target is aten.native_dropout.default
        wanted = [1] if is_mask else range(len(filled))
        # Fused code may leave a number as it was drawn, so that is what both are compared with.
        unrounded = bool(self._like) and now.in_float32 and not is_mask
        numbers = self._alone(drawn, target, given, dtypes, wanted, unrounded=unrounded)
        for tensor, value in zip(filled, numbers, strict=not self.problem):
            # A mask that has become one of floats: whatever scales it scales the reference too.
            dtype = torch.bool if is_mask else tensor.dtype
            if not self._like and (value.dtype != dtype or value.shape != tensor.shape):
                self.problem = f"{self._inner.name} gives {func} other dtypes or shapes than eager"
            else:
                tensor.copy_(value)
        if func is aten.native_dropout.default and args[1] != 1:
            result[0].copy_(args[0] * result[1] * (1 / (1 - args[1])))
        return result

    def _alone(
        self,
        drawn: CompiledDraws,
        func: Any,
        given: Any,
        dtypes: Any,
        wanted: Any,
        *,
        unrounded: bool,
    ) -> Any:
        """Return what a compiled graph of this operator computes; it writes what eager writes."""
        args, kwargs = given
        pairs = itertools.zip_longest((*args, *kwargs.values()), dtypes)
        values = list(itertools.starmap(_cast, pairs))
        if unrounded:
            values = [
                _cast(each, torch.float32 if _dtype_of(each) in _NARROW else None)
                for each in values
            ]
        kwargs_then = dict(zip(kwargs, values[len(args) :], strict=True))
        try:
            compiled, tensors = compiled_alone(
                self._inner, func, values[: len(args)], kwargs_then, wanted, dynamic=self._dynamic
            )
            with drawn:
                results = compiled(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - what it raises must not be taken for eager's
            self.problem = f"{func} alone does not run compiled: {type(error).__name__}: {error}"
            return ()
        schema = {each.name: each.alias_info for each in schema_of(func).arguments}
        names = [*list(schema)[: len(args)], *kwargs]
        for name, value, original in zip(names, values, (*args, *kwargs.values()), strict=True):
            if value is not original and schema[name] is not None:
                original.copy_(value)
        return results


class _Names(TorchFunctionMode):
    """Tells which function of the program draws."""

    def __init__(self, draws: EagerDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, before = getattr(func, "__name__", ""), self._draws.function
        if name == "dropout" and (kwargs.get("inplace") or args[3:4] == (True,)):
            name = "dropout_"
        self._draws.function = name
        try:
            return func(*args, **kwargs)
        finally:
            self._draws.function = before


# ---- a graph of one operator ----

_compiled: dict[Any, list[tuple[SymbolicInputs | None, Any]]] = {}


def compiled_alone(
    inner: Inner,
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    wanted: Sequence[int],
    *,
    dynamic: bool,
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a compiled graph of one operator, which gives the ``wanted`` results, and its inputs.

    With ``dynamic`` one graph is for many sizes.
    """
    graph, tensors = fx.Graph(), list[torch.Tensor]()
    for argument in schema_of(func).arguments[len(args) :]:  # ``from`` is no name for a graph
        if argument.name in kwargs and not argument.kwarg_only:
            args, kwargs = [*args, kwargs[argument.name]], {**kwargs}
            del kwargs[argument.name]

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return graph.placeholder(f"tensor_{len(tensors)}")
        if not isinstance(value, (tuple, list)):
            return value
        if dynamic and value and all(type(each) is int for each in value):
            sized = put(torch.empty(()).expand(value))  # a size is an input only as a tensor's
            return [graph.call_method("size", (sized, dim)) for dim in range(len(value))]
        return [put(each) for each in value]

    parameters = schema_of(func).arguments[: len(args)]
    made = (
        tuple(
            put((value,))[0] if dynamic and _is_bound(parameter.name, value) else put(value)
            for parameter, value in zip(parameters, args, strict=True)
        ),
        {name: put(value) for name, value in kwargs.items()},
    )
    node = graph.call_function(func, *made)
    if len(schema_of(func).returns) > 1:
        graph.output(tuple(graph.call_function(operator.getitem, (node, each)) for each in wanted))
    else:
        graph.output((node,) * len(wanted))
    described = [
        (each.dtype, each.device, each.dim() if dynamic else (each.shape, each.stride()))
        for each in tensors
    ]
    key = (inner.source, func, repr(made), str(wanted), dynamic, str(described))
    known = _compiled.setdefault(key, [])
    for sizes, compiled in known:
        if sizes is None or sizes.fit(tensors):
            return compiled, tensors
    sizes = SymbolicInputs(tensors) if dynamic else None
    with compiling_outside_dynamo(), torch.no_grad():
        module = fx.GraphModule(torch.nn.Module(), graph)
        compiled = inner.compile(module, tensors if sizes is None else sizes.fakes)
    known.append((sizes, compiled))
    return compiled, tensors


def _is_bound(name: str, value: Any) -> bool:
    """Whether this is a bound of randint or randperm, which may follow a size of the program."""
    return name in {"low", "high", "n"} and type(value) is int and 1 < value < 2**31


def _dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype that this argument has, or is."""
    value = getattr(value, "dtype", value)
    return value if isinstance(value, torch.dtype) else None


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return value.to(dtype) if isinstance(value, torch.Tensor) else dtype
