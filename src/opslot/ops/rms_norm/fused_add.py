"""Whether a fused residual sum and norm can replace the two."""

from __future__ import annotations

from typing import Any

from opslot.ops._common.hooks import has_hooks
from opslot.slots import BoundKernel
from opslot.slots.protocol import bound_kernel


def can_serve(kernel: BoundKernel, norm: Any) -> bool:
    """Whether a fused residual sum and norm can replace the sum and a call of `norm`.

    True if `norm` is bound to the same kernel, or `auto` selected both, and a call of `norm` only runs its forward.
    """
    bound = bound_kernel(norm, kernel.op_name)
    if bound is None or (bound.name != kernel.name and (bound.explicit or kernel.explicit)):
        return False
    return not ("forward" in norm.__dict__ or has_hooks(norm))
