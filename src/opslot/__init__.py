"""opslot: selects, checks and explains the kernel of each op of a Transformers model.

Importing this package changes nothing in anybody's modules and imports no kernel vendor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.lazy import lazy_names, register_provider

__version__ = "0.1.0"

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
    from opslot.models._multimodal.unused_modules import drop_gradients_of_unused_modules
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
    "drop_gradients_of_unused_modules",
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

register_provider("patches", "opslot.models.discovery")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "opslot._base.errors": "CheckpointError ConfigError DataError KernelError OpslotError ParallelError PatchError"
        " TrainingError",
        "opslot.bench.trace": "trace",
        "opslot.checkpoint": "named_weights",
        "opslot.distributed": "offload reload",
        "opslot.models": "apply build_foundation_model restore",
        "opslot.models._multimodal.unused_modules": "drop_gradients_of_unused_modules",
        "opslot.models.flops": "count_flops",
        "opslot.models.parallelize": "parallelize",
        "opslot.ops.cross_entropy_loss": "loss_only",
        "opslot.slots": "KERNEL_REGISTRY HardwareRequirement KernelRegistry KernelSpec OpSlot OpsImplementationConfig"
        " Requirement bind explain",
        "opslot.verify": "bisect verify_kernels",
    },
)
