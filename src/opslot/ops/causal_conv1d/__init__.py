"""causal_conv1d: registration of the op and of its kernels."""

import torch

from opslot.ops._common.specs import triton_kernel
from opslot.ops.causal_conv1d.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

KERNEL_REGISTRY.register_op(OP)
# Nothing has been timed beside eager code on a GPU, so `auto` leaves it alone there.
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name,
        "standard",
        description="one pass each way, deterministic, up to four taps, packed documents by cu_seqlens",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        OP.name,
        "standard",
        "opslot.ops.causal_conv1d.fla:causal_conv1d",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        # Proven in no other; fla tunes itself for 20 seconds a dtype and filter.
        dtypes=frozenset({torch.bfloat16}),
        description="flash-linear-attention's kernel, packed documents by cu_seqlens",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "torch_packed",
        OP.name,
        "standard",
        "opslot.ops.causal_conv1d.op:reference",
        # The same convolution as upstream's, and right for packed documents, whose windows upstream lets overlap.
        priority={"cpu": 10},
        description="torch's own convolution, packed documents by cu_seqlens, any device",
    )
)
