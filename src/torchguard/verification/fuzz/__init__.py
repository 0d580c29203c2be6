"""Random programs of indexed and in-place assignment, compiled and compared with eager."""

from torchguard.verification.fuzz.programs import Program, program
from torchguard.verification.fuzz.trial import Trial, attempt

__all__ = ["Program", "Trial", "attempt", "program"]
