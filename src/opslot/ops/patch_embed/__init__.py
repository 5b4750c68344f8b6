"""patch_embed: registration of the op and of its kernel."""

from opslot.ops.patch_embed.op import OP, patch_shape
from opslot.slots import KERNEL_REGISTRY, KernelRequest, KernelSpec


def _cpu_priority(request: KernelRequest) -> int | None:
    """On a CPU four times as fast as Conv3d over 1024 patches of Qwen3-VL, and slower than Conv2d over images."""
    shape = patch_shape(request)
    return 40 if shape is None or len(shape) == 3 else None


KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "linear",
        OP.name,
        "standard",
        "opslot.ops.patch_embed.linear:linear",
        # Not measured on GPUs yet, so `auto` does not select it there.
        priority={"cpu": _cpu_priority},
        portable=True,
        description="one matmul over the flattened patches",
    )
)
