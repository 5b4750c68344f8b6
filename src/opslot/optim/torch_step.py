"""torch's AdamW step, for optimizers that update some parameters themselves."""

from __future__ import annotations

from typing import Any

import torch


def adamw_step(optimizer: torch.optim.AdamW) -> None:
    """torch's step without its hooks, since those of the calling `step` run already."""
    step: Any = torch.optim.AdamW.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)
