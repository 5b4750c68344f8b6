"""RMSNorm in Triton: one pass over the rows forward, one persistent pass backward.

Backward recomputes the row's statistics from the `x` it must load anyway, so forward saves nothing but its inputs.
The weight's gradient is summed per program in registers, then over programs by a second kernel in a fixed order: no
atomics, the same bits every run. A row's numbers depend on neither its place nor the number of rows.

Times on an H200 are in benchmarks/results/elementwise_h200.json.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from opslot.ops._common.library import as_rows, opaque_op, refuse
from opslot.ops._common.triton import Launcher, cdiv, multiprocessor_count

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MAX_WIDTH = 65536


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    rows,
    eps,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < WIDTH)
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    x = stored.to(tl.float32)
    normalized = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if OFFSET:
            weight += 1.0
        elif out_ptr.dtype.element_ty == stored.dtype:
            # Upstream rounds here: so do we, to stay near its bits, where the result is as narrow.
            normalized = normalized.to(stored.dtype).to(tl.float32)
        normalized *= weight
    if HAS_GATE:
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        normalized *= gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * WIDTH + column, normalized.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
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
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            weight += 1.0
    if NEED_WEIGHT:
        dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & inside
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dnormalized = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
        normalized = x * rstd
        if HAS_GATE:
            gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
            decay = 1.0 + tl.exp(-gate)
            silu = gate / decay
            if NEED_GATE:
                dgate = dnormalized * normalized * weight * ((1.0 + gate - silu) / decay)
                tl.store(dgate_ptr + row * WIDTH + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
            dnormalized *= silu
        if NEED_WEIGHT:
            dweight += dnormalized * normalized
        if NEED_X:
            if HAS_WEIGHT:
                dnormalized *= weight
            along = tl.sum(dnormalized * normalized, axis=1, keep_dims=True) / WIDTH
            dx = rstd * (dnormalized - normalized * along)
            tl.store(dx_ptr + row * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_WEIGHT:
        total = tl.sum(dweight, axis=0)
        column = tl.arange(0, COLUMNS)
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * WIDTH + column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(partial_ptr, out_ptr, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(partial_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    summed = tl.sum(total, axis=0)
    tl.store(out_ptr + column, summed.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


_launch_forward = Launcher(_forward_kernel)
_launch_backward = Launcher(_backward_kernel)
_launch_sum_partials = Launcher(_sum_partials_kernel)


@dataclass(frozen=True)
class Plan:
    """Tile and grid of one launch: `rows` x `columns` elements, and for a persistent grid programs a multiprocessor."""

    rows: int
    columns: int
    warps: int
    programs: int = 0
    stages: int = 1


@functools.cache
def forward_plan(width: int) -> Plan:
    """Forward: tiles of 2048 elements, more for wider rows, at 32 elements a thread."""
    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    return Plan(rows, columns, warps=min(32, max(2 if rows == 1 else 4, rows * columns // 1024)))


@functools.cache
def backward_plan(width: int, element_bytes: int) -> Plan:
    """Backward: tiles of 4096 elements, two programs a multiprocessor, each loading up to two tiles ahead.

    Args:
        element_bytes: summed over the tensors that a tile is loaded from. Tiles in flight stay within 64 KiB of shared
            memory, which two programs find on every supported GPU.
    """
    columns = triton.next_power_of_2(width)
    rows = max(1, 4096 // columns)
    stages = min(3, max(1, 2**16 // (rows * columns * element_bytes)))
    return Plan(rows, columns, warps=min(32, max(8, rows * columns // 512)), programs=2, stages=stages)


def _out_dtype(x: Tensor, weight: Tensor | None, gate: Tensor | None, offset: bool) -> torch.dtype:
    if weight is None or offset or gate is not None:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _fake_forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, offset: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=_out_dtype(x, weight, gate, offset))


@opaque_op("rms_norm(Tensor x, Tensor? weight, Tensor? gate, float eps, bool offset) -> Tensor", fake=_fake_forward)
def _forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, offset: bool) -> Tensor:
    out = torch.empty_like(x, dtype=_out_dtype(x, weight, gate, offset), memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    width = x.shape[-1]
    rows = x.numel() // width
    x, x_stride = as_rows(x)
    gate, gate_stride = (None, 0) if gate is None else as_rows(gate)
    plan = forward_plan(width)
    _launch_forward(
        (cdiv(rows, plan.rows), 1, 1),
        (x, None if weight is None else weight.contiguous(), gate, out),
        (x_stride, gate_stride),
        (rows, eps),
        (offset, weight is not None, gate is not None, width, plan.rows, plan.columns),
        plan.warps,
    )
    return out


def _gradients(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, need_x: bool, need_weight: bool, need_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized gradients; empty tensors stand for those that nobody needs."""

    def one(source: Tensor | None, need: bool) -> Tensor:
        if source is None or not need:
            return x.new_empty(0)
        return torch.empty_like(source, memory_format=torch.contiguous_format)

    return one(x, need_x), one(weight, need_weight), one(gate, need_gate)


def _fake_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    offset: bool,
    need_x: bool,
    need_weight: bool,
    need_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, weight, gate, need_x, need_weight, need_gate)


@opaque_op(
    "rms_norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor? gate, float eps, bool offset,"
    " bool need_x, bool need_weight, bool need_gate) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    offset: bool,
    need_x: bool,
    need_weight: bool,
    need_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dgate = _gradients(x, weight, gate, need_x, need_weight, need_gate)
    if x.numel() == 0:
        return dx, dweight.zero_(), dgate
    width = x.shape[-1]
    rows = x.numel() // width
    element_bytes = x.element_size() + dout.element_size() + (0 if gate is None else gate.element_size())
    plan = backward_plan(width, element_bytes)
    programs = min(cdiv(rows, plan.rows), multiprocessor_count(x.device) * plan.programs)
    partial = x.new_empty((programs, width), dtype=torch.float32) if need_weight else None
    dout, dout_stride = as_rows(dout)
    x, x_stride = as_rows(x)
    gate, gate_stride = (None, 0) if gate is None else as_rows(gate)
    _launch_backward(
        (programs, 1, 1),
        (dout, x, None if weight is None else weight.contiguous(), gate, dx, dgate, partial),
        (dout_stride, x_stride, gate_stride),
        (rows, eps),
        (
            offset,
            weight is not None,
            gate is not None,
            need_x,
            need_weight,
            need_gate,
            width,
            plan.rows,
            plan.columns,
            plan.stages,
        ),
        plan.warps,
    )
    if partial is not None:
        _launch_sum_partials((cdiv(width, 8), 1, 1), (partial, dweight), (), (programs,), (width, 256, 8), 4)
    return dx, dweight, dgate


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, offset: bool) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.offset = eps, offset
        return _forward(x, weight, gate, eps, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        need_x, need_weight, need_gate, _, _ = ctx.needs_input_grad
        dx, dweight, dgate = _backward(dout, x, weight, gate, ctx.eps, ctx.offset, need_x, need_weight, need_gate)
        return dx if need_x else None, dweight if need_weight else None, dgate if need_gate else None, None, None


def _rms_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, offset: bool) -> Tensor:
    label = f"rms_norm{'_gated' if gate is not None else ''}_implementation='triton'"
    for name, tensor in (("hidden_states", x), ("weight", weight), ("gate", gate)):
        if tensor is not None and tensor.dtype not in DTYPES:
            refuse(label, name, f"its dtype is {tensor.dtype}, not float32, bfloat16 or float16", "use eager")
    if x.shape[-1] > MAX_WIDTH:
        refuse(label, "hidden_states", f"its rows are {x.shape[-1]} wide, the limit is {MAX_WIDTH}", "use eager")
    if weight is not None and weight.shape != x.shape[-1:]:
        refuse(label, "weight", f"its shape is {tuple(weight.shape)}, not ({x.shape[-1]},)", "use eager")
    if gate is not None and gate.shape != x.shape:
        refuse(label, "gate", f"its shape is {tuple(gate.shape)}, not {tuple(x.shape)}", "use eager")
    return _RMSNorm.apply(x, weight, gate, float(eps), offset)


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard` for float32, bfloat16 and float16, mixed at will, rows up to 65536 wide."""
    return _rms_norm(hidden_states, weight, None, eps, False)


def offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.offset`, within the limits of `standard`."""
    return _rms_norm(hidden_states, weight, None, eps, True)


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """`op.gated`, within the limits of `standard`."""
    return _rms_norm(hidden_states, weight, gate, eps, False)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """`op.unweighted`, within the limits of `standard`."""
    return _rms_norm(hidden_states, None, None, eps, False)
