"""The catalog of upstream defects and the doctor that looks for them; open to other packages."""

from torchguard.defects.catalog import (
    FAMILIES,
    BrokenDefect,
    Defect,
    Family,
    NotRunHere,
    all_defects,
)

__all__ = ["FAMILIES", "BrokenDefect", "Defect", "Family", "NotRunHere", "all_defects"]
