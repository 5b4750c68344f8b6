"""load_balancing_loss: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.load_balancing_loss.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# At 48 layers x 16384 x 128, top 8, on an H200: 0.42 ms of kernels and 1.2 ms alone, where eager takes 9.4 and 10.0.
# "Alone" is bound by the host, which takes 0.4 to 0.7 ms for any autograd.Function of 48 tensors.
add_triton_kernel(OP, priority={H200: 80}, description="one launch over all layers, deterministic")
