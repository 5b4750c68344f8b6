"""adamw: registration of the op and of its kernels."""

import torch

from opslot.optim.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from opslot.slots.spec import TRITON

KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "triton",
        "adamw",
        "standard",
        "opslot.optim.triton:adamw",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=(TRITON,),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        priority={(9, 0): 80},
        portable=True,
        interpretable=True,
        description="in-place Triton kernel, one launch for the tensors of a parameter group",
    )
)
