"""rms_norm: registration of the op and of its kernels."""

from opslot.ops._common.specs import liger_kernel, npu_kernel, torch_kernel, triton_kernel
from opslot.ops.rms_norm.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        triton_kernel(OP.name, _variant, priority={"gpu": 80}, description="one pass each way, deterministic")
    )
for _variant in ("standard", "offset"):
    KERNEL_REGISTRY.register(
        liger_kernel(OP.name, _variant, priority={"gpu": 60}, description="Liger-Kernel, out of place")
    )
    KERNEL_REGISTRY.register(
        torch_kernel(OP.name, _variant, priority={"cpu": 60}, description="plain torch with its own backward")
    )
KERNEL_REGISTRY.register(npu_kernel(OP.name, "standard", priority={"npu": 60}, description="torch_npu.npu_rms_norm"))
