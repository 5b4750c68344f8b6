"""cross_entropy_loss: registration of the op and of its kernels."""

import torch

from opslot.ops.cross_entropy_loss.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

_HALF_AND_SINGLE = frozenset({torch.float32, torch.bfloat16, torch.float16})

KERNEL_REGISTRY.register_op(OP)

for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        KernelSpec(
            "triton",
            OP.name,
            _variant,
            f"opslot.ops.cross_entropy_loss.triton:{_variant}",
            hardware=HardwareRequirement("gpu", min_compute_capability=80),
            requires=("triton",),
            dtypes=_HALF_AND_SINGLE,
            priority={"gpu": 80},
            interpretable=True,
            description="cuBLAS products and one in-place softmax-gradient kernel per chunk",
        )
    )
    KERNEL_REGISTRY.register(
        KernelSpec(
            "chunk_loss",
            OP.name,
            _variant,
            f"opslot.ops.cross_entropy_loss.chunk_loss:{_variant}",
            priority={"gpu": 40, "cpu": 60},
            description="plain torch, chunk by chunk, never the full logits",
        )
    )
    KERNEL_REGISTRY.register(
        KernelSpec(
            "npu",
            OP.name,
            _variant,
            f"opslot.ops.cross_entropy_loss.npu:{_variant}",
            hardware=HardwareRequirement("npu"),
            requires=("torch_npu",),
            priority={"npu": 60},
            description="chunk_loss on Ascend",
        )
    )

for _variant in ("causal", "sequence_classification"):
    KERNEL_REGISTRY.register(
        KernelSpec(
            "liger_kernel",
            OP.name,
            _variant,
            f"opslot.ops.cross_entropy_loss.liger:{_variant}",
            hardware=HardwareRequirement("gpu", min_compute_capability=80),
            requires=("triton", "liger_kernel"),
            dtypes=_HALF_AND_SINGLE,
            priority={"gpu": 20},
            description="Liger's fused linear cross entropy, summed in float32",
        )
    )
