"""Parallel plans that several architectures share."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from opslot.distributed import ParallelPlan
from opslot.slots import walk_slots


def experts_in_slots(model: Any) -> ParallelPlan | None:
    """All weights of experts that have slots, sharded along their first dimension, which has one entry per expert."""
    weights = [
        f"{path}.{name}" if path else name
        for path, module, _, op, _ in walk_slots(model)
        if op == "moe_experts"
        for name, _ in module.named_parameters(recurse=False)
    ]
    return ParallelPlan(extra_parallel_plan={"ep": dict.fromkeys(weights, Shard(0))}) if weights else None
