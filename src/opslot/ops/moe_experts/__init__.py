"""moe_experts: registration of the op and of its kernels."""

import torch

from opslot.ops.moe_experts.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, KernelSpec

_HERE = "opslot.ops.moe_experts"
_HALF = frozenset({torch.float16, torch.bfloat16})


def _triton_rank(request: KernelRequest) -> int | None:
    """In fp32 Triton's exact product loses to cuBLAS."""
    return 80 if request.device.type == "gpu" and request.dtype in _HALF else None


def _multiples_of_8(request: KernelRequest) -> str | None:
    down = getattr(request.module, "down_proj", None)
    widths = tuple(down.shape[1:]) if down is not None else ()
    return f"needs widths that are multiples of 8, found {widths}" if any(w % 8 for w in widths) else None


KERNEL_REGISTRY.register_op(OP)
for _spec in (
    KernelSpec(
        "grouped_mm",
        "moe_experts",
        "standard",
        f"{_HERE}.grouped_mm:grouped_mm",
        priority={"gpu": 40, "cpu": 60, "npu": 20},
        description="tokens sorted by expert; torch's grouped product on GPUs, mm in place on CPUs",
    ),
    KernelSpec(
        "fused_triton",
        "moe_experts",
        "standard",
        f"{_HERE}.triton:fused_triton",
        HardwareRequirement("gpu", min_compute_capability=80),
        requires=("triton",),
        dtypes=_HALF | {torch.float32},
        priority=_triton_rank,
        interpretable=True,
        description="grouped Triton products with SwiGLU and routing weights in their epilogues",
    ),
    KernelSpec(
        "fused_npu",
        "moe_experts",
        "standard",
        f"{_HERE}.npu:fused_npu",
        HardwareRequirement("npu"),
        requires=("torch_npu",),
        dtypes=_HALF,
        priority={"npu": 80},
        description="grouped_mm on Ascend's grouped products",
    ),
    KernelSpec(
        "fused_quack",
        "moe_experts",
        "standard",
        f"{_HERE}.quack:fused_quack",
        HardwareRequirement("gpu", min_compute_capability=90),
        requires=("quack", "triton"),
        dtypes=_HALF,
        supports=_multiples_of_8,
        priority={"gpu": 90},
        description="quack-kernels' grouped CuTe products with gather and SwiGLU inside",
    ),
):
    KERNEL_REGISTRY.register(_spec)
