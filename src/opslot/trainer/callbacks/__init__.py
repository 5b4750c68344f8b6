"""Callbacks: evaluation, metrics, progress, checkpoints and the final export."""

from opslot.trainer.callbacks.base import Callback, StepRecord, Trainer
from opslot.trainer.callbacks.profile import PROFILE_FOLDER, ProfileCallback
from opslot.trainer.callbacks.progress import ProgressCallback
from opslot.trainer.callbacks.writers import (
    BEST_FOLDER,
    HF_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    CheckpointCallback,
    EvaluationCallback,
    ExportCallback,
    LossCurveCallback,
    MetricsCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    read_metrics,
)

__all__ = [
    "BEST_FOLDER",
    "HF_FOLDER",
    "METRICS_FILE",
    "PROFILE_FOLDER",
    "SAMPLES_FILE",
    "Callback",
    "CheckpointCallback",
    "EvaluationCallback",
    "ExportCallback",
    "LossCurveCallback",
    "MetricsCallback",
    "ProfileCallback",
    "ProgressCallback",
    "StepRecord",
    "TensorBoardCallback",
    "TrackioCallback",
    "Trainer",
    "WandbCallback",
    "read_metrics",
]
