"""The check of a call in eager code.

On a CPU the values are looked at before the call, and an error is raised before anything is
written. On other devices that would wait for the device: the call gets values that are clamped
into the range, so that no kernel's assert fires, and the smallest and largest value stay in the
device's memory until :class:`Flags` reads them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.overrides import has_torch_function

from torchguard._events import record, user_line
from torchguard._torch import (
    C_NAMESPACE,
    computing_unseen,
    original_of,
    patch,
    show_overriding,
    shown_for,
    values_can_be_read,
)
from torchguard.checks.table import Check, Row, wrapping
from torchguard.errors import IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError
from torchguard.state.process import accelerator

SWITCH = patch.Switch()
"""Whether the guard "checks" is on."""

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_MASKS = frozenset((torch.bool, torch.uint8))
_INDICES = _INTEGERS - _MASKS
_NUMPY_MASKS = (np.bool_, np.uint8)
_LISTS = (list, tuple)
_NUMBERS = (int, np.integer)
_ERRORS = {
    "index": IndexOutOfRangeError,
    "value": ValueOutOfRangeError,
    "divisor": ZeroDivisorError,
}


# Not what the guards have put there: this ``out=``, and this look at a value, are ours.
_aminmax, _item = original_of(torch.aminmax), original_of(torch.Tensor.item)


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
        return bool(self.low is None or smallest >= self.low) and bool(
            self.high is None or largest <= self.high
        )

    def error(self, smallest: Any, largest: Any, places: str = "") -> Exception:
        """Make the error."""
        where = f" at {self.line}" if self.line else ""
        allowed = f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"
        text = f"expected {allowed}, got {smallest} to {largest}"
        if self.kind == "divisor":
            text = "an integer can't be divided by zero (ZeroDivisionError)"
        error = _ERRORS[self.kind](f"{self.function}{where}: {self.argument}: {text}{places}")
        record("out_of_range", "checks", str(error), is_said=True)
        return error


# ---- what was seen on devices ----


class Flags:
    """What calls on devices have seen, kept there until it is read."""

    MOST = 512
    """How many calls may wait to be read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[Site], torch.Tensor]] = []
        self._streams: set[torch.Stream] = set()
        """The streams that make what waits."""
        self._lock = threading.Lock()

    def keep(self, sites: Sequence[Site], seen: torch.Tensor) -> None:
        """Keep what :func:`raise_outside` takes."""
        with self._lock:
            self._waiting.append((sites, seen))
            if seen.device.type == accelerator():
                self._streams.add(torch.accelerator.current_stream(seen.device))
        if len(self._waiting) > self.MOST:
            self.read()

    def take(self) -> list[tuple[Sequence[Site], torch.Tensor]]:
        """Return what waits to be read, and forget it."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def read(self) -> None:
        """Wait for the devices; raise for the first site that has seen a value out of range."""
        if not self._waiting or is_capturing():
            return
        with self._lock:
            streams, self._streams = self._streams, set()
        for stream in streams:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
        waiting = self.take()
        groups: dict[Any, list[torch.Tensor]] = {}
        with computing_unseen():
            for _, seen in waiting:
                groups.setdefault((seen.device, seen.dtype), []).append(seen)
            numbers = {
                key: iter((torch.cat(group) if len(group) > 1 else group[0]).tolist())
                for key, group in groups.items()
            }
        for sites, seen in waiting:
            of_group = numbers[seen.device, seen.dtype]
            raise_outside(sites, [next(of_group) for _ in range(seen.numel())])


def raise_outside(sites: Sequence[Site], numbers: Sequence[Any]) -> None:
    """Raise for the first site that has seen a value out of range.

    ``numbers`` are the smallest value of each site, then the largest, then the bounds if they vary.
    """
    count = len(sites)
    columns = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    for site, smallest, largest, *bounds in zip(sites, *columns, strict=True):
        if bounds:  # where there is no such limit it is None
            low = None if site.low is None else bounds[0]
            site = site._replace(low=low, high=None if site.high is None else bounds[1])  # noqa: PLW2901
        if not site.allows(smallest, largest):
            raise site.error(smallest, largest)


def is_capturing() -> bool:
    """Whether the program captures a CUDA graph here, where nothing can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


flags = Flags()
"""What the whole process has seen."""


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


# ---- one argument ----


def checked_value(site: Site, values: Any, unread: Callable[[], Any] | None = None) -> Any:
    """Return what to call the function with, the same object where the values were read.

    ``unread`` makes the mask of what is never read.
    Raises one of ``_ERRORS`` where they were and are out of range.
    """
    if not isinstance(values, torch.Tensor):
        read = torch.as_tensor(values, device="cpu")
    elif is_on_cpu(values):
        read = values
    else:
        return _noted(site._replace(line=user_line()), values, unread and unread())
    if not read.numel():
        return values
    if site.allows(*map(_item, _aminmax(looked_at(site, read, None)))):
        return values
    mask = unread and unread()
    if mask is not None and site.allows(*map(_item, _aminmax(looked_at(site, read, mask)))):
        return values
    raise _described(site, read, mask)


def looked_at(site: Site, values: Any, unread: Any) -> Any:
    """Return the values whose extremes are compared with the range; of a graph's nodes too."""
    if site.kind == "divisor":
        return (values != 0).to(torch.uint8)
    read = values.detach() if site.kind == "value" else values
    return read if unread is None else torch.where(unread, site.low, read)


def clamped(site: Site, values: Any, unread: Any) -> Any:
    """Return the values in range, those that are never read as they are; of nodes too."""
    if site.kind == "divisor":
        return values + (values == 0)  # of the same dtype, bool too
    if site.kind == "value":
        # Not clamp(), which lets NaN through.
        return torch.where((values >= site.low) & (values <= site.high), values, site.low)
    # In 64 bits: a limit may be more than what uint8 holds.
    inside = values.to(torch.int64).clamp(site.low, site.high).type_as(values)
    return inside if unread is None else torch.where(unread, values, inside)


def _noted(site: Site, values: torch.Tensor, unread: Any) -> torch.Tensor:
    """Keep what is seen on a device, and return values that no kernel refuses."""
    # A capture runs nothing: what it would keep here is computed when the graph is replayed.
    if not values.numel() or is_capturing():
        return values
    inside: torch.Tensor = clamped(site, values, None)
    # A tensor in both places: of a number torch would make one, by one more kernel.
    read = looked_at(site, values, None) if unread is None else torch.where(unread, inside, values)
    seen = read.new_empty(2)  # in one tensor, so that one call that waits is read by one copy
    _aminmax(read, out=tuple(seen))
    flags.keep([site], seen)
    return inside if unread is None else torch.where(unread, values, inside)


def _described(site: Site, values: torch.Tensor, unread: torch.Tensor | None) -> Exception:
    """Make the error with how many are out of range and the first place; it may take its time."""
    read = looked_at(site, values, unread)
    inside = torch.ones_like(read, dtype=torch.bool)
    for limit, compare in ((site.low, torch.ge), (site.high, torch.le)):
        if limit is not None:
            inside &= compare(read, limit)
    first = (~inside).nonzero()[0].tolist()
    seen = values if unread is None else values[~unread]
    place = f"{site.argument}{first} = {values[tuple(first)].item()}"
    count = int((~inside).sum())
    return site.error(
        seen.amin().item(),
        seen.amax().item(),
        f"; {count} of {values.numel()} out of range, the first is {place}",
    )


# ---- one call ----


Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def bind(row: Row, args: Args, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's arguments by name."""
    given = {**dict(zip(row.parameters, args, strict=False)), **kwargs}
    if "self" in given:
        given["input"] = given.pop("self")
    return given


def rebound(
    row: Row, args: Args, kwargs: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[Args, Kwargs]:
    """Return the call's arguments with some of them exchanged."""
    named = dict(enumerate(row.parameters))
    return (
        tuple(new.get(named.get(i, ""), each) for i, each in enumerate(args)),
        {name: new.get(name, each) for name, each in kwargs.items()},
    )


def can_check(check: Check, values: Any) -> bool:
    """Whether an argument is a tensor of a dtype that the check is for."""
    if not isinstance(values, torch.Tensor):
        return False
    if check.kind == "value":
        return values.dtype.is_floating_point
    return values.dtype in _INTEGERS or (check.kind == "divisor" and values.dtype is torch.bool)


def looking_first(
    look: Callable[[Args, Kwargs], tuple[Args, Kwargs]], name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Let ``look`` check the arguments of each call, and exchange them."""
    shown = _shown_by(name, original)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SWITCH.on:
            args, kwargs = look(args, kwargs)
        if shown is None or not has_torch_function((*args, *kwargs.values())):
            return original(*args, **kwargs)
        is_operator = shown.__name__.startswith("__") and "item" not in shown.__name__
        return show_overriding(shown, args, kwargs, is_operator=is_operator)(*args, **kwargs)

    return function


def _shown_by(name: str, original: Callable[..., Any]) -> Any:
    """Return what subclasses and modes are to see of a call; None if torch shows that itself.

    torch looks some functions up where replacements are: methods, and builtins of functional.
    """
    if original_of(original) is not original:  # the replacement below shows it
        return None
    if getattr(torch.Tensor, name, None) is not None and not isinstance(
        original, BuiltinFunctionType
    ):
        return shown_for(name)
    return original if getattr(C_NAMESPACE, name, None) is not None else None


def guard_call(row: Row, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments of a function that is in the table."""
    site_of = name if row.checks else row.names[0]
    in_range = () if row.checks else (int, slice)  # or torch raises: x[0] has to be fast

    def look(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if in_range and len(args) > 1 and type(args[1]) in in_range:
            return args, kwargs
        with computing_unseen((*args, *kwargs.values())):
            return _checked(row, site_of, args, kwargs)

    return looking_first(look, name, original)


def guard_reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the flags of a device before a value leaves it."""

    def look(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        with computing_unseen(args):
            if args and not is_on_cpu(args[0]):
                flags.read()
        return args, kwargs

    return looking_first(look, name, original)


def _checked(row: Row, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    checks, given, folded = unfolded(row, bind(row, args, kwargs))
    new: dict[str, Any] = {}
    for check in checks:
        values = given.get(check.argument)
        if isinstance(values, _LISTS):
            if not values or not all(type(each) is int for each in values):
                continue
        elif check.kind == "divisor" and isinstance(values, _NUMBERS) and not values:
            divided = given.get("input")
            if not (can_check(check, divided) and values_can_be_read(divided)):  # type: ignore[arg-type]
                continue
        elif isinstance(values, np.ndarray) and not row.checks:
            pass  # an index may be one
        elif not (can_check(check, values) and values_can_be_read(values)):  # type: ignore[arg-type]
            continue
        allowed = _allowed(check, given)
        if allowed is not None:
            site = Site(name, check.argument, check.kind, *allowed)
            unread = check.unread and functools.partial(check.unread, given, given)
            value = checked_value(site, values, unread)
            if value is not values:
                new[check.argument] = value
    return rebound(row, args, kwargs, folded(new)) if new else (args, kwargs)


def _allowed(check: Check, given: Mapping[str, Any]) -> tuple[Any, Any] | None:
    def sizes(argument: str, dim: Any) -> int:
        tensor = given[argument]
        if not isinstance(tensor, torch.Tensor):  # what stands for one while torch.fx traces
            raise KeyError(argument)
        return int(tensor.numel() if dim is None or not tensor.dim() else tensor.size(dim))

    try:
        return check.range(given, sizes)
    except (AttributeError, IndexError, KeyError):  # torch says what is wrong with the call
        return None


# ---- x[index] ----


def _same(new: Mapping[str, Any]) -> Mapping[str, Any]:
    return new


def unfolded(
    row: Row, given: dict[str, Any], fake_of: Callable[[Any], Any] = lambda value: value
) -> tuple[Sequence[Check], dict[str, Any], Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
    """Return the checks of a call, its arguments, and what makes arguments of exchanged ones.

    Of ``x[index]`` each item with indices has a check, and is an argument. ``fake_of`` returns the
    tensor that a node of a graph represents.
    """
    if row.checks:
        return row.checks, given, _same
    name = row.parameters[1]
    index: Any = given.get(name)
    tensor = fake_of(given.get("input"))
    fills = name == "indices"  # None is a whole dim there, and a new one in x[index]
    if not isinstance(tensor, torch.Tensor) or (fills and not isinstance(index, _LISTS)):
        return (), given, _same
    whole = fills or isinstance(index, tuple)
    items = [*index] if whole else [index]
    known = [slice(None) if item is None and fills else fake_of(item) for item in items]
    found = {
        "index" if len(items) == 1 else f"index {place}": (place, dim)
        for place, dim in indexed_dims(known, tensor.dim())
    }
    if not found:
        return (), given, _same

    def folded(new: Mapping[str, Any]) -> Mapping[str, Any]:
        for argument, value in new.items():
            items[found[argument][0]] = value
        return {name: tuple(items) if whole else items[0]}

    checks = [_of_item(argument, dim) for argument, (_, dim) in found.items()]
    return checks, {**given, **{each: items[place] for each, (place, _) in found.items()}}, folded


@functools.lru_cache(maxsize=256)
def _of_item(argument: str, dim: int) -> Check:
    return Check(argument, wrapping("input", dim))


def indexed_dims(index: Sequence[Any], dims: int) -> Iterator[tuple[int, int]]:
    """Yield the place of each item with indices, and the dim that they are into."""
    if len(index) == 1 and type(index[0]) is torch.Tensor and index[0].dtype in _INDICES and dims:
        yield 0, 0  # as nearly always
        return
    taken = [_dims_taken(item) for item in index]
    dim = 0
    for place, item in enumerate(index):
        if item is Ellipsis:
            dim += dims - sum(taken)
        elif dim < dims and (
            item.dtype in _INDICES
            if isinstance(item, torch.Tensor)
            else (type(item) is list and bool(item) and all(type(each) is int for each in item))
            or (isinstance(item, np.ndarray) and item.dtype.kind == "i" and item.size > 0)
        ):
            yield place, dim
        dim += taken[place]


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    depth = 0
    while isinstance(item, _LISTS) and item:  # of booleans, nested too, they are one mask
        item, depth = item[0], depth + 1
    if isinstance(item, (bool, np.bool_)):
        return depth
    is_mask = isinstance(item, torch.Tensor) and item.dtype in _MASKS
    is_mask = is_mask or (isinstance(item, np.ndarray) and item.dtype in _NUMPY_MASKS)
    return depth + int(item.ndim) if is_mask else 1
