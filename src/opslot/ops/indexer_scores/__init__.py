"""indexer_scores: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.indexer_scores.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(OP, priority={H200: 80}, description="one launch, no products of heads in memory")
