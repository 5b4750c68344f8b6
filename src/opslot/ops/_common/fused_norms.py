"""Whether a kernel that also computes RMSNorm can replace calls of norms."""

from __future__ import annotations

from typing import Any

from opslot.ops._common.hooks import has_hooks
from opslot.slots import BoundKernel
from opslot.slots.protocol import bound_kernel


def can_serve(kernel: BoundKernel, *norms: Any) -> bool:
    """Whether `kernel` can replace what it fuses and calls of `norms`.

    True if each norm is bound to the kernel of rms_norm of the same name, or `auto` selected both, and a call of the
    norm only runs its forward, with a weight of its own.
    """
    for norm in norms:
        bound = bound_kernel(norm, "rms_norm")
        if bound is None or (bound.name != kernel.name and (bound.explicit or kernel.explicit)):
            return False
        if "forward" in norm.__dict__ or norm._parameters.get("weight") is None or has_hooks(norm):
            return False
    return True
