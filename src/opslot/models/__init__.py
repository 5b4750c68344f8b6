"""Builds models of the architectures in which discovery finds slots, and applies kernels to existing models."""

import importlib
import pkgutil

from opslot.models._apply import apply, restore
from opslot.models._build import build_foundation_model, load_config, load_foundation_weights
from opslot.models._common.sub_model import train_sub_model
from opslot.models._registry import (
    ARCHITECTURES,
    MODEL_CONFIG_REGISTRY,
    MODEL_PROCESSOR_REGISTRY,
    MODELING_REGISTRY,
    Architecture,
    register_architecture,
    serve_model_type,
    trained_config,
)
from opslot.slots.protocol import SubModel

__all__ = [
    "ARCHITECTURES",
    "MODELING_REGISTRY",
    "MODEL_CONFIG_REGISTRY",
    "MODEL_PROCESSOR_REGISTRY",
    "Architecture",
    "SubModel",
    "apply",
    "build_foundation_model",
    "load_config",
    "load_foundation_weights",
    "register_architecture",
    "restore",
    "serve_model_type",
    "train_sub_model",
    "trained_config",
]

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg and not _module.name.startswith("_") and _module.name != "discovery":
        importlib.import_module(f"{__name__}.{_module.name}")
        if _module.name not in ARCHITECTURES:
            register_architecture(_module.name)
