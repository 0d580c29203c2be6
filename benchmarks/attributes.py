"""Every attribute of torch's namespaces: what is the same object as before can't have changed."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attributes_of_torch"]

NAMESPACES = ("Tensor", "linalg", "special", "fft", "nn.functional")


def attributes_of_torch() -> dict[str, Any]:
    """Return them by their paths; a class has those of its bases too."""
    # Strong references: an attribute may be made anew by each look at it.
    found = {f"torch.{name}": value for name, value in vars(torch).items()}
    for namespace in NAMESPACES:
        owner: Any = torch
        for part in namespace.split("."):
            owner = getattr(owner, part)
        inherited = [vars(base) for base in getattr(owner, "__mro__", ())[1:]]
        for attributes in (*reversed(inherited), vars(owner)):
            found.update({f"torch.{namespace}.{name}": attributes[name] for name in attributes})
    return found
