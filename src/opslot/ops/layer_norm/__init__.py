"""layer_norm: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.layer_norm.op import MAX_WIDTH, OP, normalized_shape
from opslot.slots import KERNEL_REGISTRY, KernelRequest


def _unsupported(request: KernelRequest) -> str | None:
    shape = normalized_shape(request.module)
    if shape is None:
        return None
    if len(shape) != 1:
        return f"normalizes one dimension, this module {len(shape)}"
    return None if shape[0] <= MAX_WIDTH else f"supports widths up to {MAX_WIDTH}, this module's is {shape[0]}"


# Forward + backward on an H200, in bf16: docs/performance.md; 8192x1152 and 8192x4096 take 0.073 and 0.181 ms in fp32
# (torch 0.115, 0.330), 0.088 and 0.099 in fp16 (0.092, 0.179).
KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(OP, supports=_unsupported, priority={H200: 80}, description="one pass each way, deterministic")
add_triton_kernel(
    OP,
    name="triton_or_torch",
    factory="by_size:{variant}",
    supports=_unsupported,
    priority={H200: 85},
    description="torch's function for few tokens, which takes less time on the host",
)
