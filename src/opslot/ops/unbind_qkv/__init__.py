"""unbind_qkv: registration of the op and of its kernels."""

from opslot.ops._common.specs import triton_kernel
from opslot.ops.unbind_qkv.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# Not measured, so `auto` never selects it.
KERNEL_REGISTRY.register(
    triton_kernel(OP.name, "standard", priority=None, description="gradients of q, k and v gathered in one launch")
)
