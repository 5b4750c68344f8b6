"""Parameters that FSDP2 gathers in their own dtype, in groups whose other parameters it casts to `param_dtype`.

FSDP's policy is for a whole group. A group of their own would be gathered in the forward of their module alone, but
Transformers' code and kernels also read weights of other modules, as of convolutions and norms.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

Kept = Collection[tuple[nn.Module, str]]


def policy_of(module: nn.Module, policy: MixedPrecisionPolicy, kept: Kept) -> MixedPrecisionPolicy:
    """`policy`; for a module whose parameters are all `kept`, as of some heads and towers, without casts."""
    held = [(inner, name) for inner in module.modules() for name, p in inner._parameters.items() if p is not None]
    is_kept = bool(held) and all(parameter in kept for parameter in held)
    return replace(policy, param_dtype=None, cast_forward_inputs=False) if is_kept else policy


def keep_in_float32(model: nn.Module, kept: Kept) -> None:
    """Let FSDP gather the parameters `kept`, by module and name, without a cast. Call it before the first forward."""
    for module in model.modules() if kept else ():
        for group in _groups(module) if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params if group.mp_policy.param_dtype is not None else ():
                info = parameter._module_info
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                if any(held in kept for held in ((info.module, info.param_name), *shared)):
                    parameter.__class__ = _KeptParam


def _groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    # Releases of torch before 2.13 have one group for a module, or none.
    return getattr(state, "_fsdp_param_groups", None) or [group for group in (state._fsdp_param_group,) if group]


class _KeptParam(FSDPParam):
    """Its gradients are reduced beside those of the group, in their dtype."""

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().init_dtype_attrs(mp_policy)
        self.param_dtype, self._computed_dtype = None, mp_policy.param_dtype

    @property
    def unsharded_grad_data(self) -> Tensor:
        return super().unsharded_grad_data.to(self._computed_dtype)

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        return super().unsharded_zero_grad_data.to(self._computed_dtype)

    def to_accumulated_grad_if_needed(self) -> None:
        """Gradients of several backward passes are summed in `reduce_dtype`, here also where that is their dtype."""
        if self.reduce_dtype is not None and self._unsharded_param.grad is not None:
            self.unsharded_accumulated_grad = self._unsharded_param.grad.to(self.reduce_dtype)
            self._unsharded_param.grad = None
