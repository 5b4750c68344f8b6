"""expand_kv: registration of the op and of its kernel."""

from opslot.ops._common.specs import triton_kernel
from opslot.ops.expand_kv.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# No priority until it is measured on a GPU.
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name,
        "standard",
        description="keys in one launch, and the gradients of keys and values in another",
    )
)
