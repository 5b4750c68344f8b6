"""linear_fp32: registration of the op and of its kernel."""

import torch

from opslot.ops._common.specs import H200, add_gpu_kernel, add_triton_kernel
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
# Slower than cuBLAS, so `auto` never selects it.
add_triton_kernel(
    OP,
    name="batch_invariant",
    factory="batch_invariant:standard",
    description="linear's kernel of that name on copies in float32",
)
