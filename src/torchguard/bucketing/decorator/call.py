"""A call: flatten the arguments, look up the plan, pad, run, slice the output.

And what ``bucketed`` returns for a function.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch

from torchguard import _torch
from torchguard._events import warn_user
from torchguard._pytree import flatten, reachable_modules, unflatten
from torchguard._torch import uncompiled
from torchguard.bucketing.decorator.bucket import (
    COMPILE_LOCK,
    PLAIN,
    Bucket,
    Call,
    Graph,
    Plan,
    Specialization,
    kind_of_call,
    leaf_key,
    number_key,
    sizes_of,
)
from torchguard.bucketing.decorator.compiled import (
    RECOMPILE_LIMIT,
    Compiler,
    compiler_for,
    compiling,
    graph_for,
)
from torchguard.bucketing.decorator.masking import (
    Real,
    count_real,
    fresh_extras,
    make_extras,
    rows_of,
    told_by_caller,
)
from torchguard.bucketing.decorator.options import Spec, find_buckets, find_inputs
from torchguard.bucketing.decorator.output_shapes import UNKNOWN, OutputShapes, slice_output
from torchguard.bucketing.decorator.prove import check_padding
from torchguard.bucketing.decorator.stats import BucketedStats, stats_of
from torchguard.bucketing.decorator.warmup import warm_up

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import Options

Settings: TypeAlias = Callable[[Any, Any], dict[str, Any]]
"""Makes the settings for ``torch.compile`` of the function and of what ``compile=`` says."""
_Result_co = TypeVar("_Result_co", covariant=True)

# Each distinct shape of the inputs has a plan of some kilobytes.
_PLANS_KEPT = 8192


class Caller:
    """Runs one function through its buckets."""

    def __init__(
        self,
        function: Callable[..., Any],
        compiler: Compiler | None,
        options: Options,
        owner: tuple[Any, ...] = (),
    ) -> None:
        """``owner`` comes first in what the function is given: a module for its forward."""
        self.compiler = compiler
        self.function = function
        self.owner = owner
        self.name = getattr(function, "__qualname__", type(function).__name__) + "()"
        self.spec = Spec(function, options, bound=bool(owner))
        self.lock = threading.Lock()
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.output_shapes = OutputShapes(self.function, self.spec, self.name)
        self._uncompiled = Graph(self.function)
        self._seen: dict[tuple[int, ...], list[int]] = {}
        self._plans: dict[Any, Plan] = {}
        self._global_state: Callable[[], tuple[Any, ...]] | None = None
        self._warned = self._warned_of_compiling_around = False
        self._always = options["check_padding"] == "always"

    def seen(self) -> dict[tuple[int, ...], int]:
        """Return how often each combination of the sizes of the axes was called."""
        # A list: a call of another thread may add one meanwhile.
        return {sizes: cell[0] for sizes, cell in list(self._seen.items()) if cell[0]}

    # ---- in every call ----

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function: pad, run, slice."""
        plan, call = self.look_up(args, kwargs)
        if not plan.ready or plan.open or self._always:
            return self._make_whole(plan, call)
        return self._call(plan, plan.graph.run, call)

    def look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Plan, Call]:
        """Return the plan for a call, and the call."""
        global_state = (self._global_state or self._global_state_for())()
        arguments = [*args, *kwargs.values()] if kwargs else list(args)
        # The key of the plan: all that it, or a compiled graph, depends on.
        key: list[Any] = [global_state, len(args), *kwargs]
        leaves: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            # Not isinstance(): a Parameter and other subclasses go the last way, a leaf each.
            if kind is torch.Tensor:
                leaves.append(argument)
                key += (argument.shape, argument.dtype, argument.device, argument.requires_grad)
            elif kind in PLAIN:
                leaves.append(argument)
                key += (kind, number_key(argument) if kind is float else argument)
            else:
                inside, treedef = flatten(argument)
                leaves += inside
                key.append(treedef)
                for leaf in inside:
                    if type(leaf) is torch.Tensor:
                        key += (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
                    else:
                        key.append(leaf_key(leaf))
        plan = self._plans.get(tuple(key))
        if plan is None:
            plan = self._new_plan(tuple(key), global_state, args, kwargs)
        return plan, Call(plan.signature, self.owner, arguments, leaves)

    def _call(self, plan: Plan, run: Callable[..., Any], call: Call) -> Any:
        """Run a call, slice its output, and count it."""
        extras = fresh_extras(self.spec, call, plan) if plan.extras else None
        # On an accelerator this is a tensor, which only the device knows.
        real = count_real(self.spec, plan, call) if plan.told else plan.real
        args, kwargs = call.bind(extras, plan.pad(call.leaves))
        output = run(*args, **kwargs)
        if plan.graph.cuda_graphs:
            output = _cloned(output)
        if plan.pads:
            sliced = slice_output(plan, output)
            output = self.learn(plan, call, output) if sliced is UNKNOWN else sliced
        with self.lock:
            # Under the lock: += reads and writes, and another thread may call in between.
            bucket = plan.bucket
            bucket.calls += 1
            if isinstance(real, torch.Tensor):
                before = bucket.on_device
                bucket.on_device = real if before is None else before.to(real.device) + real
            else:
                bucket.real += real
            bucket.padded += plan.padded
            plan.seen[0] += 1
        return output

    def learn(self, plan: Plan, call: Call, output: Any) -> Any:
        """Take the real part of an output of a new kind."""
        with COMPILE_LOCK, uncompiled():
            return self.output_shapes.slice(plan, call, output)

    def _global_state_for(self) -> Callable[[], tuple[Any, ...]]:
        """Return what reads whether gradients, inference mode, autocast and training are on."""
        # Weak: a function looks its globals up by name, so they may be gone before it is.
        modules = [weakref.ref(each) for each in reachable_modules(self.function, self.owner)]

        def global_state() -> tuple[Any, ...]:
            modes = (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                _torch.autocast_is_on(),
                _torch.innermost_transform() is not None,
            )
            if not modules:
                return modes
            return (*modes, *[getattr(module(), "training", None) for module in modules])

        self._global_state = global_state
        return global_state

    # ---- the plan of a shape ----

    def _new_plan(self, key: Any, state: tuple[Any, ...], args: Any, kwargs: Any) -> Plan:
        call = Call.of(self.spec, self.owner, args, kwargs)
        inputs, sizes = find_inputs(self.spec, call)
        buckets = find_buckets(self.spec, sizes, inputs)
        padded = {each.index for each in inputs}
        unpadded = tuple(
            (label, leaf_key(leaf))
            for index, (label, leaf) in enumerate(zip(call.labels(), call.leaves, strict=True))
            if index not in padded
        )
        specialization = Specialization(state, call.signature.treedefs, unpadded)
        extras: dict[str, torch.Tensor] = {}
        told: list[Real] = []
        if self.spec.lengths or self.spec.masks:
            extras = make_extras(self.spec, call, inputs, sizes, buckets)
            if not specialization.transformed:
                told = told_by_caller(self.spec, inputs, call)
        own = tuple(buckets.values())
        with self.lock:
            plan = Plan(
                signature=call.signature,
                inputs=inputs,
                sizes=sizes,
                buckets=buckets,
                side=self.spec.options["side"],
                bucket=self.buckets.setdefault(own, Bucket()),
                graph=self._uncompiled,
                specialization=specialization,
                seen=self._seen.setdefault(tuple(sizes.values()), [0]),
                extras=extras,
                kind=kind_of_call(specialization, inputs),
                told=bool(told),
                rows=rows_of(told) if told else 1,
            )
            # torch.compile imports Dynamo, which takes seconds: not before something compiles.
            # It runs what is inside a transform of torch.func uncompiled.
            if self.compiler is not None and not specialization.transformed:
                plan.graph = graph_for(self.function, self.compiler, plan)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    # ---- the first call of a shape ----

    def _make_whole(self, plan: Plan, call: Call) -> Any:
        """Prepare the bucket for this call, and run it: prove, compile, derive."""
        self.prove(plan, call)
        output = self._call(plan, self.first_run(plan), call)
        plan.ready = True
        if len(plan.graph.compiled_for) > RECOMPILE_LIMIT and not self._warned:
            self._warn_of_recompiles(plan)
        return output

    def prove(self, plan: Plan, call: Call, *, anew: bool = False) -> bool:
        """Check the padding of a call unless that is proven, or ``anew`` whatever is proven.

        Returns whether there was any to check.
        """
        when = "always" if anew else self.spec.options["check_padding"]
        able = not plan.specialization.transformed and when != "never"
        if able and when == "first":
            bucket = plan.bucket
            able = not (bucket.covers(plan) if plan.pads else plan.kind in bucket.proven)
        # What arrives at the size of its bucket may be padded all the same.
        if not able or not (plan.pads or plan.told):
            plan.open = False
            return False
        with COMPILE_LOCK, uncompiled():
            padded = check_padding(self.output_shapes, plan, call, anew=anew)
        plan.open = not padded and plan.told
        return padded

    def first_run(self, plan: Plan) -> Callable[..., Any]:
        """Return what runs a call; where that compiles, once, and what it took is noted."""
        graph = plan.graph
        if not graph.compiles or plan.specialization in graph.compiled_for:
            return graph.run

        def run(*args: Any, **kwargs: Any) -> Any:
            with compiling(graph, plan.specialization):
                return graph.run(*args, **kwargs)

        return run

    def _warn_of_recompiles(self, plan: Plan) -> None:
        """Warn once that something else than the size differs from call to call."""
        self._warned = True
        compiled_for = plan.graph.compiled_for
        keys = dict.fromkeys(itertools.chain.from_iterable(e.unpadded for e in compiled_for))
        values = Counter(label for label, _ in keys)
        differ = [label for label, count in values.items() if count > 1]
        labels = ", ".join(differ) or "grad mode, autocast or the structure"
        warn_user(
            f"bucketed: {self.name} was compiled {len(compiled_for)} times for {sizes_of(plan)}, "
            f"because {labels} differs from call to call: numbers, texts and sizes that dims does "
            "not name are compiled in. Pass a number as a tensor, name a size in dims"
        )

    def called_from_compiled_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call where Dynamo is watching; it must not compile what is here."""
        # A skip mark holds for one frame, disable() for all that it calls, too.
        # https://docs.pytorch.org/docs/stable/compile/programming_model.skipped_functions.html
        return torch.compiler.disable(self._warn_and_call)(args, kwargs)

    def _warn_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = self.compiler is not None or self.spec.options["compile"] is not None
        if not asked and not self._warned_of_compiling_around:
            self._warned_of_compiling_around = True
            warn_user(
                f"bucketed: a compiled function calls {self.name}, which runs uncompiled: "
                "torch.compile stops at a bucketed function, so that what it compiles is padded. "
                "Let bucketed compile each bucket: bucketed(..., compile=True), or compile={'mode':"
                " ...} with torch.compile's arguments (in place of torch.compile around it, or of "
                "TrainingArguments(torch_compile=True)); compile=False keeps it uncompiled"
            )
        return self(args, kwargs)

    # ---- besides calls ----

    def verify(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check these inputs, whatever was checked before."""
        plan, call = self.look_up(args, kwargs)
        if not self.prove(plan, call, anew=True):
            raise ValueError(
                f"bucketed: nothing to check: {sizes_of(plan)}, so nothing is padded; pass shorter "
                "inputs, or a mask that says what is"
            )


def _cloned(output: Any) -> Any:
    """Copy tensors out of the memory of a CUDA graph, which the next call overwrites."""
    leaves, _ = flatten(output)
    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(copies, output)


# ---- what bucketed() returns ----


class Methods:
    """What a bucketed function and a bucketed module have besides their call."""

    __slots__ = ()

    def _bucketed_caller(self) -> Caller:
        raise NotImplementedError

    def stats(self) -> BucketedStats:
        """Return what has run so far: calls, buckets, waste, compile time, graphs, sizes seen."""
        return stats_of(self._bucketed_caller())

    def warmup(self, *example: Any, **keywords: Any) -> None:
        """Compile and check every bucket, the largest first, so that no call waits for it.

        The example is cut or padded to the size of the bucket, which is compiled (with gradients
        on, the backward too), and to the smallest size that enters it, with which padding is
        checked and sizes of outputs are derived. Parameters, buffers, gradients and RNG state
        stay as they are; an argument that the function writes does not. Padding that changes the
        answer is a warning.

        Args:
            example: arguments as in a call.
            keywords: those by name.

        Raises:
            torch.OutOfMemoryError, RuntimeError: a bucket does not fit into memory.
            ValueError: ``buckets`` was left out, and no call has made one yet.
        """
        warm_up(self._bucketed_caller(), example, keywords)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Check these inputs now: raise unless padding leaves answer and gradients as they are.

        Raises:
            PaddingLeakError: padding changes the answer or a gradient.
            ValueError: nothing of the inputs is padding.
        """
        self._bucketed_caller().verify(inputs, keywords)


class Bucketed(Methods, Generic[_Result_co]):
    """What :func:`bucketed` returns for a function.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> double = bucketed(lambda x: 2 * x, dims=({0: "t"},), buckets=Buckets([4, 8]))
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().hits
        {(4,): 1}
    """

    __name__: str

    def __init__(self, function: Callable[..., _Result_co], options: Options) -> None:
        functools.update_wrapper(self, function)
        vars(self).pop("stats", None)  # what verified() has put on a function
        self._given = function
        self._options = options
        original, compiler = compiler_for(function, options["compile"])
        self._caller = Caller(original, compiler, options)

    def _bucketed_caller(self) -> Caller:
        return self._caller

    def __call__(self, *args: Any, **kwargs: Any) -> _Result_co:
        """Pad, run, slice."""
        caller = self._caller
        if _torch.frame_callback() not in NOT_TRACING:
            return caller.called_from_compiled_code(args, kwargs)  # type: ignore[no-any-return]
        return caller(args, kwargs)  # type: ignore[no-any-return]

    def __set_name__(self, owner: type, name: str) -> None:
        raise TypeError(
            f"bucketed: {owner.__name__}.{name} is wrapped in the body of its class, but each "
            f"instance needs graphs of its own: wrap the instance, bucketed({owner.__name__}(...), "
            f"...), or its method, self.{name} = bucketed(self.{name}, ...) in __init__"
        )

    def __torchguard_compile__(self, settings: Settings) -> Bucketed[_Result_co]:
        """Return the same with other settings for ``torch.compile``."""
        compile_ = settings(self._given, self._options["compile"])
        return Bucketed(self._caller.function, {**self._options, "compile": compile_})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds a decorated function under its name; it is this object itself.
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Bucketed, (self._given, self._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As what it wraps: a function is the same after a deepcopy, a bound method is another.
        given = copy.deepcopy(self._given, memo)
        return self if given is self._given else Bucketed(given, self._options)

    def __repr__(self) -> str:
        return f"<bucketed {getattr(self, '__qualname__', self._given)!s}>"


# None: Dynamo is off. False: it runs what is compiled, and compiles nothing.
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/eval_frame.c
NOT_TRACING = frozenset({None, False})
"""What Dynamo's frame callback is outside of a compiled function."""

_torch.mark_untraced(Bucketed.__call__)
