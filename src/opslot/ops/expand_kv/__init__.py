"""expand_kv: registration of the op and of its kernel."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.expand_kv.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(
    OP,
    priority={H200: 80},
    description="keys in one launch, and the gradients of keys and values in another",
)
