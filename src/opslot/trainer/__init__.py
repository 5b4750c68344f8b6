"""Training: configuration, the loop, its callbacks, and the command. Imports torch only when a trainer is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.lazy import lazy_names

if TYPE_CHECKING:
    from opslot.trainer.base import BaseTrainer, TrainResult
    from opslot.trainer.callbacks.base import Callback, StepRecord
    from opslot.trainer.config import RunConfig
    from opslot.trainer.main import cli_train, run
    from opslot.trainer.parse import load_config
    from opslot.trainer.text import TextTrainer

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".base": "BaseTrainer TrainResult",
        ".callbacks.base": "Callback StepRecord",
        ".config": "RunConfig",
        ".main": "cli_train run",
        ".parse": "load_config",
        ".text": "TextTrainer",
    },
)
