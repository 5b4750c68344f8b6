"""Hooks of modules, which a kernel that replaces a module's call must not skip."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as base

from opslot.distributed.module_dtypes import InputCast


def has_own_hooks(module: Any) -> bool:
    """Whether hooks are registered on `module`, for its forward or its backward pass.

    Casts of inputs under mixed precision do not count: what replaces the call takes inputs in the weight's dtype, or
    casts them.
    """
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(not isinstance(hook, InputCast) for hook in module._forward_pre_hooks.values())


def has_hooks(module: Any) -> bool:
    """Whether a call of `module` runs more than its forward: hooks of its own, or of all modules."""
    return bool(
        has_own_hooks(module)
        or base._global_forward_hooks
        or base._global_forward_pre_hooks
        or base._global_backward_hooks
        or base._global_backward_pre_hooks
    )
