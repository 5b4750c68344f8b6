"""linear: registration of the op and of its kernels."""

from opslot.ops._common.specs import triton_kernel
from opslot.ops.linear.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# cuBLAS is faster, so `auto` never selects it.
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name,
        "standard",
        name="batch_invariant",
        function="standard",
        description="a token's result does not depend on the batch",
    )
)
