"""indexer_scores: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.indexer_scores.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# 64 heads of 128 in bf16 on an H200, 8192 tokens: 1.3 ms, and 1.7 ms with the selection of 2048 keys, where eager takes
# 53 ms with torch.topk, and 48 GiB.
add_triton_kernel(OP, ["standard"], priority={H200: 80}, description="one launch, no scores of single heads in memory")
# 4 heads of 128 in bf16 on an H100, 4096, 8192 and 16384 tokens: 0.11, 0.25 and 0.83 ms (eager 4.1, 15 and 60), and at
# 16384 tokens 32 MiB (8.5 GiB).
add_triton_kernel(
    OP,
    ["block_max"],
    priority={H200: 80},
    factory="block_max_triton:{variant}",
    description="one launch, no scores of single keys in memory",
)
