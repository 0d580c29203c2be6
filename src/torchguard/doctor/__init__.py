"""Shows which defects the installed torch has, and whether the guards close them."""

from torchguard.doctor.examination import Step, doctor
from torchguard.doctor.report import Bare, Environment, Guarded, Report, Row

__all__ = ["Bare", "Environment", "Guarded", "Report", "Row", "Step", "doctor"]
