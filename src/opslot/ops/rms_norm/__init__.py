"""rms_norm: registration of the op and of its kernels."""

from opslot.ops.rms_norm.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
