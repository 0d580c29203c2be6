"""The arguments of ``bucketed``, kept together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from typing_extensions import Required

from torchguard.bucketing.decorator.spec import Dims
from torchguard.bucketing.padding import Side

__all__ = ["Keywords", "MaskingKeywords", "Options", "Overflow", "Verify"]

Overflow: TypeAlias = Literal["error", "eager", "grow", "dynamic"]
Verify: TypeAlias = Literal["first", "always", "never"]


class Keywords(TypedDict, total=False):
    """What a type checker lets the user write."""

    dims: Required[Dims]
    buckets: Any
    fill: Mapping[str, Any] | None
    outputs: Any
    side: Side
    overflow: Overflow
    verify: Verify
    compile: bool | Mapping[str, Any] | None
    plan: str | os.PathLike[str] | None
    group: Any


class MaskingKeywords(Keywords, total=False):
    """Likewise, with arguments that are made where the caller leaves them out."""

    lengths: Any
    mask: Any


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    dims: Dims
    buckets: Any = None
    fill: Mapping[str, Any] | None = None
    lengths: Any = None
    mask: Any = None
    outputs: Any = None
    side: Side = "right"
    overflow: Overflow = "error"
    verify: Verify = "first"
    compile: bool | Mapping[str, Any] | None = None
    plan: str | os.PathLike[str] | None = None
    group: Any = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("side", get_args(Side)),
            ("overflow", get_args(Overflow)),
            ("verify", get_args(Verify)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"bucketed: {name} is {value!r}, expected one of {listed}")
        if self.fill is not None and not isinstance(self.fill, Mapping):
            raise TypeError(
                f"bucketed: fill is {self.fill!r}, expected {{argument: value}}, such as "
                "{'labels': -100}"
            )
