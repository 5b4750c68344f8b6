"""unbind_qkv: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, triton_kernel
from opslot.ops.unbind_qkv.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# Forward and backward on an H200, bf16, of 40,960 patches with 16 heads of 72: 0.29 ms, torch 0.48.
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name, "standard", priority={H200: 80}, description="gradients of q, k and v gathered in one launch"
    )
)
