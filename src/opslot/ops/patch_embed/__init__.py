"""patch_embed: registration of the op and of its kernel."""

from opslot.ops._common.specs import H200, add_kernel
from opslot.ops.patch_embed.op import OP, patch_shape
from opslot.slots import KERNEL_REGISTRY, KernelRequest


def _cpu_priority(request: KernelRequest) -> int | None:
    """On a CPU four times as fast as Conv3d over 1024 patches of Qwen3-VL, and slower than Conv2d over images."""
    shape = patch_shape(request)
    return 40 if shape is None or len(shape) == 3 else None


# Forward and backward on an H200, bf16, of the convolution and of `linear` (ms):
#   Conv3d, 16,384 patches of Qwen3-VL to 1152      25.6   0.33
#   Conv2d, 8 x 896 x 896, patches of 14 to 1152    3.36   0.65
#   Conv2d, 16 x 1024 x 1024, 16 to 1024            7.77   0.62
#   Conv2d, 64 x 336 x 336, 14 to 1024              2.67   0.76
#   Conv2d, 64 x 224 x 224, 16 to 768               1.04   0.57
#   Conv2d, 4 x 512 x 512, 32 to 768                0.68   0.52
KERNEL_REGISTRY.register_op(OP)
add_kernel(
    OP,
    "linear",
    "linear:linear",
    priority={H200: 80, "cpu": _cpu_priority},
    portable=True,
    description="one matmul over the flattened patches",
)
