"""rms_norm: registration of the op and of its kernels."""

from opslot.ops._common.specs import (
    CUTLASS,
    FLA,
    H200,
    HALF_FLOATS,
    QUACK,
    TRITON,
    add_gpu_kernel,
    add_liger_kernel,
    add_npu_kernel,
    add_torch_kernel,
    add_triton_kernel,
    fp32_priority,
)
from opslot.ops.rms_norm.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest, Requirement

# The first release whose kernel takes a weight_offset.
_QUACK_WITH_OFFSET = Requirement("quack", "quack-kernels", ">=0.6.3")


def _multiple_of_8(request: KernelRequest) -> str | None:
    weight = getattr(request.module, "weight", None)
    if weight is not None and weight.shape[-1] % 8:
        return f"requires a width that is a multiple of 8, found {weight.shape[-1]}"
    return None


# Measured on an H200 (docs/performance.md), beside which (ms):
# weight_offset_groups on an H100, (8192, 8192) and (16384, 8192) in groups of 2048, (131072, 256) and (32768, 256) in
# one: triton 1.09, 0.94, 0.42 and 0.35, eager 3.93, 7.67, 2.13 and 0.70.
# gated_groups, measured with an earlier kernel, at the sizes of Nemotron-3-Nano and Bamba-9B, 8192 tokens: 0.26 and
# 0.40, eager 2.02 and 3.90.
_WEIGHTED = ("standard", "weight_offset", "cast_after_weight")
KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(OP, priority={H200: 80}, description="one pass each way, deterministic")
add_triton_kernel(
    OP,
    ("standard", "cast_after_weight", "fused_add", "fused_add_cast_after_weight"),
    name="triton_or_torch",
    factory="by_size:{variant}",
    priority={H200: 85},
    description="torch's rms_norm for few tokens, which takes less time on the host",
)
# A separate name that guarantees the property; `triton` also has it.
add_triton_kernel(OP, name="batch_invariant", description="triton, batch-invariant")
add_liger_kernel(OP, _WEIGHTED, priority={H200: 60}, description="Liger-Kernel, not in place")
add_torch_kernel(OP, _WEIGHTED, priority={"cpu": fp32_priority}, description="plain torch with a custom backward")
for _quack, _variants in (
    (QUACK, ["standard", "cast_after_weight", "unweighted"]),
    (_QUACK_WITH_OFFSET, ["weight_offset"]),
):
    add_gpu_kernel(
        OP,
        "quack",
        "quack:{variant}",
        (_quack, CUTLASS),
        _variants,
        capability=(9, 0),
        supports=_multiple_of_8,
        priority={H200: 70},
        description="quack-kernels, on CuTe",
    )
# Slower than triton, so `auto` never selects it.
add_gpu_kernel(
    OP,
    "fla",
    "fla:{variant}",
    (FLA, TRITON),
    ["gated"],
    # In fp32 its forward has 14 times the error of eager code on an H200.
    dtypes=HALF_FLOATS,
    description="flash-linear-attention's kernel",
)
add_npu_kernel(OP, ["standard"], priority={"npu": 60}, description="torch_npu.npu_rms_norm")
