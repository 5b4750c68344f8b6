"""moe_experts: registration of the op and of its kernels."""

from opslot.ops.moe_experts.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelSpec

_HERE = "opslot.ops.moe_experts"

KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "grouped_mm",
        "moe_experts",
        "standard",
        f"{_HERE}.grouped_mm:grouped_mm",
        priority={"gpu": 40, "cpu": 60, "npu": 20},
        description="tokens sorted by expert; torch's grouped product on GPUs, mm in place on CPUs",
    )
)
