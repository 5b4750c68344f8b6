"""Training: configuration, the loop, its callbacks, and the command. Imports torch only when a trainer is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opslot.trainer.base import BaseTrainer, TrainResult
    from opslot.trainer.callbacks import Callback, StepRecord
    from opslot.trainer.config import RunConfig
    from opslot.trainer.main import cli_train, run
    from opslot.trainer.parse import load_config
    from opslot.trainer.text import TextTrainer

_MODULES = {
    "BaseTrainer": "base",
    "Callback": "callbacks",
    "RunConfig": "config",
    "StepRecord": "callbacks",
    "TextTrainer": "text",
    "TrainResult": "base",
    "cli_train": "main",
    "load_config": "parse",
    "run": "main",
}

__all__ = [
    "BaseTrainer",
    "Callback",
    "RunConfig",
    "StepRecord",
    "TextTrainer",
    "TrainResult",
    "cli_train",
    "load_config",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"opslot.trainer.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'opslot.trainer' has no attribute {name!r}")
