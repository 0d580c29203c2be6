"""The cache of what was found out about a function, in this process and in the file of a plan.

These are proofs of the padding (with how much padding, and which inputs rely on 0 in it), formulas
for the sizes of outputs, and compiled artifacts.

Each proof and each formula goes with the fingerprint that the function had when it was made (see
:mod:`torchguard.bucketing.decorator.fingerprint`). One from a file counts only where the
fingerprint, torch, Python and torchguard are the same. Compiled artifacts need no such check: torch
looks them up by a hash of the graph.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import platform
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchguard import _torch
from torchguard._public import __version__
from torchguard._torch import warn_user
from torchguard.bucketing.decorator.fingerprint import Parts, UnknownValue, fingerprint
from torchguard.bucketing.decorator.plan import Call, Plan, TensorKey
from torchguard.bucketing.decorator.spec import Spec
from torchguard.equivalence.collective import largest_of_all_ranks

_OPTIONS = ("dims", "fill", "mask", "lengths", "outputs", "side")
"""On which an answer depends; those that are left out say when to check and what to compile."""

_NAMED = 3
"""So many changed parts of a function are named in a warning."""

_GROWS = 2.0
"""A bucket is checked again where it gets more than so many times the padding it had then."""


@dataclass
class Proven:
    """What was proven of a function for calls that differ in their sizes alone."""

    neutral: frozenset[str] = frozenset()
    """The inputs that 0 in the padding is neutral for, though another value is not."""
    tried: bool = False
    """Whether the check has run on other data than the caller's."""
    shares: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)
    """By bucket, how much padding it was proven with, for what was real, by axis."""

    def add(self, plan: Plan) -> None:
        """Note that its bucket is proven with its padding."""
        bucket, now = tuple(plan.buckets.values()), _share_of_padding(plan)
        # A proof with more padding stays one: only more than it had has to be shown again.
        self.shares[bucket] = tuple(map(max, self.shares.get(bucket, now), now))


def _share_of_padding(plan: Plan) -> tuple[float, ...]:
    """Return how much padding there is for what is real, by axis."""
    # Of the shortest rank: the others have decided the same.
    sizes = plan.shortest or plan.sizes
    return tuple(
        (bucket - sizes[axis]) / max(sizes[axis], 1) for axis, bucket in plan.buckets.items()
    )


def _covers(shares: Iterable[float] | None, plan: Plan) -> bool:
    """Whether a proof with so much padding is one for a plan: with about as much, or with less."""
    return shares is not None and all(
        now <= _GROWS * before for now, before in zip(_share_of_padding(plan), shares, strict=True)
    )


class ProofCache:
    """The proofs, formulas and compiled artifacts of one function.

    Args:
        function: what runs, not compiled.
        spec: what was declared of it, and the plan.
        name: of the function, for messages.
        compiles: whether anything compiles it.

    Raises:
        ValueError: the plan is damaged.
    """

    def __init__(
        self, function: Callable[..., Any], spec: Spec, name: str, *, compiles: bool
    ) -> None:
        self._function = function
        self._spec = spec
        self._name = name
        self._compiles = compiles
        self._proven: dict[Any, Proven] = {}
        self._lock = threading.Lock()
        self._functions: list[Parts] = []
        # What was loaded never holds what this process has added: that is in self._proven, whose
        # own rules say when to check again.
        self._loaded: dict[str, dict[str, Any]] = {"proofs": {}, "formulas": {}}
        self._added: dict[str, dict[str, Any]] = {"proofs": {}, "formulas": {}}
        self._compiled: Any = None
        self._unknown: str | None = None
        self._has_warned = False
        self._latest: tuple[Plan, Parts | UnknownValue] | None = None
        if spec.plan is not None and spec.plan.cache:
            self._load(spec.plan.cache)

    def _load(self, saved: Mapping[str, Any]) -> None:
        assert self._spec.plan is not None
        try:
            changed = [
                f"{name} is {now}, and was {saved[name]}"
                for name, now in _versions().items()
                if now != saved[name]
            ]
            ladder, compiled = saved["ladder"], saved["compiled"]
            if not changed:
                self._compiled = compiled
                self._functions = [dict(each) for each in saved["functions"]]
                for kind, entries in self._loaded.items():
                    entries.update({key: dict(each) for key, each in saved[kind].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"bucketed: {self._spec.plan.path!r} is damaged: {error!r}") from None
        if changed:
            self._warn_of_change(" and ".join(changed))
        elif ladder != self._ladder():
            # Buckets that were there before are proven still.
            now, before = (
                ", ".join(f"{axis}: {' '.join(map(str, sizes))}" for axis, sizes in each.items())
                for each in (self._ladder(), ladder)
            )
            self._warn_of_change(f"the buckets are {now}, and were {before}")

    def begin(self) -> None:
        """Begin a call: the function may have another fingerprint than before."""
        self._latest = None

    # ---- proofs of the padding ----

    @property
    def relies_on_zero(self) -> tuple[str, ...]:
        """All inputs whose answer relies on 0 in the padding."""
        proven = list(self._proven.values())
        return tuple(dict.fromkeys(label for each in proven for label in each.neutral))

    def unproven(self, plan: Plan, call: Call, *, anew: bool = False) -> Proven | None:
        """Begin a call; return what was proven so far, if its padding has to be checked.

        All ranks of a group say the same, because a check has collectives.

        Args:
            plan: how the call is padded.
            call: not padded.
            anew: check it whatever was proven.
        """
        self.begin()
        if not anew and self._is_proven(plan, call):
            return None
        proven = self._proven_like(plan)
        # Before it runs: a proof is of the function as it is now, whoever changes it meanwhile.
        with contextlib.suppress(UnknownValue):
            self._fingerprint(plan, call)
        return proven

    def _is_proven(self, plan: Plan, call: Call) -> bool:
        when = self._spec.options["check_padding"]
        if when == "never" or not plan.buckets or plan.specialization.transformed:
            return True
        if plan.shortest:
            # The same question on every rank, whatever its own sizes: all of them check or none.
            padded = plan.shortest != plan.buckets
        else:
            # An empty input has no real part that a run without padding could compute.
            padded = bool(plan.pads) and all(plan.sizes.values())
        if not padded:
            return True
        if when == "always":
            return False
        proven = self._proven_like(plan)
        known = _covers(proven.shares.get(tuple(plan.buckets.values())), plan)
        return known or self._load_proof(plan, call, proven)

    def _load_proof(self, plan: Plan, call: Call, proven: Proven) -> bool:
        """Whether the plan has a proof for a call's bucket; if so, it is added to ``proven``."""
        if self._spec.plan is None:
            return False
        found = self._look_up("proofs", self._proof_key(plan), plan, call)
        holds = found is not None and _covers(found["shares"], plan)
        group = self._spec.options["group"]
        if group is not None:
            (missing,) = largest_of_all_ranks(group, [int(not holds)])
            holds = not missing
        if holds and found is not None:
            proven.shares[tuple(plan.buckets.values())] = tuple(found["shares"])
            proven.neutral = proven.neutral.union(found["neutral"])
            proven.tried = proven.tried or found["tried"]
        return holds

    def add_proof(self, plan: Plan, call: Call) -> None:
        """Add that a call's bucket was proven, if the function has a fingerprint."""
        known = self._proven_like(plan)
        entry = {
            "shares": known.shares[tuple(plan.buckets.values())],
            "neutral": sorted(known.neutral),
            "tried": known.tried,
        }
        self._add("proofs", self._proof_key(plan), plan, call, entry)

    def _proven_like(self, plan: Plan) -> Proven:
        """Return what was proven for calls like that of a plan; to be added to."""
        return self._proven.setdefault(self._specialization(plan), Proven())

    def _proof_key(self, plan: Plan) -> tuple[Any, ...]:
        """Return what a proof is of: the bucket, and what leads the function another way."""
        return (*plan.buckets.values(), *self._specialization(plan))

    def _specialization(self, plan: Plan) -> tuple[Any, ...]:
        # With labels a model computes a loss, so which inputs there are counts as well. Switches
        # may differ between ranks, and all of them have to check at the same time; so may masks.
        state, labels = plan.specialization.global_state, [each.label for each in plan.inputs]
        if plan.shortest:
            return state, *(label for label in labels if label not in self._spec.masks)
        structure, others = plan.specialization.structure, plan.specialization.others
        # Switches may lead the function another way; sizes and fractions do not.
        switches = [
            (label, None if isinstance(key, (TensorKey, float)) else key) for label, key in others
        ]
        return state, structure, *switches, *labels

    # ---- formulas for the sizes of outputs ----

    def formula(self, plan: Plan, call: Call, key: Any) -> Any:
        """Return what the plan has of a run without data; None if it has nothing."""
        found = self._look_up("formulas", key, plan, call)
        return None if found is None else found["formula"]

    def add_formulas(self, plan: Plan, call: Call) -> None:
        """Add what was derived in this call, whether it has failed or not."""
        for key, formula in plan.derived:
            self._add("formulas", key, plan, call, {"formula": formula})
        plan.derived.clear()

    # ---- compiled artifacts ----

    def load_compiled(self) -> None:
        """Give torch's caches the compiled artifacts, once, before anything is compiled."""
        with self._lock:
            compiled, self._compiled = self._compiled, None
        if compiled is None:
            return
        problem = _torch.load_artifacts(compiled)
        if problem is not None and self._spec.plan is not None:
            warn_user(f"bucketed: {self._spec.plan.path}: what was compiled is not used: {problem}")

    # ---- the file ----

    def document(self) -> dict[str, Any]:
        """Return the cache as what JSON can hold, for :func:`write_plan`."""
        compiled = None
        if self._compiles:
            compiled, problem = _torch.save_artifacts()
            if problem is not None:
                warn_user(f"bucketed: save_plan keeps nothing of what was compiled: {problem}")
        with self._lock:
            # What was loaded and not used stays in the file, with the function that it is of.
            entries = {kind: {**self._loaded[kind], **self._added[kind]} for kind in self._loaded}
            used = sorted({each["of"] for kind in entries.values() for each in kind.values()})
            functions = [self._functions[index] for index in used]
        if self._unknown is not None:
            warn_user(
                f"bucketed: save_plan keeps no proof of the padding: {self._name} has no "
                f"fingerprint, because {self._unknown}"
            )
        renumbered = {
            kind: {key: {**each, "of": used.index(each["of"])} for key, each in found.items()}
            for kind, found in entries.items()
        }
        return {
            **_versions(),
            "ladder": self._ladder(),
            "functions": functions,
            **renumbered,
            "compiled": compiled,
        }

    def _ladder(self) -> dict[str, list[Any]]:
        return {
            " x ".join(each.axes): [list(b) if isinstance(b, tuple) else b for b in each.buckets]
            for each in self._spec.ladders.values()
            if each.buckets is not None
        }

    # ---- entries, each with the fingerprint of the function that it is of ----

    def _look_up(self, kind: str, key: Any, plan: Plan, call: Call) -> Any:
        """Return an entry that was loaded, if the function has the fingerprint that it had then."""
        if not self._loaded[kind]:
            return None
        try:
            found = self._loaded[kind].get(_digest(key))
            if found is None:
                return None
            now = self._fingerprint(plan, call)
        except UnknownValue as error:
            self._warn_of_change(f"{self._name} has no fingerprint, because {error}")
            return None
        before = self._functions[found["of"]]
        if before != now:
            self._warn_of_change(_differences(before, now))
            return None
        return found

    def _add(self, kind: str, key: Any, plan: Plan, call: Call, entry: dict[str, Any]) -> None:
        try:
            digest, now = _digest(key), self._fingerprint(plan, call)
        except UnknownValue as error:
            self._unknown = str(error)
            return
        with self._lock:
            if now not in self._functions:
                self._functions.append(now)
            self._added[kind][digest] = {**entry, "of": self._functions.index(now)}

    def _fingerprint(self, plan: Plan, call: Call) -> Parts:
        """Return the fingerprint of the function, and of the modules it is given, in this call.

        Raises:
            UnknownValue: it has none.
        """
        if self._latest is None or self._latest[0] is not plan:
            self._latest = (plan, self._new_fingerprint(plan, call))
        parts = self._latest[1]
        if isinstance(parts, UnknownValue):
            raise parts
        return parts

    def _new_fingerprint(self, plan: Plan, call: Call) -> Parts | UnknownValue:
        given = zip(plan.labels, call.leaves, strict=True)
        roots = {
            "the function": self._function,
            **dict(zip(("self",), call.owner, strict=False)),
            **{label: leaf for label, leaf in given if isinstance(leaf, torch.nn.Module)},
        }
        inputs = {
            each.label: (call.leaves[each.index].dtype, each.device.type) for each in plan.inputs
        }
        options: Mapping[str, Any] = self._spec.options
        settings = {f"option {name}": options[name] for name in _OPTIONS if options[name]}
        try:
            return fingerprint(roots, {**settings, "dtype or device of the inputs": inputs})
        except UnknownValue as error:
            return error

    def _warn_of_change(self, changed: str) -> None:
        """Warn once of what the plan does not hold for."""
        if self._has_warned or self._spec.plan is None:
            return
        self._has_warned = True
        warn_user(
            f"bucketed: {self._spec.plan.path}: {changed}: what the plan has kept of that is not "
            "used; padding is checked and sizes of outputs are derived again"
        )


def _versions() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "torchguard": __version__,
    }


def key_text(key: Any) -> str:
    """Return a text for a key of plain values and types that is equal in every process.

    Raises:
        UnknownValue: there is none.
    """
    if isinstance(key, (tuple, list)):
        return f"({', '.join(map(key_text, key))})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(key_text, key)))}}}"
    if isinstance(key, type):
        return _type_name(key)
    if isinstance(key, enum.Enum):
        return f"{_type_name(type(key))}.{key.name}"
    if isinstance(key, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return f"{type(key).__name__} {key!r}"
    raise UnknownValue(f"an object of type {type(key).__name__} is in a key")


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(key: Any) -> str:
    return hashlib.sha256(key_text(key).encode()).hexdigest()[:24]


def _differences(before: Parts, now: Parts) -> str:
    """Name what has changed, is new, or is gone."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    new = [name for name in now if name not in before]
    gone = [name for name in before if name not in now]
    for names, verb in ((changed, "changed"), (new, "is new"), (gone, "is gone")):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return f"{', '.join(names[:_NAMED])}{more} {verb}"
    return "the order of its parts has changed"
