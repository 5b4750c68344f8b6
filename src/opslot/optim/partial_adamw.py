"""AdamW of torch, for optimizers that update some parameters themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PartialAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) for the parameters that `_step_own` does not update."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    def _step_own(self) -> list[tuple[Tensor, Tensor]]:
        """Update some parameters; returns them with their gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = self._step_own()
        # torch has nothing to update where all gradients are done.
        if len(done) == sum(param.grad is not None for group in self.param_groups for param in group["params"]):
            return loss
        for param, _ in done:
            param.grad = None
        try:
            # Without its hooks, since those of this function run already.
            step: Any = torch.optim.AdamW.step
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
        finally:
            for param, grad in done:
                param.grad = grad
        return loss
