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
from torch.autograd.function import once_differentiable

from opslot.ops._common.library import as_rows, opaque_op, refuse
from opslot.ops._common.triton import Launcher, cdiv

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_BLOCK = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, columns, gate_stride, up_stride, out_stride, blocks, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
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
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if NEED_UP:
        dup = dout * gate * sigmoid
        tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEED_GATE:
        up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
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


def _launch_forward(gate: Tensor, up: Tensor, out: Tensor) -> None:
    if out.numel():
        tensors, strides, grid, blocks = _layout(gate, up, out)
        _forward_launcher(grid, tensors, strides, (blocks,), (_BLOCK,), _WARPS)


def _launch_backward(
    dout: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, need_gate: bool, need_up: bool
) -> None:
    """Write the gradients into `dgate` and `dup`, whose rows must have one stride; one not needed is any tensor."""
    if dout.numel():
        tensors, strides, grid, blocks = _layout(dout, gate, up, dgate, dup)
        _backward_launcher(grid, tensors, strides, (blocks,), (need_gate, need_up, _BLOCK), _WARPS)


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


@opaque_op("swiglu(Tensor gate, Tensor up) -> Tensor", fake=_fake_forward)
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = _fake_forward(gate, up)
    _launch_forward(gate, up, out)
    return out


def _fake_backward(dout: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    def one(source: Tensor, need: bool) -> Tensor:
        if not need:
            return source.new_empty(0)
        return torch.empty_like(source, memory_format=torch.contiguous_format)

    return one(gate, need_gate), one(up, need_up)


@opaque_op(
    "swiglu_backward(Tensor dout, Tensor gate, Tensor up, bool need_gate, bool need_up) -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(dout: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _fake_backward(dout, gate, up, need_gate, need_up)
    _launch_backward(dout, gate, up, dgate, dup, need_gate, need_up)
    return dgate, dup


def _fake_fused_forward(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@opaque_op("swiglu_fused(Tensor gate_up) -> Tensor", fake=_fake_fused_forward)
def _fused_forward(gate_up: Tensor) -> Tensor:
    out = _fake_fused_forward(gate_up)
    _launch_forward(*gate_up.chunk(2, dim=-1), out)
    return out


def _fake_fused_backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


@opaque_op("swiglu_fused_backward(Tensor dout, Tensor gate_up) -> Tensor", fake=_fake_fused_backward)
def _fused_backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    dgate_up = _fake_fused_backward(dout, gate_up)
    _launch_backward(dout, *gate_up.chunk(2, dim=-1), *dgate_up.chunk(2, dim=-1), True, True)
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


def _check(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        refuse(
            "swiglu_mlp_implementation='triton'",
            name,
            f"its dtype is {x.dtype}, not float32, bfloat16 or float16",
            "use eager",
        )


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """`op.standard` for float32, bfloat16 and float16, computed in fp32; `gate` and `up` have one shape."""
    _check("gate", gate)
    _check("up", up)
    if gate.shape != up.shape:
        refuse(
            "swiglu_mlp_implementation='triton'",
            "up",
            f"its shape is {tuple(up.shape)} beside gate's {tuple(gate.shape)}",
            "use eager, which broadcasts",
        )
    return _SwiGLU.apply(gate, up)


def fused_gate_up(gate_up: Tensor) -> Tensor:
    """`op.fused_gate_up` for float32, bfloat16 and float16, computed in fp32."""
    _check("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        refuse("swiglu_mlp_implementation='triton'", "gate_up", f"its width {gate_up.shape[-1]} is odd", "use eager")
    return _FusedSwiGLU.apply(gate_up)
