"""``verified``: a compiled graph is checked against eager before it is trusted."""

from torchguard.verified.backend import VerifiedBackend, verified_backend
from torchguard.verified.records import GraphRecord, VerificationReport, verification_report
from torchguard.verified.wrapper import verified

__all__ = [
    "GraphRecord",
    "VerificationReport",
    "VerifiedBackend",
    "verification_report",
    "verified",
    "verified_backend",
]
