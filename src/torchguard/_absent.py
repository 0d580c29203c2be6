"""One object that says that something is not there."""

from typing import Any

from typing_extensions import Sentinel

ABSENT: Any = Sentinel("ABSENT", repr="nothing")
"""In place of an argument that was left out, an attribute, a value that one run alone has."""
