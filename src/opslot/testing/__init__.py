"""The parity harness, for opslot's own kernels and for third parties'."""

from opslot.testing.bisect import Bisection, Suspect, bisect
from opslot.testing.parity import CheckResult, Comparison, check_kernel, poisoned_memory
from opslot.testing.verify import verify

__all__ = [
    "Bisection",
    "CheckResult",
    "Comparison",
    "Suspect",
    "bisect",
    "check_kernel",
    "poisoned_memory",
    "verify",
]
