"""Checks of kernels, models and architectures, of opslot's own and of third parties'."""

from opslot.verify.architecture import ArchitectureCheck, check_architecture
from opslot.verify.bisect import Bisection, Suspect, bisect
from opslot.verify.config_checks import CHECKS, CheckOutcome
from opslot.verify.kernels import verify_kernels
from opslot.verify.parity import CheckResult, Comparison, check_kernel, poisoned_memory

__all__ = [
    "CHECKS",
    "ArchitectureCheck",
    "Bisection",
    "CheckOutcome",
    "CheckResult",
    "Comparison",
    "Suspect",
    "bisect",
    "check_architecture",
    "check_kernel",
    "poisoned_memory",
    "verify_kernels",
]
