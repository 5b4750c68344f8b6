"""chunk_gated_delta_rule: registration of the op and of its kernels."""

import torch

from opslot.ops._common.chunk_schedule import as_kernel
from opslot.ops._common.specs import (
    FLA,
    FLOATS,
    H200,
    HALF_FLOATS,
    TRITON,
    add_gpu_kernel,
    add_kernel,
    add_triton_kernel,
)
from opslot.ops.chunk_gated_delta_rule.op import (
    FLASH_QLA_WIDTH,
    OP,
    WIDEST_KEY,
    WIDEST_KEY_IN_99_KIB,
    DeltaRule,
    reference,
)
from opslot.slots import KERNEL_REGISTRY, KernelRequest, Requirement

_BROKEN_ON_HOPPER = Requirement("triton", version=">=3.4,<3.7.1")
_TILELANG = Requirement("tilelang")
_FLASH_QLA = Requirement("flash_qla", "flash-qla", ">=0.1.3")


def _width_of_keys(request: KernelRequest) -> int | None:
    # The second is Kimi delta attention's.
    width = getattr(request.module, "head_k_dim", getattr(request.module, "head_dim", None))
    return width if isinstance(width, int) else None


def _keys_fit(request: KernelRequest) -> str | None:
    width = _width_of_keys(request)
    fits = width is None or width <= WIDEST_KEY
    return None if fits else f"takes keys up to {WIDEST_KEY} wide, this module's are {width}"


# GPUs with 99 KiB of shared memory for a CTA.
_LITTLE_SHARED_MEMORY = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})


def _fits(request: KernelRequest) -> str | None:
    if request.dtype != torch.float32 or request.device.capability not in _LITTLE_SHARED_MEMORY:
        return _keys_fit(request)
    width = _width_of_keys(request)
    if width is None or width <= WIDEST_KEY_IN_99_KIB:
        return None
    found = f"this module's are {width}, and the GPU has 99 KiB of shared memory"
    return f"takes keys up to {WIDEST_KEY_IN_99_KIB} wide in float32, {found}"


def _right_on_hopper(request: KernelRequest) -> str | None:
    """fla raises in backward if a Triton bug makes its gradients wrong, unless TileLang computes them."""
    concerned = request.variant == "standard" and request.device.capability == (9, 0)
    if not concerned or _BROKEN_ON_HOPPER.unsupported() or _TILELANG.unsupported() is None:
        return None
    return (
        "computes wrong gradients on Hopper with Triton 3.4 to 3.7.0 (flash-linear-attention issue 640); "
        "install Triton 3.7.1 or tilelang"
    )


_FLASH_QLA_GPUS = frozenset({(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)})


def _supports_flash_qla(request: KernelRequest) -> str | None:
    if request.device.capability is not None and request.device.capability not in _FLASH_QLA_GPUS:
        return "has kernels for Hopper (compute capability 9.0) and Blackwell (10.0, 10.3, 12.0, 12.1)"
    for part, width in (("keys", _width_of_keys(request)), ("values", getattr(request.module, "head_v_dim", None))):
        if isinstance(width, int) and width != FLASH_QLA_WIDTH:
            return f"takes {part} {FLASH_QLA_WIDTH} wide, this module's are {width}"
    return None


def _priority(request: KernelRequest) -> int | None:
    """Forward + backward at Qwen3-Next's sizes (`opslot bench`), beside torch's chunks.

    On an H200 in bf16, 8192 tokens take 1.3 ms (145), 16384 tokens in 16 documents 2.4 (58); Kimi delta attention of
    8192 tokens and 32 heads of 128 takes 4.3. On an H100 in fp16: 2.8 (154), 5.2 (69), 6.3 (186), and in documents 6.4
    (62). There in fp32, without tensor cores: 73 (157), but in documents 149 (68); Kimi delta attention 40 (191), and
    in documents 42 (62).
    """
    measured = FLOATS if request.variant == "per_channel" else HALF_FLOATS
    return 80 if request.dtype in measured else None


KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(
    OP,
    factory="triton:chunk_gated_delta_rule",
    supports=_fits,
    priority={H200: _priority},
    description="chunks of 64 tokens, deterministic, packed documents by cu_seqlens",
)
add_gpu_kernel(
    OP,
    "fla",
    "fla:chunk_gated_delta_rule",
    (FLA, TRITON),
    dtypes=frozenset({torch.bfloat16}),
    supports=lambda request: _keys_fit(request) or _right_on_hopper(request),
    description="flash-linear-attention's chunked kernel, packed documents by cu_seqlens",
)
# In bf16 on an H200, forward and backward, of it and `triton`: 0.77 and 1.25 ms for 8192 tokens and 32 value heads,
# 0.79 and 1.53 for 32,768 and 8. `auto` never selects it: it compiles for minutes where the numbers of heads are new,
# breaks the graph of torch.compile, and reads cu_seqlens on the host.
add_gpu_kernel(
    OP,
    "flash_qla",
    "flash_qla:chunk_gated_delta_rule",
    (_FLASH_QLA,),
    ["standard"],
    capability=(9, 0),
    dtypes=HALF_FLOATS,
    supports=_supports_flash_qla,
    description="FlashQLA's TileLang kernels for keys and values of 128, packed documents by cu_seqlens",
)
add_kernel(
    OP,
    "torch_chunked",
    lambda: as_kernel(DeltaRule, reference),
    # On a CPU as fast as Transformers' chunks (14 % slower at the smallest size measured), and right for packed
    # documents, which Transformers mixes; not measured on a GPU.
    priority={"cpu": 10},
    description="torch alone, chunk by chunk, packed documents by cu_seqlens, any device",
)
