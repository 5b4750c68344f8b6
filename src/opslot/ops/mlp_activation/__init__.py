"""mlp_activation: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, add_torch_kernel, add_triton_kernel
from opslot.ops.mlp_activation.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
# On an H200: docs/performance.md. gelu_tanh of [2048, 4096] on two cores of a Xeon: 0.15 to 0.2 s in float32 (eager
# 0.72), 0.1 in bfloat16 (0.42).
add_triton_kernel(
    OP,
    ("relu2", "quick_gelu", "xielu"),
    priority={H200: 80},
    description="one launch forward and one backward, keeps the input alone",
)
add_torch_kernel(OP, ["gelu_tanh"], priority={H200: 80, "cpu": 60}, description="torch's function of it")
