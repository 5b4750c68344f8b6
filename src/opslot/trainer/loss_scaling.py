"""Loss scaling for float16 compute, whose smallest gradients would otherwise underflow to zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000


class LossScaler:
    """A dynamic loss scale: halved when gradients overflow, doubled after 2,000 steps without overflow.

    The scale is always a power of two, so that scaling and unscaling round nothing. It is 1, and stays 1, unless the
    model computes in float16.

    Args:
        param_dtype: dtype of the forward and backward pass.
    """

    def __init__(self, param_dtype: torch.dtype | None) -> None:
        self.enabled = param_dtype == torch.float16
        self.scale = _INITIAL_SCALE if self.enabled else 1.0
        self._steps_without_overflow = 0

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide all gradients by the scale, in place."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.scale)

    def back_off(self) -> bool:
        """Halve the scale after an overflow; False when it is 1 already, so the overflow has another cause."""
        self._steps_without_overflow = 0
        if self.scale == 1.0:
            return False
        self.scale /= 2
        return True

    def step(self) -> None:
        """Call after each step without overflow."""
        if self.enabled:
            self._steps_without_overflow += 1
            if self._steps_without_overflow == _GROWTH_INTERVAL:
                self.scale *= 2
                self._steps_without_overflow = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "steps_without_overflow": self._steps_without_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self.scale = float(state["scale"])
            self._steps_without_overflow = int(state["steps_without_overflow"])
