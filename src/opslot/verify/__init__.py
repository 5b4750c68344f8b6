"""The parity harness, for opslot's own kernels and for third parties'."""

from opslot.verify.bisect import Bisection, Suspect, bisect
from opslot.verify.kernels import verify_kernels
from opslot.verify.parity import CheckResult, Comparison, check_kernel, poisoned_memory

__all__ = [
    "Bisection",
    "CheckResult",
    "Comparison",
    "Suspect",
    "bisect",
    "check_kernel",
    "poisoned_memory",
    "verify_kernels",
]
