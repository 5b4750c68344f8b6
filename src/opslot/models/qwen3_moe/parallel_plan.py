"""What expert parallelism divides in Qwen3Moe."""

from __future__ import annotations

from typing import Any

from opslot.distributed import ParallelPlan
from opslot.models._common.parallel import merged_experts


def get_parallel_plan(model: Any) -> ParallelPlan:
    """The experts' merged weights, of each layer that has experts."""
    return merged_experts(model)
