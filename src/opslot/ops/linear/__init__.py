"""linear: registration of the op and of its kernels."""

from opslot.ops._common.specs import FLOATS, H200, HALF_FLOATS, add_kernel, add_triton_kernel
from opslot.ops.linear.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest

# Fourth-generation tensor cores: Ada and Hopper.
_FP8_CAPABILITY = (8, 9)
# Rounding to 3 bits of mantissa has a root mean square error of 2.6 %, to 2 bits (gradients) of 5.2 %: 3.7 % for a
# product of two of the former, 5.8 % for one of each; the rest is for elements below the normal range.
_FP8_ERROR = 0.08


def _fp8_unsupported(request: KernelRequest) -> str | None:
    capability = request.device.capability
    if request.device.type == "gpu" and capability is not None and capability < _FP8_CAPABILITY:
        return f"requires compute capability 8.9 or higher, this is {request.device}"
    return None


KERNEL_REGISTRY.register_op(OP)
# Slower than cuBLAS, so `auto` never selects it.
add_triton_kernel(
    OP,
    name="batch_invariant",
    factory="triton:standard",
    description="a token's result does not depend on the batch",
)
# Forward and backward in bf16 on an H200, 40,960 tokens: 1280 to 3420 1.63 ms, without padding 4.48; 3420 to 1280 1.66
# and 5.33.
add_kernel(
    OP,
    "aligned",
    "aligned:standard",
    ["unaligned"],
    dtypes=FLOATS,
    priority={H200: lambda request: 80 if request.dtype in HALF_FLOATS else None},
    description="cuBLAS, with rows padded to 16 bytes",
)
add_kernel(
    OP,
    "fp8",
    "fp8:standard",
    ["standard", "unaligned"],
    dtypes=FLOATS,
    supports=_fp8_unsupported,
    relative_error=_FP8_ERROR,
    description="FP8 matmuls with one scale per tensor, in forward and backward",
)
