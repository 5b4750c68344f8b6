"""Parallel plans that several architectures share."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from opslot.distributed import ParallelPlan


def merged_experts(model: Any) -> ParallelPlan:
    """Experts that hold `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] as one tensor each, below `mlp.experts`.

    Args:
        model: a head model, or the base model alone, whose names lack the prefix.
    """
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    names = [f"{prefix}layers.*.mlp.experts.{weight}" for weight in ("gate_up_proj", "down_proj")]
    return ParallelPlan(extra_parallel_plan={"ep": dict.fromkeys(names, Shard(0))})
