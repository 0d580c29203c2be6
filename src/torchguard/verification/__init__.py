"""``verified``: a compiled graph is checked against eager before it is trusted."""

from torchguard.verification.backend import VerifiedBackend, verified_backend
from torchguard.verification.decorator import verified
from torchguard.verification.report import GraphRecord, VerificationReport, verification_report

__all__ = [
    "GraphRecord",
    "VerificationReport",
    "VerifiedBackend",
    "verification_report",
    "verified",
    "verified_backend",
]
