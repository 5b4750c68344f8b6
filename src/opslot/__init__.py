"""opslot: selects, checks and explains the kernel of each op of a Transformers model.

Importing this package changes nothing in anybody's modules and imports no kernel vendor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opslot._base.plugins import PATCH_FINDERS

__version__ = "0.1.0"

PATCH_FINDERS.append("opslot.models.discovery")

if TYPE_CHECKING:
    from opslot._base.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        KernelError,
        OpslotError,
        ParallelError,
        PatchError,
        TrainingError,
    )
    from opslot.bench.trace import trace
    from opslot.checkpoint import named_weights
    from opslot.distributed import offload, reload
    from opslot.models import apply, build_foundation_model, restore
    from opslot.models.flops import count_flops
    from opslot.models.parallelize import parallelize
    from opslot.ops.cross_entropy_loss import loss_only
    from opslot.slots import (
        KERNEL_REGISTRY,
        HardwareRequirement,
        KernelRegistry,
        KernelSpec,
        OpsImplementationConfig,
        OpSlot,
        Requirement,
        bind,
        explain,
    )
    from opslot.verify import verify_kernels
    from opslot.verify.bisect import bisect

_HOMES = {
    "CheckpointError": "opslot._base.errors",
    "ConfigError": "opslot._base.errors",
    "DataError": "opslot._base.errors",
    "KernelError": "opslot._base.errors",
    "OpslotError": "opslot._base.errors",
    "ParallelError": "opslot._base.errors",
    "PatchError": "opslot._base.errors",
    "TrainingError": "opslot._base.errors",
    "KERNEL_REGISTRY": "opslot.slots",
    "HardwareRequirement": "opslot.slots",
    "KernelRegistry": "opslot.slots",
    "KernelSpec": "opslot.slots",
    "OpSlot": "opslot.slots",
    "OpsImplementationConfig": "opslot.slots",
    "Requirement": "opslot.slots",
    "bind": "opslot.slots",
    "explain": "opslot.slots",
    "named_weights": "opslot.checkpoint",
    "offload": "opslot.distributed",
    "reload": "opslot.distributed",
    "loss_only": "opslot.ops.cross_entropy_loss",
    "apply": "opslot.models",
    "build_foundation_model": "opslot.models",
    "count_flops": "opslot.models.flops",
    "parallelize": "opslot.models.parallelize",
    "restore": "opslot.models",
    "trace": "opslot.bench.trace",
    "bisect": "opslot.verify",
    "verify_kernels": "opslot.verify",
}

__all__ = [
    "KERNEL_REGISTRY",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HardwareRequirement",
    "KernelError",
    "KernelRegistry",
    "KernelSpec",
    "OpSlot",
    "OpsImplementationConfig",
    "OpslotError",
    "ParallelError",
    "PatchError",
    "Requirement",
    "TrainingError",
    "apply",
    "bind",
    "bisect",
    "build_foundation_model",
    "count_flops",
    "explain",
    "loss_only",
    "named_weights",
    "offload",
    "parallelize",
    "reload",
    "restore",
    "trace",
    "verify_kernels",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opslot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
