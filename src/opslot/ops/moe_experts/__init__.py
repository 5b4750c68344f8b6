"""moe_experts: registration of the op and of its kernels."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from opslot._base.device import package_version
from opslot.ops._common.activations import activation_name
from opslot.ops._common.specs import (
    CUTLASS,
    H200,
    HALF_FLOATS,
    QUACK,
    TRITON,
    add_gpu_kernel,
    add_kernel,
    add_npu_kernel,
    add_triton_kernel,
    priority_in_16_bits,
)
from opslot.ops.moe_experts.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest
from opslot.slots.protocol import is_adapted

# The others compute the same GEMMs from other layouts, and have their priorities without a measurement.
_MEASURED = ("standard", "clamped", "biased", "split")


def _grouped_mm_on_gpu(request: KernelRequest) -> int | None:
    """All variants but `standard` were measured only in bf16."""
    return 40 if request.variant == "standard" or request.dtype == torch.bfloat16 else None


def _grouped_mm_on_cpu(request: KernelRequest) -> int | None:
    """In 16 bits, the clamped variants take 0.7 to 1.2 times as long as the loop."""
    return None if request.variant in ("clamped", "biased") and request.dtype in HALF_FLOATS else 60


def _multiples_of_8(request: KernelRequest) -> str | None:
    down = getattr(request.module, "down_proj", None)
    widths = tuple(down.shape[1:]) if down is not None else ()
    if any(width % 8 for width in widths):
        return f"requires hidden and intermediate sizes that are multiples of 8, found {widths}"
    return None


def _quack_priority(request: KernelRequest) -> int:
    """Adapters (LoRA) would be added to the weights; fused_triton computes them beside the weights."""
    return 70 if request.module is not None and is_adapted(request.module) else 90


def _silu(request: KernelRequest) -> str | None:
    activation = getattr(request.module, "act_fn", None)
    if activation is None or activation_name(activation) == "silu":
        return None
    return f"supports SiLU, the experts' activation is {type(activation).__name__}"


def _gated_gemms(request: KernelRequest) -> str | None:
    """From 0.6.2 on, quack identifies a gated GEMM by the source of the functions that it calls, which fails for those
    of CuTe DSL unless their path shows that they are an installed package's."""
    version = package_version("quack-kernels")
    if version is None or Version(version) < Version("0.6.2"):
        return None
    spec = importlib.util.find_spec("cutlass")
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    if {"site-packages", "dist-packages"} & set(Path(folder).parts):
        return None
    return f"requires CuTe DSL in a site-packages folder with quack-kernels {version}, found {folder}"


def _gpu(variant: str) -> Any:
    """The GPUs that priorities hold for: those measured, or all."""
    return H200 if variant in _MEASURED else "gpu"


# On an H200: docs/performance.md; of Qwen3-30B-A3B's layer in bf16, fused_quack and fused_triton take 7.3 and 7.5 ms at
# T=16384, both 1.8 at T=2048, and 2.0 and 1.7 at T=256, which is host-bound; of the DeepSeek-V3 slice 28.8 and 29.3.
# On two CPU cores, H 128 to 512, grouped_mm takes 0.51 to 0.87 of the loop's time, in fp32 0.68 to 0.96 for the bounded
# gatings; for `split`, with 8 to 64 experts and T 64 to 1024, 0.17 to 0.96 in fp32, 0.28 to 0.97 in bf16 and 0.43 to
# 1.03 in fp16, the more experts the less.
# The priorities on NPUs are not measured; they keep `auto` off Transformers' loop, which synchronizes for every expert.
KERNEL_REGISTRY.register_op(OP)
for _variant in OP.variants:
    add_kernel(
        OP,
        "grouped_mm",
        "grouped_mm:{variant}",
        [_variant],
        priority={_gpu(_variant): _grouped_mm_on_gpu, "cpu": _grouped_mm_on_cpu, "npu": 20},
        portable=True,
        description="tokens sorted by expert; torch's grouped GEMM on GPUs, mm in place on CPUs",
    )
    add_triton_kernel(
        OP,
        [_variant],
        name="fused_triton",
        # Not measured in fp32, where its matmuls use no tensor cores.
        priority={_gpu(_variant): priority_in_16_bits},
        description="grouped Triton GEMMs with gating and routing weights in their epilogues",
    )
add_npu_kernel(
    OP,
    ["standard"],
    name="fused_npu",
    dtypes=HALF_FLOATS,
    priority={"npu": 80},
    description="grouped_mm on Ascend's grouped GEMMs",
)
add_gpu_kernel(
    OP,
    "fused_quack",
    "quack:{variant}",
    (QUACK, CUTLASS, TRITON),
    ["standard"],
    capability=(9, 0),
    dtypes=HALF_FLOATS,
    supports=lambda request: _silu(request) or _multiples_of_8(request) or _gated_gemms(request),
    priority={H200: _quack_priority},
    description="quack-kernels' grouped CuTe GEMMs with gather and SwiGLU inside",
)
