"""The check of a call in eager code.

On a CPU the values are looked at before the call, and an error is raised before anything is
written. On other devices that would wait for the device: the call gets values that are clamped
into the range, so that no kernel's assert fires, and the smallest and largest value stay in the
device's memory until :class:`Flags` reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch

from torchguard._torch import computing_unseen, user_line, values_can_be_read
from torchguard.checks.table import Check, Row
from torchguard.errors import IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError

Report = Literal["step", "call"]

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_MASKS = frozenset((torch.bool, torch.uint8))
_ERRORS = {
    "index": IndexOutOfRangeError,
    "value": ValueOutOfRangeError,
    "divisor": ZeroDivisorError,
}


class Site(NamedTuple):
    """One checked argument of one call."""

    function: str
    argument: str
    kind: str
    low: Any
    high: Any
    line: str = ""
    """``file.py:12``, where the call is not on the stack when the error is raised."""

    def allows(self, smallest: Any, largest: Any) -> bool:
        """Whether these are in range; NaN is not."""
        return (self.low is None or smallest >= self.low) and (
            self.high is None or largest <= self.high
        )

    def error(self, smallest: Any, largest: Any, place: str = "") -> Exception:
        """Make the error."""
        where = f" at {self.line}" if self.line else ""
        if self.kind == "divisor":
            text = f"the divisor {self.argument} has zeros{place}"
        else:
            allowed = f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"
            text = (
                f"{self.argument} is out of range: expected {allowed}, got values from "
                f"{smallest} to {largest}{place}"
            )
        return _ERRORS[self.kind](f"{self.function}{where}: {text}")


# ---- what is on ----


class Scope:
    """One ``with checked():``, or the whole process under ``install("checks")``."""

    def __init__(self, report: Report, *, reads_at_once: Callable[[torch.Tensor], bool]) -> None:
        self.flags = Flags(report)
        self.reads_at_once = reads_at_once
        """Whether the values of a tensor can be looked at without waiting: those on a CPU."""


_innermost: ContextVar[Scope | None] = ContextVar("torchguard.checks", default=None)
_process: Scope | None = None


def current() -> Scope | None:
    """Return the scope this thread or task is in, or that of the process."""
    return _innermost.get() or _process


def enter(scope: Scope | None) -> Scope | None:
    """Let this scope be the innermost one; returns the one before."""
    before = _innermost.get()
    _innermost.set(scope)
    return before


def check_process(scope: Scope | None) -> None:
    """Check every thread that is in no scope of its own, or stop with it."""
    global _process
    _process = scope


def process_scope() -> Scope | None:
    """Return the scope of the process, if there is one."""
    return _process


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


# ---- one argument ----


def checked_value(  # noqa: PLR0913, PLR0917
    scope: Scope,
    function: str,
    check: Check,
    values: torch.Tensor,
    allowed: tuple[Any, Any],
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Return what to call the function with; the same tensor where the values were read.

    Raises:
        IndexOutOfRangeError: of the kind that the check is, where values are out of range.
    """
    low, high = allowed
    with computing_unseen():
        if not scope.reads_at_once(values):
            site = Site(function, check.argument, check.kind, low, high, user_line())
            unread = None if check.unread is None else check.unread(given)
            return scope.flags.note(site, values, unread)
        seen = extremes(check.kind, values)
        site = Site(function, check.argument, check.kind, low, high)
        if _allows(site, seen):
            return values
        unread = None if check.unread is None else check.unread(given)
        if unread is not None and _allows(site, extremes(check.kind, values[~unread])):
            return values
        raise _described(site, values, unread)


def _allows(site: Site, seen: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    if seen is None:
        return True
    if site.kind == "divisor":
        return bool(seen[0])
    return site.allows(seen[0].item(), seen[1].item())


def extremes(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the smallest and the largest value, of divisors whether none is zero."""
    if not values.numel():
        return None
    values = values.detach()
    if kind == "divisor":
        whole = values.all()
        return whole, whole
    # ((values < low) | (values > high)).any() takes 80 times as long.
    smallest, largest = torch.aminmax(values)
    return smallest, largest


def _described(site: Site, values: torch.Tensor, unread: torch.Tensor | None) -> Exception:
    """Make the error with how many are out of range and the first place; it may take its time."""
    values = values.detach()
    if site.kind == "divisor":
        outside = values == 0
    else:
        outside = ~torch.ones_like(values, dtype=torch.bool)
        if site.low is not None:
            outside |= ~(values >= site.low)
        if site.high is not None:
            outside |= ~(values <= site.high)
    if unread is not None:
        outside &= ~unread
    first = outside.nonzero()[0].tolist()
    found = values[outside]
    place = f"; {len(found)} of {values.numel()} are outside"
    if first:
        place += f", the first is {site.argument}{first}"
    if site.kind == "divisor":
        place = f": {len(found)} of {values.numel()} values, the first is {site.argument}{first}"
        return site.error(0, 0, place)
    read = values if unread is None else values[~unread]
    smallest, largest = torch.aminmax(read)
    return site.error(smallest.item(), largest.item(), place)


class Flags:
    """What was seen on devices, kept there until it is read.

    One call takes the reduction and the clamp. A slot holds the smallest and largest value that
    one call saw; all slots of one device and dtype are read in one go.
    """

    SLOTS = 512

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._slots: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._sites: dict[tuple[torch.device, torch.dtype], list[Site]] = {}

    def note(self, site: Site, values: torch.Tensor, unread: torch.Tensor | None) -> torch.Tensor:
        """Keep what was seen at a site, and return values that no kernel refuses."""
        detached = values.detach()
        if site.kind == "divisor":
            self.keep([site], *_pair((detached != 0).to(torch.int8).amin()))
            return values
        filler = 0 if site.low is None else site.low
        read = detached if unread is None else detached.masked_fill(unread, filler)
        if read.numel():
            self.keep([site], *torch.aminmax(read))
        return clamped(site, values, unread)

    def keep(self, sites: list[Site], smallest: torch.Tensor, largest: torch.Tensor) -> None:
        """Keep one value, or one for each site, in slots; raises at once under ``"call"``."""
        key = (smallest.device, smallest.dtype)
        with self._lock:
            waiting = self._sites.setdefault(key, [])
            if len(waiting) + len(sites) > self.SLOTS:
                self._read()
                waiting = self._sites.setdefault(key, [])
            if key not in self._slots:
                self._slots[key] = torch.zeros((2, self.SLOTS), device=key[0], dtype=key[1])
            place = slice(len(waiting), len(waiting) + len(sites))
            self._slots[key][:, place] = torch.stack((smallest, largest)).reshape(2, -1)
            waiting += sites
            if self._report == "call":
                self._read()

    def read(self) -> None:
        """Wait for the devices; raise for the first site that has seen a value out of range."""
        if self._sites:
            with self._lock, computing_unseen():
                self._read()

    def _read(self) -> None:
        taken, self._sites = self._sites, {}
        for key, sites in taken.items():
            for site, *seen in zip(sites, *self._slots[key][:, : len(sites)].tolist(), strict=True):
                bad = seen[0] == 0 if site.kind == "divisor" else not site.allows(*seen)
                if bad:
                    raise site.error(*seen)


def _pair(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return value, value


def clamped(site: Site, values: Any, unread: Any) -> Any:
    """Return the values in range, those that are never read as they are; of a graph's node too."""
    if site.kind == "value":
        inside = torch.nan_to_num(values, 0.0, site.high, site.low).clamp(site.low, site.high)
    elif site.kind == "divisor":
        inside = torch.where(values == 0, torch.ones_like(values), values)
    else:
        inside = values.clamp(site.low, site.high)
    return inside if unread is None else torch.where(unread, values, inside)


# ---- one call ----


def bind(row: Row, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's arguments by name."""
    return {**dict(zip(row.parameters, args, strict=False)), **kwargs}


def rebound(
    row: Row, args: tuple[Any, ...], kwargs: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with some of them exchanged."""
    names = row.parameters
    return (
        tuple(new.get(names[i], each) if i < len(names) else each for i, each in enumerate(args)),
        {name: new.get(name, each) for name, each in kwargs.items()},
    )


def guard_call(row: Row, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments of a function that is in the table."""
    divides = all(check.kind == "divisor" for check in row.checks)

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is None or (divides and len(args) > 1 and type(args[1]) is float):
            return original(*args, **kwargs)
        given = bind(row, args, kwargs)
        new: dict[str, Any] = {}
        for check in row.checks:
            values = given.get(check.argument)
            if not can_check(check.kind, values) or not values_can_be_read(values):
                continue
            allowed = _allowed(check, given)
            if allowed is not None:
                value = checked_value(scope, name, check, values, allowed, given)
                if value is not values:
                    new[check.argument] = value
        if new:
            args, kwargs = rebound(row, args, kwargs, new)
        return original(*args, **kwargs)

    return function


def can_check(kind: str, values: Any) -> bool:
    """Whether an argument is a tensor of a dtype that the check is for."""
    if not isinstance(values, torch.Tensor):
        return False
    return values.dtype.is_floating_point if kind == "value" else values.dtype in _INTEGERS


def _allowed(check: Check, given: Mapping[str, Any]) -> tuple[Any, Any] | None:
    def sizes(argument: str, dim: Any) -> int:
        tensor = given[argument]
        if dim is None or not tensor.dim():
            return int(tensor.numel())
        return int(tensor.size(dim))

    try:
        return check.range(given, sizes)
    except (AttributeError, IndexError, KeyError):  # torch says what is wrong with the call
        return None


# ---- x[index] ----


def indexed_dims(index: tuple[Any, ...], dims: int) -> Iterator[tuple[int, int]]:
    """Yield the place of each item with indices, and the dim that they are into."""
    taken = [_dims_taken(item) for item in index]
    dim = 0
    for place, item in enumerate(index):
        if item is Ellipsis:
            dim += dims - sum(taken)
        elif isinstance(item, torch.Tensor) and item.dtype in _INTEGERS - _MASKS:
            yield place, dim
        dim += taken[place]


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in _MASKS
    return int(item.dim()) if is_mask else 1


def guard_indexing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Check ``x[index]``, ``x[index] = v`` and ``index_put``."""
    fills = "index_put" in name  # None is a whole dim there, and a new one in x[index]
    shown = "x[index]" if name == "__getitem__" else name.replace("__setitem__", "x[index] = ...")

    def function(*args: Any, **kwargs: Any) -> Any:
        index = args[1] if len(args) > 1 else kwargs.get("indices")
        kind = type(index)
        if kind is int or kind is slice:
            return original(*args, **kwargs)
        scope = current()
        if scope is None or not isinstance(args[0], torch.Tensor):
            return original(*args, **kwargs)
        found = _indices(index, args[0], fills=fills)
        new: list[Any] | None = None
        for place, dim in indexed_dims(tuple(found), args[0].dim()):
            values, size = found[place], args[0].size(dim) if dim < args[0].dim() else 0
            if values_can_be_read(values) and values_can_be_read(args[0]):
                check = Check("index" if len(found) == 1 else f"index {place}", lambda *_: None)
                value = checked_value(scope, shown, check, values, (-size, size - 1), {})
                if value is not values:
                    new = list(found) if new is None else new
                    new[place] = value
        if new is None:
            return original(*args, **kwargs)
        rest = args[2:] if len(args) > 1 else ()
        kwargs.pop("indices", None)
        return original(args[0], tuple(new), *rest, **kwargs)

    return function


def _indices(index: Any, tensor: torch.Tensor, *, fills: bool) -> list[Any]:
    """Return the items of an index, lists of integers as tensors."""
    items = list(index) if isinstance(index, tuple) or fills else [index]
    if fills:
        return [slice(None) if item is None else item for item in items]
    return [
        torch.tensor(item, device=tensor.device)
        if type(item) is list and item and all(type(each) is int for each in item)
        else item
        for item in items
    ]


