"""The catalog of upstream defects, one file each, open to other packages."""

from torchguard.defects.catalog import Defect, Family, NotRunHere
from torchguard.defects.registry import FAMILIES, BrokenDefect, catalog

__all__ = ["FAMILIES", "BrokenDefect", "Defect", "Family", "NotRunHere", "catalog"]
