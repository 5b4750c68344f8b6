"""Muon (Jordan et al. 2024): momentum, orthogonalized by Newton-Schulz steps, for matrices; AdamW for other parameters.

Stacked matrices [E, M, N] (experts) are orthogonalized one by one. A sharded parameter keeps its momentum sharded; for
each step its matrices are gathered, except that a rank with whole matrices of a stack orthogonalizes its own only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from opslot.optim.partial_adamw import PartialAdamW

# Keller Jordan's coefficients of the quintic iteration: a large slope at zero, singular values end near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class Muon(PartialAdamW):
    """AdamW whose parameter groups with `use_muon` follow Muon instead.

    Args:
        params: groups; those with `use_muon` have tensors of 2 or 3 dims.
        momentum, nesterov, ns_steps: of Muon.
        lr_scale: "match_rms_adamw": updates have an RMS of 0.2, near AdamW's (Liu et al. 2025, section 2.2);
            "original": scaled by sqrt(max(1, M / N)).
        options: of AdamW.
    """

    def __init__(
        self,
        params: Any,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        lr_scale: str = "match_rms_adamw",
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._momentum, self._nesterov, self._ns_steps, self._scaling = momentum, nesterov, ns_steps, lr_scale

    def _step_own(self) -> list[tuple[Tensor, Tensor]]:
        groups = (group for group in self.param_groups if group.get("use_muon"))
        own = [(param, param.grad, group) for group in groups for param in group["params"] if param.grad is not None]
        for param, grad, group in own:
            self._step_one(param, grad, group)
        return [(param, grad) for param, grad, _ in own]

    def _step_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            # AdamW expects it of each parameter when a state is loaded.
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["momentum_buffer"] = torch.zeros_like(param)
        state["step"] += 1
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad.to(buffer.dtype), 1 - self._momentum)
        update = torch.lerp(grad.to(buffer.dtype), buffer, self._momentum) if self._nesterov else buffer
        rows, columns = param.shape[-2:]
        scale = 0.2 * math.sqrt(max(rows, columns))
        if self._scaling == "original":
            scale = math.sqrt(max(1.0, rows / columns))
        update = _of_whole_matrices(lambda matrices: orthogonalize(matrices, self._ns_steps), update)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Each matrix [..., M, N] with its singular values moved near 1, by Newton-Schulz steps.

    In bfloat16 on a GPU, whose precision suffices; in float32 elsewhere.
    """
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def _of_whole_matrices(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of a tensor that may be sharded; every rank calls it."""
    if not isinstance(x, DTensor):
        return function(x)
    stacked = x.ndim == 3
    # A stack that is sharded by matrices alone needs no communication.
    wanted = [p if stacked and type(p) is Shard and p.dim == 0 else Replicate() for p in x.placements]
    gathered = x.redistribute(placements=wanted)
    result = DTensor.from_local(
        function(gathered.to_local()), x.device_mesh, wanted, run_check=False, shape=x.shape, stride=x.stride()
    )
    return result.redistribute(placements=x.placements)
