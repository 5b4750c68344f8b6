"""causal_conv1d: registration of the op and of its kernels."""

import torch

from opslot.ops.causal_conv1d.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        "causal_conv1d",
        "standard",
        "opslot.ops.causal_conv1d.fla:causal_conv1d",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        # Proven on an H200 but not timed, so `auto` leaves it alone.
        description="flash-linear-attention's kernel, packed documents by cu_seqlens",
    )
)
