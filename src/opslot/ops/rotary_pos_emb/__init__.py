"""rotary_pos_emb: registration of the op and of its kernels."""

from opslot.ops._common.specs import H200, fp32_priority, liger_kernel, npu_kernel, torch_kernel, triton_kernel
from opslot.ops.rotary_pos_emb.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        triton_kernel(
            OP.name,
            _variant,
            priority={H200: 80},
            description="q and k in one launch, no copies",
        )
    )
for _variant in ("full", "full_fp32", "single", "half_cos_sin", "partial"):
    KERNEL_REGISTRY.register(
        torch_kernel(
            OP.name, _variant, priority={"cpu": fp32_priority(60)}, description="plain torch with a custom backward"
        )
    )
# With copies that keep the caller's q and k it is faster than eager and slower than triton.
KERNEL_REGISTRY.register(liger_kernel(OP.name, "full", priority={H200: 40}, description="Liger-Kernel, on copies"))
KERNEL_REGISTRY.register(npu_kernel(OP.name, "full", priority={"npu": 60}, description="torch_npu.npu_rotary_mul"))
