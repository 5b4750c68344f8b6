"""layer_norm: registration of the op and of its kernels."""

from opslot.ops._common.specs import liger_kernel, triton_kernel
from opslot.ops.layer_norm.op import MAX_WIDTH, OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest


def _unsupported(request: KernelRequest) -> str | None:
    shape = getattr(request.module, "normalized_shape", (1,))
    if len(shape) != 1:
        return f"normalizes one dimension, this module {len(shape)}"
    return None if shape[0] <= MAX_WIDTH else f"supports widths up to {MAX_WIDTH}, this module's is {shape[0]}"


def _unsupported_by_liger(request: KernelRequest) -> str | None:
    affine = request.module is None or getattr(request.module, "bias", None) is not None
    return _unsupported(request) or (None if affine else "requires a weight and a bias")


KERNEL_REGISTRY.register_op(OP)
# Not measured: without a priority, `auto` leaves layer norms to torch and does not list them.
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name,
        "standard",
        supports=_unsupported,
        priority=None,
        description="one pass each way, deterministic",
    )
)
KERNEL_REGISTRY.register(liger_kernel(OP.name, "standard", supports=_unsupported_by_liger, description="Liger-Kernel"))
