"""chunk_gated_delta_rule: registration of the op and of its kernels."""

import re

import torch

from opslot._base.device import has_package, package_version
from opslot.ops._common.specs import triton_kernel
from opslot.ops.chunk_gated_delta_rule.op import OP, WIDEST_KEY
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, KernelSpec

_HERE = "opslot.ops.chunk_gated_delta_rule"


def _keys_fit(request: KernelRequest) -> str | None:
    width = getattr(request.module, "head_k_dim", None)
    fits = not isinstance(width, int) or width <= WIDEST_KEY
    return None if fits else f"takes keys up to {WIDEST_KEY} wide, this module's are {width}"


def _right_on_hopper(request: KernelRequest) -> str | None:
    """fla raises in backward where Triton's own fault makes its gradients wrong, unless TileLang computes them."""
    found = tuple(int(part) for part in re.findall(r"\d+", package_version("triton") or "0")[:3])
    if request.device.capability != (9, 0) or not (3, 4) <= found < (3, 7, 1) or has_package("tilelang"):
        return None
    return (
        f"has no right gradients on Hopper with Triton 3.4 to 3.7.0 (flash-linear-attention issue 640), this is "
        f"{'.'.join(map(str, found))}; install Triton 3.7.1 or tilelang"
    )


def _triton_rank(request: KernelRequest) -> int | None:
    """On an H200 in bf16, the one dtype timed, forward + backward at Qwen3-Next's sizes (benchmarks/gpu_delta.py).

    8192 tokens take 2.0 ms where torch's chunks take 139; 16384 tokens in 16 documents, 4.0 where those take 57.
    """
    return 80 if request.device.type == "gpu" and request.dtype == torch.bfloat16 else None


KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    triton_kernel(
        OP.name,
        "standard",
        function="chunk_gated_delta_rule",
        supports=_keys_fit,
        priority=_triton_rank,
        description="chunks of 64 tokens, deterministic, packed documents by cu_seqlens",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        OP.name,
        "standard",
        f"{_HERE}.fla:chunk_gated_delta_rule",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        dtypes=frozenset({torch.bfloat16}),
        supports=lambda request: _keys_fit(request) or _right_on_hopper(request),
        description="flash-linear-attention's chunked kernel, packed documents by cu_seqlens",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "torch_chunked",
        OP.name,
        "standard",
        f"{_HERE}.op:reference",
        # On a CPU as fast as upstream's own chunks (14 % slower at the smallest size measured), and right for packed
        # documents, which upstream mixes; not timed on a GPU.
        priority={"cpu": 10},
        description="torch alone, chunk by chunk, packed documents by cu_seqlens, any device",
    )
)
