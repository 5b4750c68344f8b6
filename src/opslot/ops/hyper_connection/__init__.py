"""hyper_connection: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_triton_kernel
from opslot.ops.hyper_connection.op import OP, unsupported_streams
from opslot.slots import KERNEL_REGISTRY, KernelRequest


def _supports(request: KernelRequest) -> str | None:
    counts = (getattr(where, "hc_mult", None) for where in (request.module, request.config))
    count = next((count for count in counts if count is not None), None)
    return None if count is None else unsupported_streams(count)


KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(
    OP,
    priority={H200: 80},
    supports=_supports,
    description="streams are read twice in a pass, the coefficients of a token take one launch",
)
