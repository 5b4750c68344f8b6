"""Triton functions for the kernels of several packages."""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.device import triton_interpreted

# Triton's interpreter multiplies the bit patterns of bf16 operands, and truncates to bf16 instead of rounding.
_INTERPRETED = tl.constexpr(triton_interpreted())


def has_launch_hooks() -> bool:
    """Whether a profiler (Proton) has hooks on the launches of Triton's kernels."""
    # No loop: this is called for every launch.
    runtime = triton.knobs.runtime
    enter, exit = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(exit, "calls", exit))


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32; operands of float32 are not rounded to TF32."""
    if _INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def dot_of_block(a, b, acc):
    """`dot`, for one block of a long sum: in float32 the block is summed by itself, and then added to `acc`.

    A single chain of additions over all blocks has several times the rounding error of cuBLAS.
    """
    if a.dtype == tl.float32 and not _INTERPRETED:
        # With `max_num_imprecise_acc`, Triton does not merge the addition into the matmul.
        acc += tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])
    else:
        acc = dot(a, b, acc)
    return acc


@triton.jit
def downcast(x, dtype: tl.constexpr):
    """`x`, of float32 or `dtype`, rounded to `dtype`."""
    if _INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)
