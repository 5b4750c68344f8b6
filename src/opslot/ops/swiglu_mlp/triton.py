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


def _flat(*tensors: Tensor) -> list[Tensor]:
    """The tensors as rows with adjacent columns; as one row when all of them are contiguous."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def _grid(columns: int, rows: int) -> tuple[int, int]:
    """(programs, blocks of a row)."""
    blocks = triton.cdiv(columns, _BLOCK)
    return rows * blocks, blocks


def _launch_forward(gate: Tensor, up: Tensor, out: Tensor) -> None:
    if out.numel() == 0:
        return
    gate, up, out = _flat(gate, up, out)
    rows, columns = out.shape
    programs, blocks = _grid(columns, rows)
    _forward_kernel[(programs,)](
        gate,
        up,
        out,
        columns,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        blocks,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _launch_backward(
    dout: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, need_gate: bool, need_up: bool
) -> None:
    """Write the gradients into `dgate` and `dup`, which must be viewable as rows; one not needed is any tensor."""
    if gate.numel() == 0:
        return
    dout, gate, up, dgate, dup = _flat(dout, gate, up, dgate, dup)
    rows, columns = gate.shape
    programs, blocks = _grid(columns, rows)
    _backward_kernel[(programs,)](
        dout,
        gate,
        up,
        dgate,
        dup,
        columns,
        dout.stride(0),
        gate.stride(0),
        up.stride(0),
        dgate.stride(0),
        dup.stride(0),
        blocks,
        NEED_GATE=need_gate,
        NEED_UP=need_up,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@opaque_op("swiglu(Tensor gate, Tensor up) -> Tensor", fake=_fake_forward)
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = _fake_forward(gate, up)
    _launch_forward(gate, up, out)
    return out


def _fake_backward(dout: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    def one(source: Tensor, need: bool) -> Tensor:
        return source.new_empty(source.shape if need else (0,))

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
