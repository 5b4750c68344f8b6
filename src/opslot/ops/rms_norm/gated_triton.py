"""RMSNorm over groups of a row, with a gate before or after it, in Triton: one pass each way.

Each row of `hidden_states` [..., groups * WIDTH] has `groups` parts of WIDTH elements, normalized one by one; `weight`
has one element for each of a whole row. A program handles parts of one group, so that it sums that part of the weight's
gradient in registers; torch adds the programs' sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import sm_count
from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.row_tiles import aligned_rows
from opslot.ops._common.specs import FLOATS, unsupported_dtype

_MAX_WIDTH = 16384
# Elements of a tile.
_TILE = 4096


@triton.jit
def _gate_and_slope(gate, SIGMOID: tl.constexpr):
    sigmoid = tl.sigmoid(gate)
    if SIGMOID:
        return sigmoid, sigmoid * (1.0 - sigmoid)
    else:
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    rows,
    eps,
    SIGMOID: tl.constexpr,
    GATE_AFTER: tl.constexpr,
    CAST_LAST: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1)
    inner = tl.arange(0, COLUMNS)[None, :]
    column = group * WIDTH + inner
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & (inner < WIDTH)
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    gate, _ = _gate_and_slope(
        tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32), SIGMOID
    )
    x = stored.to(tl.float32)
    if not GATE_AFTER:
        x *= gate
    x *= tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    if not CAST_LAST and out_ptr.dtype.element_ty == stored.dtype:
        # Round here as Transformers does, if the output has the same dtype.
        x = x.to(stored.dtype).to(tl.float32)
    x *= tl.load(weight_ptr + column, mask=inner < WIDTH, other=0.0).to(tl.float32)
    if GATE_AFTER:
        x *= gate
    tl.store(out_ptr + row * (GROUPS * WIDTH) + column, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dout_ptr,
    x_ptr,
    weight_ptr,
    gate_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dout_stride,
    x_stride,
    gate_stride,
    rows,
    eps,
    SIGMOID: tl.constexpr,
    GATE_AFTER: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1)
    inner = tl.arange(0, COLUMNS)[None, :]
    column = group * WIDTH + inner
    weight = tl.load(weight_ptr + column, mask=inner < WIDTH, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & (inner < WIDTH)
        given = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        gate, slope = _gate_and_slope(
            tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32), SIGMOID
        )
        grad = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
        x = given
        if not GATE_AFTER:
            x *= gate
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
        # With eps=0, rows past the end, which are zeros, would make the weight's gradient NaN.
        rstd = tl.where(row < rows, rstd, 0.0)
        normalized = x * rstd
        if GATE_AFTER:
            dgate = grad * normalized * weight * slope
            grad *= gate
        dweight += grad * normalized
        grad *= weight
        along = tl.sum(grad * normalized, axis=1, keep_dims=True) / WIDTH
        dx = rstd * (grad - normalized * along)
        if not GATE_AFTER:
            dgate = dx * given * slope
            dx *= gate
        at = row * (GROUPS * WIDTH) + column
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    at = tl.program_id(0).to(tl.int64) * (GROUPS * WIDTH) + group * WIDTH + tl.arange(0, COLUMNS)
    tl.store(partial_ptr + at, tl.sum(dweight, axis=0), mask=tl.arange(0, COLUMNS) < WIDTH)


def _tile(width: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(width)
    return max(1, _TILE // columns), columns


def _allocate(x: Tensor, weight: Tensor, gate: Tensor, eps: float, width: int, *form: bool) -> Tensor:
    _, gate_after, cast_after_weight = form
    dtype = x.dtype if cast_after_weight or gate_after else torch.promote_types(x.dtype, weight.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    width: int,
    sigmoid: bool,
    gate_after: bool,
    cast_after_weight: bool,
) -> None:
    if not x.numel():
        return
    rows, groups = x.numel() // x.shape[-1], x.shape[-1] // width
    (x, x_stride), (gate, gate_stride) = aligned_rows(x), aligned_rows(gate)
    block, columns = _tile(width)
    _forward_kernel[(triton.cdiv(rows, block), groups)](
        x,
        weight.contiguous(),
        gate,
        out,
        x_stride,
        gate_stride,
        rows,
        eps,
        SIGMOID=sigmoid,
        GATE_AFTER=gate_after,
        CAST_LAST=cast_after_weight,
        GROUPS=groups,
        WIDTH=width,
        ROWS=block,
        COLUMNS=columns,
        num_warps=8,
    )


def _backward(
    gradients: tuple[Tensor | None, ...],
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    width: int,
    sigmoid: bool,
    gate_after: bool,
    *_: bool,
) -> None:
    dx, dweight, dgate = gradients
    if not x.numel():
        if dweight is not None:
            dweight.zero_()
        return
    rows, groups = x.numel() // x.shape[-1], x.shape[-1] // width
    block, columns = _tile(width)
    programs = max(1, min(triton.cdiv(rows, block), 2 * sm_count(x.device) // groups))
    partial = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    # The kernel computes all three; a mixer needs them all unless its weight is frozen.
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if dx is None else dx
    of_gate = torch.empty_like(gate, memory_format=torch.contiguous_format) if dgate is None else dgate
    (dout, dout_stride), (x, x_stride), (gate, gate_stride) = map(aligned_rows, (dout, x, gate))
    _backward_kernel[(programs, groups)](
        dout,
        x,
        weight.contiguous(),
        gate,
        of_x,
        of_gate,
        partial,
        dout_stride,
        x_stride,
        gate_stride,
        rows,
        eps,
        SIGMOID=sigmoid,
        GATE_AFTER=gate_after,
        GROUPS=groups,
        WIDTH=width,
        ROWS=block,
        COLUMNS=columns,
        num_warps=8,
    )
    if dweight is not None:
        dweight.copy_(partial.sum(0))


_norm = differentiable_op(
    "gated_group_rms_norm(Tensor x, Tensor weight, Tensor gate, float eps, int width, bool sigmoid, bool gate_after,"
    " bool cast_after_weight) -> Tensor",
    allocate=_allocate,
    launch=_forward,
    launch_backward=_backward,
)


def _apply(x: Tensor, weight: Tensor, gate: Tensor, eps: float, width: int, *form: bool) -> Tensor:
    label = "rms_norm_gated_implementation='triton' or 'batch_invariant'"
    for name, tensor, shape in (
        ("hidden_states", x, x.shape),
        ("weight", weight, x.shape[-1:]),
        ("gate", gate, x.shape),
    ):
        if not isinstance(tensor, Tensor):
            reject(label, name, "it is None", "use eager")
        if tensor.dtype not in FLOATS:
            reject(label, name, unsupported_dtype(tensor.dtype), "use eager")
        if tensor.shape != shape:
            reject(label, name, f"its shape is {tuple(tensor.shape)}, not {tuple(shape)}", "use eager")
    if not 0 < width <= _MAX_WIDTH or x.shape[-1] % width:
        reject(label, "hidden_states", f"rows of {x.shape[-1]} in groups of {width}, at most {_MAX_WIDTH}", "use eager")
    return _norm(x, weight, gate, float(eps), width, *form)


def gated_sigmoid(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """`op.gated_sigmoid` for float32, bfloat16 and float16, also mixed, and rows of up to 16384 elements."""
    return _apply(hidden_states, weight, gate, eps, hidden_states.shape[-1], True, True, True)


def gated_groups(
    hidden_states: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    group_size: int,
    gate_after: bool = False,
    cast_after_weight: bool = False,
) -> Tensor:
    """`op.gated_groups`, within the limits of `gated_sigmoid` for each group."""
    return _apply(hidden_states, weight, gate, eps, group_size, False, gate_after, cast_after_weight)
