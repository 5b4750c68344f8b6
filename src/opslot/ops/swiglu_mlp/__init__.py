"""swiglu_mlp: registration of the op and of its kernels.

No kernel for CPU: recomputing in backward, in-place multiplication and cache-sized chunks of plain torch were all
measured within 5 % of eager there, or slower ([8192, 256], [8192, 768], [1024, 192] fp32, 1 and 2 threads).
"""

from collections.abc import Callable

from opslot.ops._common.specs import H200, add_liger_kernel, add_triton_kernel
from opslot.ops.swiglu_mlp.op import OP, activation_of, static_shape
from opslot.slots import KERNEL_REGISTRY, KernelRequest

# Eager's two launches cost the host less than an autograd.Function in Python, by 20 to 100 us forward + backward on the
# H200's host. At 16384 tokens x 768 that is more than the 40 us that the GPU saves (alone: eager 0.11 ms, triton 0.14,
# liger_kernel 0.33); from twice that width on, the GPU saves more. The other variants' eager code has launches enough
# to be slower at every width measured, 256 to 12288.
_SMALL = 1536


def _unless_narrow(value: int) -> Callable[[KernelRequest], int | None]:
    def priority(request: KernelRequest) -> int | None:
        shape = static_shape(request) if request.variant == "standard" else None
        return value if shape is None or shape["width"] >= _SMALL else None

    return priority


def _liger_activations(request: KernelRequest) -> str | None:
    name = activation_of(request)
    return None if name in ("silu", "gelu_tanh") else f"requires SiLU or the tanh approximation of GELU, found {name}"


KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(OP, priority={H200: _unless_narrow(80)}, description="recomputes the activation in backward")
add_liger_kernel(
    OP,
    ["standard"],
    supports=_liger_activations,
    priority={H200: _unless_narrow(40)},
    description="Liger-Kernel, backward on copies",
)
