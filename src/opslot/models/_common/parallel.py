"""Parallel plans that several architectures share."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from opslot.distributed import ParallelPlan
from opslot.slots import walk_slots


def merged_experts(model: Any) -> ParallelPlan:
    """Experts that hold `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] as one tensor each, below `mlp.experts`.

    Args:
        model: a head model, or the base model alone, whose names lack the prefix.
    """
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    names = [f"{prefix}layers.*.mlp.experts.{weight}" for weight in ("gate_up_proj", "down_proj")]
    return ParallelPlan(extra_parallel_plan={"ep": dict.fromkeys(names, Shard(0))})


def experts_in_slots(model: Any) -> ParallelPlan | None:
    """All weights of experts that stand in slots: each has one entry an expert, along its first dimension."""
    weights = [
        f"{path}.{name}" if path else name
        for path, module, _, op, _ in walk_slots(model)
        if op == "moe_experts"
        for name, _ in module.named_parameters(recurse=False)
    ]
    return ParallelPlan(extra_parallel_plan={"ep": dict.fromkeys(weights, Shard(0))}) if weights else None
