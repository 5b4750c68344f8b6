"""The best evaluation of a run, for early stopping."""

from __future__ import annotations

import math
from typing import Any


class BestEvaluation:
    """The best value of a metric so far, and how many evaluations have passed since.

    Args:
        metric: loss is minimized, others are maximized.

    Attributes:
        value, step: of the best evaluation; None before the first one.
        since: evaluations after the best one.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.value: float | None = None
        self.step: int | None = None
        self.since = 0

    def update(self, step: int, metrics: dict[str, float]) -> bool:
        """Take the metrics of an evaluation into account; returns whether it is the best one."""
        value = metrics[f"eval_{self.metric}"]
        better = self.value is None or (value < self.value if self.metric == "loss" else value > self.value)
        if better and math.isfinite(value):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; a run with another metric starts afresh."""
        if isinstance(state, dict) and state.get("metric") == self.metric:
            self.value, self.step, self.since = state["value"], state["step"], int(state["since"])
