"""Whether a fused residual sum and norm can replace the two."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as base

from opslot.slots import BoundKernel
from opslot.slots.protocol import bound_kernel


def can_serve(kernel: BoundKernel, norm: Any) -> bool:
    """Whether a fused residual sum and norm can replace the sum and a call of `norm`.

    True if `norm` is bound to the same kernel, or `auto` selected both, and a call of `norm` only runs its forward.
    """
    bound = bound_kernel(norm, kernel.op_name)
    if bound is None or (bound.name != kernel.name and (bound.explicit or kernel.explicit)):
        return False
    return not ("forward" in norm.__dict__ or _has_hooks(norm))


def _has_hooks(module: Any) -> bool:
    """Whether a call of `module` runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or base._global_forward_hooks
        or base._global_forward_pre_hooks
        or base._global_backward_hooks
        or base._global_backward_pre_hooks
    )
