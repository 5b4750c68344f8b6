"""Layer norm in Triton: one pass over the rows forward, one persistent pass backward.

Forward saves mean and reciprocal standard deviation of each row. The gradients of weight and bias are summed per
program in registers, then over programs in a fixed order: no atomics, bitwise deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv, sm_count
from opslot.ops._common.arguments import are_given, zero
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.row_tiles import aligned_rows, backward_plan, forward_plan, sum_partials
from opslot.ops.layer_norm.op import checked


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    rows,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    mask = (row < rows) & inside
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x, axis=1, keep_dims=True)
    # Rounded to nearest: in rows of equal values, 1 / sqrt(eps) multiplies the error of `/`. Of bfloat16, the sum of
    # equal values is exact.
    mean = tl.div_rn(total, tl.full(total.shape, WIDTH, tl.float32))
    centered = tl.where(inside, x - mean, 0.0)
    if x_ptr.dtype.element_ty != tl.bfloat16:
        # The rounding error of the mean, which dominates in rows of nearly equal values. In bfloat16, values that are
        # not equal differ by far more; with this sum, 1152 channels would take 0.20 ms instead of 0.19.
        rest = tl.sum(centered, axis=1, keep_dims=True) / WIDTH
        mean += rest
        centered = tl.where(inside, centered - rest, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    out = centered * rstd
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, downcast(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dout_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    dout_stride,
    x_stride,
    rows,
    HAS_WEIGHT: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`partial` is [sums, programs, WIDTH]: the weight's gradient, if it is needed, and the bias's."""
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if NEED_WEIGHT:
        dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if NEED_BIAS:
        dbias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & inside
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalized = tl.where(inside, (x - mean) * rstd, 0.0)
        if NEED_BIAS:
            dbias += dout
        if NEED_WEIGHT:
            dweight += dout * normalized
        if NEED_X:
            if HAS_WEIGHT:
                dout *= weight
            if WIDTH == 1:
                # The output does not depend on x. A fused multiply-add would make weight * dout - average the rounding
                # error of the product instead of 0, and rstd is 1 / sqrt(eps).
                dx = tl.zeros_like(dout)
            else:
                along = tl.sum(dout * normalized, axis=1, keep_dims=True) / WIDTH
                average = tl.sum(dout, axis=1, keep_dims=True) / WIDTH
                dx = rstd * (dout - average - normalized * along)
            tl.store(dx_ptr + row * WIDTH + column, downcast(dx, dx_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    if NEED_WEIGHT:
        tl.store(partial_ptr + program * WIDTH + column, tl.sum(dweight, axis=0), mask=column < WIDTH)
    if NEED_BIAS:
        if NEED_WEIGHT:
            program += tl.num_programs(0)
        tl.store(partial_ptr + program * WIDTH + column, tl.sum(dbias, axis=0), mask=column < WIDTH)


_launch_forward = KernelLauncher(_forward_kernel)
_launch_backward = KernelLauncher(_backward_kernel)


def _allocate(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean and reciprocal standard deviation of each row."""
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), mean, rstd


def _run_forward(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> None:
    if not x.numel():
        return
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = aligned_rows(x)
    plan = forward_plan(width)
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    _launch_forward(
        (cdiv(rows, plan.rows), 1, 1),
        (x, weight, bias, *outputs),
        (x_stride,),
        (rows, eps),
        (*are_given(weight, bias), width, *plan.tile),
        plan.warps,
    )


def _run_backward(
    gradients: tuple[Tensor | None, ...],
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *_: Any,
) -> None:
    """Write those of the `gradients` of x, weight and bias that are not None."""
    dx, *sums = gradients
    summed = [out for out in sums if out is not None]
    if not x.numel():
        zero(*summed)
        return
    width = x.shape[-1]
    rows = x.numel() // width
    plan = backward_plan(width, x.element_size() + dout.element_size())
    programs = min(cdiv(rows, plan.rows), sm_count(x.device) * plan.programs)
    partial = x.new_empty((len(summed), programs, width), dtype=torch.float32) if summed else None
    dout, dout_stride = aligned_rows(dout)
    x, x_stride = aligned_rows(x)
    _launch_backward(
        (programs, 1, 1),
        (dout, x, mean, rstd, None if weight is None else weight.contiguous(), dx, partial),
        (dout_stride, x_stride),
        (rows,),
        (*are_given(weight, *gradients), width, *plan.tile, plan.stages),
        plan.warps,
    )
    if partial is not None:
        sum_partials(partial, *summed)


_layer_norm = differentiable_op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype)"
    " -> (Tensor out, Tensor mean, Tensor rstd)",
    allocate=_allocate,
    launch=_run_forward,
    launch_backward=_run_backward,
    kept=("x", "weight", "bias", "mean", "rstd"),
    returned=1,
)


def standard(hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`op.standard` for float32, bfloat16 and float16, also mixed, and rows of up to 16384 elements."""
    dtype = checked("layer_norm_implementation='triton' or 'triton_or_torch'", hidden_states, weight, bias)
    return _layer_norm(hidden_states, weight, bias, float(eps), dtype)
