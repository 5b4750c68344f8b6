"""load_balancing_loss: registration of the op and of its kernels."""

from opslot.ops._common.specs import triton_kernel
from opslot.ops.load_balancing_loss.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# Measured at 48 layers x 16384 x 128, top 8: 1.0 to 1.6 ms where eager takes 11.5 to 13.
KERNEL_REGISTRY.register(
    triton_kernel(OP.name, "standard", priority={"gpu": 80}, description="one launch over all layers, deterministic")
)
