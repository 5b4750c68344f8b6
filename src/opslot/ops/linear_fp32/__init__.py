"""linear_fp32: registration of the op and of its kernel."""

import torch

from opslot.ops._common.specs import H200, add_gpu_kernel
from opslot.ops.linear_fp32.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
add_gpu_kernel(
    OP,
    "torch_mm",
    "torch_mm:standard",
    (),
    dtypes=frozenset({torch.bfloat16}),
    priority={H200: 80},
    portable=True,
    description="matmuls of bfloat16 with float32 sums and results, without copies in float32",
)
