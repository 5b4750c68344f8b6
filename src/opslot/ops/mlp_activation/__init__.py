"""mlp_activation: registration of the op and of its kernels."""

from opslot.ops._common.specs import add_triton_kernel
from opslot.ops.mlp_activation.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# Not measured yet, so without a priority: `auto` does not select it.
add_triton_kernel(OP, description="one launch forward and one backward, keeps the input alone")
