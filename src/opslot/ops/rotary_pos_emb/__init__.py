"""rotary_pos_emb: registration of the op and of its kernels."""

from opslot.ops._common.specs import (
    H200,
    add_liger_kernel,
    add_npu_kernel,
    add_torch_kernel,
    add_triton_kernel,
    fp32_priority,
)
from opslot.ops.rotary_pos_emb.op import OP
from opslot.slots import KERNEL_REGISTRY

KERNEL_REGISTRY.register_op(OP)
_WITH_NORM = [name for name in OP.variants if "norm" in name]
# A training step of three layers of DeepSeek-V4, 8192 tokens on an H200: 165 ms, with Transformers' rotations 193.
add_triton_kernel(
    OP,
    [name for name in OP.variants if name not in _WITH_NORM],
    priority={H200: 80},
    description="q and k in one launch, no copies",
)
# Forward + backward on an H200, 8192 tokens, 32 and 8 heads of 128, kernels alone: 0.127 ms, norms and rotation
# in separate launches 0.218; rotated in part 0.176 and 0.222; with the norms last 0.150 and 0.535.
add_triton_kernel(
    OP,
    _WITH_NORM,
    factory="norm_triton:{variant}",
    priority={H200: 80},
    description="both norms and the rotation of q and k in one launch, deterministic",
)
add_torch_kernel(
    OP,
    ["full", "full_fp32", "single", "half_cos_sin", "partial"],
    priority={"cpu": fp32_priority},
    description="plain torch with a custom backward",
)
# With copies that keep the caller's q and k it is faster than eager and slower than triton.
add_liger_kernel(OP, ["full"], priority={H200: 40}, description="Liger-Kernel, on copies")
add_npu_kernel(OP, ["full"], priority={"npu": 60}, description="torch_npu.npu_rotary_mul")
