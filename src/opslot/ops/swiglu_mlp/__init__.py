"""swiglu_mlp: registration of the op and of its kernels.

No kernel for CPU: recomputing in backward, in-place products and cache-sized chunks of plain torch were all measured
within 5 % of eager there, or slower ([8192, 256], [8192, 768], [1024, 192] fp32, 1 and 2 threads).
"""

from opslot.ops._common.specs import liger_kernel, triton_kernel
from opslot.ops.swiglu_mlp.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        triton_kernel(OP.name, _variant, priority={"gpu": 80}, description="recomputes the sigmoid in backward")
    )
KERNEL_REGISTRY.register(
    liger_kernel(OP.name, "standard", priority={"gpu": 40}, description="Liger-Kernel, backward on copies")
)
