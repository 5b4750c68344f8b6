"""causal_conv1d: registration of the op and of its kernels."""

import torch
from torch import nn

from opslot.ops._common.specs import FLA, H200, TRITON, add_gpu_kernel, add_kernel, add_triton_kernel
from opslot.ops.causal_conv1d.op import OP
from opslot.slots import KERNEL_REGISTRY, KernelRequest

# Of opslot's Triton kernels; the windows of `standard` stay in registers.
_WIDEST_FILTER = {"standard": 4, "gated": 8}


def _filter_fits(request: KernelRequest) -> str | None:
    filters = (
        [m.kernel_size[0] for m in request.module.children() if isinstance(m, nn.Conv1d)] if request.module else []
    )
    width, widest = max(filters, default=0), _WIDEST_FILTER[request.variant]
    return None if width <= widest else f"takes up to {widest} taps, this module's filter has {width}"


KERNEL_REGISTRY.register_op(OP)
add_triton_kernel(
    OP,
    ("standard",),
    supports=_filter_fits,
    # In bf16: docs/performance.md. On an H100, beside torch's own convolution, forward + backward, 8192 channels x 8192
    # tokens, in fp16 0.30 ms to 2.5, in fp32 0.52 to 3.7; 16384 tokens in 16 documents 0.61 to 7.6, 1.1 to 9.9.
    priority={H200: 80},
    description="one pass each way, deterministic, up to four taps, packed documents by cu_seqlens",
)
add_triton_kernel(
    OP,
    ("gated",),
    factory="gated_triton:{variant}",
    supports=_filter_fits,
    priority={H200: 80},
    description="gates and convolution in one pass each way, deterministic, up to eight taps",
)
add_gpu_kernel(
    OP,
    "fla",
    "fla:causal_conv1d",
    (FLA, TRITON),
    ("standard",),
    # Not checked in other dtypes; fla autotunes for 20 seconds per dtype and filter.
    dtypes=frozenset({torch.bfloat16}),
    description="flash-linear-attention's kernel, packed documents by cu_seqlens",
)
add_kernel(
    OP,
    "torch_packed",
    "op:reference",
    ("standard",),
    # The same convolution as Transformers', but without windows that cross packed documents: filters that no other
    # kernel takes (LFM3's 7 taps) would run once for each document.
    priority={"cpu": 10, H200: 10},
    portable=True,
    description="torch's own convolution, packed documents by cu_seqlens, any device",
)
