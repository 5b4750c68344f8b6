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
        exported: value of the evaluation whose model is kept as the best; None where there is no such model.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.value: float | None = None
        self.step: int | None = None
        self.since = 0
        self.exported: float | None = None

    def update(self, step: int, metrics: dict[str, float]) -> bool:
        """Take the metrics of an evaluation into account; returns whether its model is the best one to keep.

        That is the model of the best evaluation, or after `export_lost` of the best one since then.
        """
        value = metrics[f"eval_{self.metric}"]
        if self._is_better(value, self.value):
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        if self._is_better(value, self.exported):
            self.exported = value
            return True
        return False

    def export_lost(self) -> None:
        """The model of the best evaluation was not kept, so that of the next evaluation is."""
        self.exported = None

    def _is_better(self, value: float, other: float | None) -> bool:
        if not math.isfinite(value):
            return False
        return other is None or (value < other if self.metric == "loss" else value > other)

    def is_over(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "value": self.value,
            "step": self.step,
            "since": self.since,
            "exported": self.exported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; a run with another metric starts afresh."""
        if isinstance(state, dict) and state.get("metric") == self.metric:
            self.value, self.step, self.since = state["value"], state["step"], int(state["since"])
            self.exported = state.get("exported", self.value)
