"""mamba_chunk_scan: registration of the op and of its kernels."""

from opslot.ops._common.chunk_schedule import as_kernel
from opslot.ops._common.specs import H200, TRITON, add_gpu_kernel, add_kernel, add_triton_kernel, priority_in_16_bits
from opslot.ops.mamba_chunk_scan.op import OP, WIDEST_HEAD, Scan, reference
from opslot.slots import KERNEL_REGISTRY, KernelRequest, Requirement


def _heads_fit(request: KernelRequest) -> str | None:
    width = getattr(request.module, "head_dim", None)
    fits = not isinstance(width, int) or width <= WIDEST_HEAD
    return None if fits else f"takes heads up to {WIDEST_HEAD} wide, this module's are {width}"


_DESCRIPTIONS = {
    "standard": "chunks of 64 tokens (32 in fp32), deterministic, packed documents by cu_seqlens",
    "per_channel": "chunks in parallel, scanned in registers, deterministic, packed documents by cu_seqlens",
}
_MAMBA_SSM = Requirement("mamba_ssm", "mamba-ssm")

KERNEL_REGISTRY.register_op(OP)
# Forward + backward, 128 heads of 64, states of 128. On an H200 in bf16, 8192 tokens with 8 groups take 1.7 ms, 16,384
# tokens in 16 documents with one group 3.2; Mamba-1 with states of 16 takes 7.8 ms for 8192 tokens of 8192 channels, in
# one document or 16, and 4.8 for 5120 channels. On an H100 in fp16, the first two take 1.9 and 3.8, where torch's
# chunks take 254 and 100. fp32, and Mamba-1 in fp16, were not measured.
for _variant in OP.variants:
    add_triton_kernel(
        OP,
        [_variant],
        factory="triton:mamba_chunk_scan",
        supports=_heads_fit if _variant == "standard" else None,
        priority={H200: priority_in_16_bits},
        description=_DESCRIPTIONS[_variant],
    )
add_gpu_kernel(
    OP,
    "mamba_ssm",
    "mamba_ssm:mamba_chunk_scan",
    (_MAMBA_SSM, TRITON),
    ["standard"],
    description="mamba_ssm's chunked kernel, packed documents by cu_seqlens, without states",
)
add_gpu_kernel(
    OP,
    "mamba_ssm",
    "mamba_ssm_selective:mamba_chunk_scan",
    (_MAMBA_SSM,),
    ["per_channel"],
    description="mamba_ssm's CUDA kernel, without packed documents, initial states and limits",
)
add_kernel(
    OP,
    "torch_chunked",
    lambda: as_kernel(Scan, reference),
    # Right for packed documents, which Transformers mixes.
    priority={"cpu": 10},
    description="torch alone, chunk by chunk, packed documents by cu_seqlens, any device",
)
