"""A call: flatten the arguments, look up the route, pad, run, slice the output.

Nothing else writes the routes. The first call of a shape makes one: its padding is proven, its
graph is compiled, and how much of its output is real is derived.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchguard import _torch
from torchguard._absent import ABSENT
from torchguard._events import record, warn_user
from torchguard._pytree import flatten, unflatten
from torchguard._torch import uncompiled
from torchguard.bucketing.decorator.graphs import COMPILE_LOCK, RECOMPILE_LIMIT, Compiler, Graph
from torchguard.bucketing.decorator.proof import prove
from torchguard.bucketing.decorator.real import (
    FlatOutput,
    OutputShapes,
    Slices,
    count_real,
    kind_of,
    make_extras,
    real_of,
    rows_of,
    slice_output,
    told_by_caller,
    written,
)
from torchguard.bucketing.decorator.shape import (
    PLAIN,
    Call,
    Shape,
    Signature,
    leaf_key,
    number_key,
    padded,
    shape_of,
)
from torchguard.bucketing.decorator.spec import BucketedOptions, Spec
from torchguard.bucketing.decorator.stats import BucketedStats, Counts
from torchguard.errors import PaddingLeakError
from torchguard.state.walk import modules_reached

# Each distinct shape of the inputs has a route of some kilobytes, and may have a proof of its own.
_KEPT = 8192

_GROWS = 2.0
"""A bucket is checked again if it gets more than so many times the padding it had then: in
bfloat16 one padded position of 256 may be rounding."""


@dataclass
class Route:
    """What to do with a call whose inputs have certain shapes."""

    signature: Signature
    shape: Shape
    graph: Graph
    extras: dict[str, torch.Tensor]
    """Masks and lengths that the caller does not give, by argument."""
    told: bool
    """Whether the caller says how much is real, by a mask or by lengths."""
    real: int
    """How many cells there are: with a batch and a length it counts tokens."""
    padded: int
    pads: Mapping[int, Callable[..., torch.Tensor]]
    slices: dict[Any, Slices] = field(default_factory=dict)
    """What to take of an output, by its structure and shapes."""
    ready: bool = False
    """Whether the next call has nothing to prove or to compile."""


class Runner:
    """Runs one function through its buckets."""

    def __init__(
        self,
        function: Callable[..., Any],
        compiler: Compiler | None,
        options: BucketedOptions,
        owner: tuple[Any, ...] = (),
    ) -> None:
        """``owner`` comes first in what the function is given: a module for its forward."""
        self.function, self.owner, self.compiler = function, owner, compiler
        self.spec = Spec.of(function, options, bound=bool(owner))
        self.says_compile = options["compile"] is not None
        self.counts = Counts()
        self._outputs = OutputShapes(function, self.spec)
        self._uncompiled = Graph(function)
        self._lock = threading.Lock()
        self._routes: dict[Any, Route] = {}
        # Dynamo compiles anew for each global state anyway, and it moves the entry it uses to the
        # front of its list: another thread may miss its own.
        self._graphs: dict[Any, Graph] = {}
        self._proofs: dict[Any, list[tuple[float, ...]]] = {}
        """How much padding was checked for what was real, by axis: of a bucket and kind of call."""
        self._global_state: Callable[[], tuple[Any, ...]] | None = None
        self._warned = self._warned_of_compiling_around = False
        self._always = self.spec.check_padding == "always"

    # ---- in every call ----

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function: pad, run, slice."""
        route, call = self.look_up(args, kwargs)
        if not route.ready or self._always:
            return self._first_call(route, call)
        return self._run(route, route.graph.run, call)

    def look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Route, Call]:
        """Return the route of a call, and the call."""
        global_state = (self._global_state or self._global_state_for())()
        arguments = [*args, *kwargs.values()] if kwargs else list(args)
        # The key of the route: all that it, or a compiled graph, depends on.
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
        route = self._routes.get(tuple(key))
        if route is None:
            route = self._new_route(tuple(key), global_state, args, kwargs)
        return route, Call(route.signature, self.owner, arguments, leaves)

    def _run(self, route: Route, run: Callable[..., Any], call: Call) -> Any:
        """Run a call, slice its output, and count it."""
        if route.extras and written(route.extras):
            route.extras = make_extras(self.spec, call, route.shape)
        # On an accelerator this is a tensor, which only the device knows.
        real: Any = route.real
        if route.told:
            real = count_real(self.spec, route.shape, call, real)
        args, kwargs = call.bind(route.extras, padded(route.pads, call.leaves))
        output = run(*args, **kwargs)
        if route.graph.cuda_graphs:
            output = _cloned(output)
        if route.pads:
            sliced = slice_output(route.slices, output)
            output = self.learn(route, call, output) if sliced is ABSENT else sliced
        self.counts.add(route.shape.real, route.shape.bucket, real, route.padded)
        return output

    def learn(self, route: Route, call: Call, output: Any) -> Any:
        """Take the real part of an output of a new kind."""
        with COMPILE_LOCK, uncompiled():
            flat = FlatOutput.of(output)
            found = self._outputs.slices(route.shape, call, route.extras, flat)
        route.slices[kind_of(output)] = found
        return slice_output(route.slices, output)

    def _global_state_for(self) -> Callable[[], tuple[Any, ...]]:
        """Return what reads whether gradients, inference mode, autocast and training are on."""
        # Weak: a function looks its globals up by name, so they may be gone before it is.
        modules = [weakref.ref(each) for each in modules_reached(self.function, self.owner)]

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

    # ---- the route of a shape ----

    def _new_route(self, key: Any, state: tuple[Any, ...], args: Any, kwargs: Any) -> Route:
        call = Call.of(self.spec, self.owner, args, kwargs)
        shape = shape_of(self.spec, call, state)
        transformed = shape.specialization.transformed
        extras: dict[str, torch.Tensor] = {}
        told, rows = False, 1
        if self.spec.masks or self.spec.lengths:
            extras = make_extras(self.spec, call, shape)
            found = [] if transformed else told_by_caller(self.spec, shape.inputs, call)
            told, rows = bool(found), rows_of(found)
        route = Route(
            signature=call.signature,
            shape=shape,
            graph=self._uncompiled,
            extras=extras,
            told=told,
            real=rows * math.prod(shape.real),
            padded=rows * math.prod(shape.bucket),
            pads=shape.pads,
        )
        with self._lock:
            # torch.compile imports Dynamo, which takes seconds: not before something compiles.
            # It runs what is inside a transform of torch.func uncompiled.
            if self.compiler is not None and not transformed:
                of_graph = shape.padded, shape.specialization.global_state
                if of_graph not in self._graphs:
                    made = Graph.compiled(self.function, self.compiler, shape)
                    self._graphs[of_graph] = made
                route.graph = self._graphs[of_graph]
            if len(self._routes) >= _KEPT:
                self._routes.clear()
            self._routes[key] = route
        return route

    # ---- the first call of a shape ----

    def _first_call(self, route: Route, call: Call) -> Any:
        """Prepare the route for this call, and run it: prove, compile, derive."""
        proven = self.prove(route, call)
        output = self._run(route, self.first_run(route), call)
        # A call that has come without padding says nothing of the next, whose mask may.
        route.ready = proven or not route.told
        if len(route.graph.compiled_for) > RECOMPILE_LIMIT and not self._warned:
            self._warn_of_recompiles(route)
        return output

    def prove(self, route: Route, call: Call) -> bool:
        """Check the padding of a call where that is to be done; return whether no other has to."""
        shape, when = route.shape, self.spec.check_padding
        # What arrives at the size of its bucket may be padded all the same.
        if shape.specialization.transformed or when == "never" or not (route.pads or route.told):
            return True
        known = self._proofs.get(shape.kind(), ())
        now = shape.share()
        # By one proof: two axes that were padded each on its own were not padded together.
        covered = any(
            all(n <= _GROWS * s for n, s in zip(now, shares, strict=True)) for shares in known
        )
        if when == "first" and (covered if route.pads else known):
            return True
        return self._check(route, call)

    def verify(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check these inputs, whatever was checked before."""
        route, call = self.look_up(args, kwargs)
        able = not route.shape.specialization.transformed and (route.pads or route.told)
        if not able or not self._check(route, call, anew=True):
            raise ValueError(
                f"bucketed: nothing to check: {route.shape}, so nothing is padded; pass shorter "
                "inputs, or a mask that says what is"
            )

    def _check(self, route: Route, call: Call, *, anew: bool = False) -> bool:
        """Prove a call, and note it; raise if padding leaks. Return whether there was any."""
        shape = route.shape
        # Meta and fake tensors have no numbers to compare, and prove nothing.
        if any(
            call.leaves[each.index].untyped_storage().device.type == "meta" for each in shape.inputs
        ):
            return bool(route.pads)
        real = real_of(self._outputs, shape, call, route.extras)
        if not real.shape.pads or not all(real.shape.real):
            return False  # an empty input has no real part that a run without padding could compute
        try:
            with COMPILE_LOCK, uncompiled():
                leak = prove(self.function, shape, real)
        except Exception as error:
            if route.pads or anew:
                raise
            # Each call comes at a bucket's size, and the function may take no other.
            warn_user(
                "padding-not-checked",
                f"bucketed: the padding of {self.spec.name} can't be checked, because a call that "
                f"has arrived padded ({real.shape}) does not run without it: "
                f"{type(error).__name__}: {error}. check_padding='never' says that it is right",
            )
            return True
        if leak is not None:
            record("padding_leak", "bucketed", leak.what, is_said=True)
            raise PaddingLeakError(f"bucketed: {leak.what}{leak.advice}")
        if real.shape is shape:
            route.slices.update(real.slices)
        with self._lock:
            if len(self._proofs) >= _KEPT:
                self._proofs.clear()
            self._proofs.setdefault(shape.kind(), []).append(real.shape.share())
        return True

    def first_run(self, route: Route) -> Callable[..., Any]:
        """Return what runs a call; where that compiles, once, and what it took is noted."""
        graph, specialization = route.graph, route.shape.specialization
        if graph.code is None or specialization in graph.compiled_for:
            return graph.run

        def run(*args: Any, **kwargs: Any) -> Any:
            with graph.compiling(specialization):
                return graph.run(*args, **kwargs)

        return run

    # ---- what is said of it ----

    def stats(self) -> BucketedStats:
        """Return what was counted so far."""
        with self._lock:
            # Copies: a call of another thread may add one while graphs are counted.
            graphs, proofs = list(self._graphs.values()), list(self._proofs)
        return self.counts.stats(
            name=self.spec.name,
            axes=tuple(self.spec.ladders),
            compile_seconds=sum(each.seconds for each in graphs),
            graphs=sum(each.count for each in graphs),
            compiled=self.compiler is not None,
            proven=tuple(sorted({bucket for bucket, *_ in proofs})),
        )

    def _warn_of_recompiles(self, route: Route) -> None:
        """Warn once that something else than the size differs from call to call."""
        self._warned = True
        compiled_for = route.graph.compiled_for
        keys = dict.fromkeys(itertools.chain.from_iterable(e.unpadded for e in compiled_for))
        values = Counter(label for label, _ in keys)
        differ = [label for label, count in values.items() if count > 1]
        labels = ", ".join(differ) or "grad mode, autocast or the structure"
        warn_user(
            "compiled-too-often",
            f"bucketed: {self.spec.name} was compiled {len(compiled_for)} times for {route.shape}, "
            f"because {labels} differs from call to call: numbers, texts and sizes that dims does "
            "not name are compiled in. Pass a number as a tensor, name a size in dims",
        )

    def called_from_compiled_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call where Dynamo is watching; it must not compile what is here."""
        # A skip mark holds for one frame, disable() for all that it calls, too.
        # https://docs.pytorch.org/docs/stable/compile/programming_model.skipped_functions.html
        return torch.compiler.disable(self._warn_and_call)(args, kwargs)

    def _warn_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = self.compiler is not None or self.says_compile
        if not asked and not self._warned_of_compiling_around:
            self._warned_of_compiling_around = True
            warn_user(
                "bucketed-in-compiled-code",
                f"bucketed: a compiled function calls {self.spec.name}, which runs uncompiled: "
                "torch.compile stops at a bucketed function, so that what it compiles is padded. "
                "Let bucketed compile each bucket: bucketed(..., compile=True), or compile={'mode':"
                " ...} with torch.compile's arguments (in place of torch.compile around it, or of "
                "TrainingArguments(torch_compile=True)); compile=False keeps it uncompiled",
            )
        return self(args, kwargs)


def _cloned(output: Any) -> Any:
    """Copy tensors out of the memory of a CUDA graph, which the next call overwrites."""
    leaves, _ = flatten(output)
    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(copies, output)
