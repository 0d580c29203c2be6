"""What a user can choose about the check, validated once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["CheckEach", "OnMismatch", "Options"]

OnMismatch = Literal["fallback", "raise", "warn"]
CheckEach = Literal["auto", "graph", "shape"]


@dataclass(frozen=True)
class Options:
    """How a graph is checked."""

    calls: int = 1
    on_mismatch: OnMismatch = "fallback"
    max_bytes: int | None = None
    check_each: CheckEach = "auto"
    group: Any = None
    """The ranks that take the same fallback."""

    run_twice: Collection[str] = ()
    """Custom operators that have no effect but on their tensors."""

    def __post_init__(self) -> None:
        if type(self.calls) is not int or self.calls < 1:
            raise ValueError(f"verified: calls is {self.calls!r}, expected a number of 1 or more")
        _one_of("on_mismatch", self.on_mismatch, get_args(OnMismatch))
        _one_of("check_each", self.check_each, get_args(CheckEach))
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 0):
            raise ValueError(
                f"verified: max_bytes is {self.max_bytes!r}, expected a number of bytes or None"
            )
        if self.group is not None and not _may_be_group(self.group):
            raise TypeError(
                f"verified: group is {self.group!r}, expected a process group, such as "
                "torch.distributed.group.WORLD, True for all ranks, or None"
            )
        # A string is a collection of its letters, and equal options make equal backends.
        names = None if isinstance(self.run_twice, str) else tuple(self.run_twice)
        if names is None or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"verified: run_twice is {self.run_twice!r}, expected names of operators: "
                'run_twice=["namespace::name"]'
            )
        unnamed = [name for name in names if not all(name.partition("::"))]
        if unnamed:
            raise ValueError(
                f"verified: run_twice has {unnamed[0]!r}, expected the name of an operator with "
                'its namespace: "namespace::name"'
            )
        object.__setattr__(self, "run_twice", frozenset(names))


def _may_be_group(group: object) -> bool:
    # By what it is not: a build of torch without torch.distributed has no class to compare with.
    return group is True or not isinstance(group, (str, int, float, list, tuple))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = " or ".join(repr(choice) for choice in known)
        raise ValueError(f"verified: {name} is {value!r}, expected {choices}")
