"""rms_norm: registration of the op and of its kernels."""

import re

from opslot._base.device import package_version
from opslot.ops._common.specs import (
    HALF_FLOATS,
    cpu_rank,
    liger_kernel,
    npu_kernel,
    quack_kernel,
    torch_kernel,
    triton_kernel,
)
from opslot.ops.rms_norm.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, KernelSpec


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _quack_serves(request: KernelRequest) -> str | None:
    version = package_version("quack-kernels") or "0"
    if request.variant == "offset" and _numbers(version) < (0, 6, 3):
        return f"needs quack-kernels 0.6.3 or later, this is {version}"
    weight = getattr(request.module, "weight", None)
    if weight is not None and weight.shape[-1] % 8:
        return f"needs a width that is a multiple of 8, found {weight.shape[-1]}"
    return None


# Forward + backward on an H200, bf16, kernels alone, at 16384x4096, 16384x2048 and 524288x128 (ms): triton 0.175, 0.094
# and 0.174, quack 0.189, 0.112 and 0.190, liger_kernel 0.300, 0.204 and 0.505, eager 2.69, 1.40 and 2.97.
KERNEL_REGISTRY.register_op(OP)
for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        triton_kernel(OP.name, _variant, priority={"gpu": 80}, description="one pass each way, deterministic")
    )
for _variant in ("standard", "offset", "cast_last", "residual", "residual_cast_last"):
    # By a name of its own, which promises what `triton` happens to have.
    KERNEL_REGISTRY.register(
        triton_kernel(
            OP.name,
            _variant,
            name="batch_invariant",
            function=_variant,
            description="triton; a row's bits free of its batch",
        )
    )
for _variant in ("standard", "offset", "cast_last"):
    KERNEL_REGISTRY.register(
        liger_kernel(OP.name, _variant, priority={"gpu": 60}, description="Liger-Kernel, out of place")
    )
    KERNEL_REGISTRY.register(
        torch_kernel(OP.name, _variant, priority=cpu_rank(60), description="plain torch with its own backward")
    )
for _variant in ("standard", "offset", "cast_last", "unweighted"):
    KERNEL_REGISTRY.register(
        quack_kernel(
            OP.name, _variant, supports=_quack_serves, priority={"gpu": 70}, description="quack-kernels, on CuTe"
        )
    )
# Not timed beside triton, so never chosen by itself.
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        OP.name,
        "gated",
        "opslot.ops.rms_norm.fla:gated",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        # In fp32 its forward misses by 14 times eager code's error on an H200.
        dtypes=HALF_FLOATS,
        description="flash-linear-attention's kernel",
    )
)
KERNEL_REGISTRY.register(npu_kernel(OP.name, "standard", priority={"npu": 60}, description="torch_npu.npu_rms_norm"))
