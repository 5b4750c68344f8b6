"""cross_entropy_loss: registration of the op and of its kernels."""

from collections.abc import Callable

import torch

from opslot.ops._common.specs import H200, add_kernel, add_liger_kernel, add_npu_kernel, add_triton_kernel
from opslot.ops.cross_entropy_loss.heads import loss_only
from opslot.ops.cross_entropy_loss.low_rank import has_low_rank
from opslot.ops.cross_entropy_loss.op import OP, head_of
from opslot.slots import KERNEL_REGISTRY, KernelRequest

__all__ = ["loss_only"]


def _for_large_heads(value: int, smallest: int) -> Callable[[KernelRequest], int | None]:
    """`value` where the head has at least `smallest` outputs.

    Without a module, assumes a large head for a language model and a small one for a classifier.
    """

    def priority(request: KernelRequest) -> int | None:
        head = head_of(request.module)
        large = request.variant != "sequence_classification" if head is None else head.weight.shape[0] >= smallest
        # In bfloat16 on a CPU, which has instructions for eager's matmuls, it takes 3 times eager's time.
        slow = request.device.type == "cpu" and request.dtype not in (None, torch.float32)
        return value if large and not slow else None

    return priority


def _without_adapters(request: KernelRequest) -> str | None:
    has_adapters = request.module is not None and has_low_rank(head_of(request.module))
    return "adds no LoRA adapters of the output head" if has_adapters else None


KERNEL_REGISTRY.register_op(OP)
# Measured on an H200 against eager, T=8192: 46 ms to 57 at H=4096 V=151936, 25 to 35 at H=2048, 40 to 49 at V=128256;
# but 1.4 ms to 0.7 at V=32. The line between them crosses near V=12,000.
add_triton_kernel(
    OP,
    priority={H200: _for_large_heads(80, 16384)},
    description="cuBLAS matmuls and one in-place softmax-gradient kernel per chunk",
)
# Slower, so `auto` never selects it.
add_triton_kernel(
    OP,
    name="batch_invariant",
    factory="triton:batch_invariant_{variant}",
    description="triton with logits that do not depend on the batch",
)
# Measured on a CPU against eager, H=256: 1.3 to 1.5 times as fast at V=4096 to 32000, 0.95 at 1024 and less. On an H200
# it takes 82 ms where eager takes 57 (in 4 GiB instead of 14), so `auto` does not select it there.
add_kernel(
    OP,
    "chunk_loss",
    "chunk_loss:{variant}",
    priority={"cpu": _for_large_heads(60, 4096)},
    portable=True,
    description="plain torch, chunk by chunk, never the full logits",
)
# Not measured, so `auto` never selects it.
add_npu_kernel(OP, factory="chunk_loss:{variant}", description="chunk_loss on Ascend")
# 93 ms, eager 57: it needs a float32 accumulator to be accurate, which each of 64 chunks reads and writes.
add_liger_kernel(
    OP,
    ["causal", "sequence_classification"],
    supports=_without_adapters,
    description="Liger's fused linear cross entropy, summed in float32",
)
