"""silu(gate) * up in Triton: one elementwise launch forward, one backward that recomputes the sigmoid.

Only the inputs are kept for backward. Halves of one projection are read, and their gradient written, in place by row
strides; inputs without gaps are one long row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot.ops._common.library import as_rows, once_differentiable, opaque_op, refuse
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops._common.triton import Launcher, cdiv

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _clamp(gate, up, limit):
    """Both within the limit, the gate from above only; a NaN stays one, which tl.minimum would drop."""
    up = tl.where(up < -limit, -limit, up)
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, up)


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    columns,
    gate_stride,
    up_stride,
    out_stride,
    blocks,
    limit,
    alpha,
    up_offset,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if CLAMPED:
        gate, up = _clamp(gate, up, limit)
        up += up_offset
        out = gate * tl.sigmoid(gate * alpha) * up
    else:
        out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dout_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    columns,
    dout_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    blocks,
    limit,
    alpha,
    up_offset,
    CLAMPED: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if CLAMPED:
        raw_gate, raw_up = gate, up
        gate, up = _clamp(gate, up, limit)
        up += up_offset
        slope = alpha * gate
    else:
        slope = gate
    sigmoid = tl.sigmoid(slope)
    if NEED_UP:
        dup = dout * gate * sigmoid
        if CLAMPED:
            dup = tl.where(tl.abs(raw_up) > limit, 0.0, dup)
        tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEED_GATE:
        dgate = dout * up * sigmoid * (1.0 + slope * (1.0 - sigmoid))
        if CLAMPED:
            dgate = tl.where(raw_gate > limit, 0.0, dgate)
        tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


_forward_launcher = Launcher(_forward_kernel)
_backward_launcher = Launcher(_backward_kernel)


def _layout(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, int, int], int]:
    """(tensors as rows, columns and row strides, grid, blocks of a row); contiguous tensors are one long row."""
    if all(x.is_contiguous() for x in tensors):
        columns, rows, strides = tensors[0].numel(), 1, (0,) * len(tensors)
    else:
        columns = tensors[0].shape[-1]
        rows = tensors[0].numel() // columns
        tensors, strides = zip(*(as_rows(x) for x in tensors), strict=True)
    blocks = cdiv(columns, _BLOCK)
    return tensors, (columns, *strides), (rows * blocks, 1, 1), blocks


# limit, alpha and up_offset of `op.clamped`; None for plain SwiGLU.
Clamp = tuple[float, float, float] | None
_NO_CLAMP = (0.0, 1.0, 0.0)


def _launch_forward(gate: Tensor, up: Tensor, out: Tensor, clamp: Clamp = None) -> None:
    if out.numel():
        tensors, strides, grid, blocks = _layout(gate, up, out)
        scalars = (blocks, *(clamp or _NO_CLAMP))
        _forward_launcher(grid, tensors, strides, scalars, (clamp is not None, _BLOCK), _WARPS)


def _launch_backward(
    dout: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor | None,
    dup: Tensor | None,
    clamp: Clamp = None,
) -> None:
    """Write the gradients into `dgate` and `dup`, whose rows must have one stride; None is not needed."""
    if dout.numel():
        need_gate, need_up = dgate is not None, dup is not None
        targets = (dout if dgate is None else dgate, dout if dup is None else dup)
        tensors, strides, grid, blocks = _layout(dout, gate, up, *targets)
        scalars = (blocks, *(clamp or _NO_CLAMP))
        constants = (clamp is not None, need_gate, need_up, _BLOCK)
        _backward_launcher(grid, tensors, strides, scalars, constants, _WARPS)


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


@opaque_op("swiglu(Tensor gate, Tensor up) -> Tensor", fake=_fake_forward)
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = _fake_forward(gate, up)
    _launch_forward(gate, up, out)
    return out


def _fake_backward(
    dout: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        torch.empty_like(gate, memory_format=torch.contiguous_format) if need_gate else None,
        torch.empty_like(up, memory_format=torch.contiguous_format) if need_up else None,
    )


@opaque_op(
    "swiglu_backward(Tensor dout, Tensor gate, Tensor up, bool need_gate, bool need_up) -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(
    dout: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = _fake_backward(dout, gate, up, need_gate, need_up)
    _launch_backward(dout, gate, up, dgate, dup)
    return dgate, dup


def _fake_clamped_forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    return _fake_forward(gate, up)


@opaque_op(
    "swiglu_clamped(Tensor gate, Tensor up, float limit, float alpha, float up_offset) -> Tensor",
    fake=_fake_clamped_forward,
)
def _clamped_forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    out = _fake_forward(gate, up)
    _launch_forward(gate, up, out, (limit, alpha, up_offset))
    return out


def _fake_clamped_backward(
    dout: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    alpha: float,
    up_offset: float,
    need_gate: bool,
    need_up: bool,
) -> tuple[Tensor | None, Tensor | None]:
    return _fake_backward(dout, gate, up, need_gate, need_up)


@opaque_op(
    "swiglu_clamped_backward(Tensor dout, Tensor gate, Tensor up, float limit, float alpha, float up_offset,"
    " bool need_gate, bool need_up) -> (Tensor, Tensor)",
    fake=_fake_clamped_backward,
)
def _clamped_backward(
    dout: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    alpha: float,
    up_offset: float,
    need_gate: bool,
    need_up: bool,
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = _fake_backward(dout, gate, up, need_gate, need_up)
    _launch_backward(dout, gate, up, dgate, dup, (limit, alpha, up_offset))
    return dgate, dup


def _fake_fused_forward(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@opaque_op("swiglu_fused(Tensor gate_up) -> Tensor", fake=_fake_fused_forward)
def _fused_forward(gate_up: Tensor) -> Tensor:
    out = _fake_fused_forward(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    _launch_forward(gate, up, out)
    return out


def _fake_fused_backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


@opaque_op("swiglu_fused_backward(Tensor dout, Tensor gate_up) -> Tensor", fake=_fake_fused_backward)
def _fused_backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    dgate_up = _fake_fused_backward(dout, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    _launch_backward(dout, gate, up, dgate, dup)
    return dgate_up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        need_gate, need_up = ctx.needs_input_grad
        dgate, dup = _backward(dout, *ctx.saved_tensors, need_gate, need_up)
        return dgate if need_gate else None, dup if need_up else None


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.clamp = limit, alpha, up_offset
        return _clamped_forward(gate, up, limit, alpha, up_offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        need_gate, need_up, *_ = ctx.needs_input_grad
        dgate, dup = _clamped_backward(dout, *ctx.saved_tensors, *ctx.clamp, need_gate, need_up)
        return dgate if need_gate else None, dup if need_up else None, None, None, None


class _FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _fused_forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _fused_backward(dout, gate_up)


_LABEL = "swiglu_mlp_implementation='triton'"


def _check(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        refuse(_LABEL, name, unsupported_dtype(x.dtype), "use eager")


def _check_pair(gate: Tensor, up: Tensor) -> None:
    _check("gate", gate)
    _check("up", up)
    if gate.shape != up.shape:
        found = f"its shape is {tuple(up.shape)} beside gate's {tuple(gate.shape)}"
        refuse(_LABEL, "up", found, "use eager, which broadcasts")


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """`op.standard` for float32, bfloat16 and float16, computed in fp32; `gate` and `up` have one shape."""
    _check_pair(gate, up)
    return _SwiGLU.apply(gate, up)


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """`op.clamped`, within the limits of `standard`."""
    _check_pair(gate, up)
    return _ClampedSwiGLU.apply(gate, up, float(limit), float(alpha), float(up_offset))


def fused_gate_up(gate_up: Tensor) -> Tensor:
    """`op.fused_gate_up` for float32, bfloat16 and float16, computed in fp32."""
    _check("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        refuse(_LABEL, "gate_up", f"its width {gate_up.shape[-1]} is odd", "use eager")
    return _FusedSwiGLU.apply(gate_up)
