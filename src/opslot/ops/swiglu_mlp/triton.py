"""activation(gate) * up in Triton: one elementwise launch forward, one backward that recomputes the activation.

Only the inputs are kept for backward. Halves of one projection are read, and their gradient written, in place by row
strides; contiguous inputs are one long row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.activations import Activation, activation_name, activation_problem
from opslot.ops._common.aligned_rows import empty_rows_like, mark_padded, zero_padding
from opslot.ops._common.arguments import elementwise_layout, reject, require_floats
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.triton_activations import activation as activate
from opslot.ops._common.triton_activations import activation_and_slope, is_below_limit

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _clamp(gate, up, limit):
    """Clamp up to the limits and gate to the upper one; keeps NaN, unlike tl.minimum."""
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
    ACTIVATION: tl.constexpr,
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
    out = activate(gate, ACTIVATION, alpha) * up
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
    ACTIVATION: tl.constexpr,
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
    activated, slope = activation_and_slope(gate, ACTIVATION, alpha)
    if NEED_UP:
        dup = dout * activated
        if CLAMPED:
            dup = tl.where(is_below_limit(tl.abs(raw_up), limit), dup, 0.0)
        tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEED_GATE:
        dgate = dout * up * slope
        if CLAMPED:
            dgate = tl.where(is_below_limit(raw_gate, limit), dgate, 0.0)
        tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


_forward_launcher = KernelLauncher(_forward_kernel)
_backward_launcher = KernelLauncher(_backward_kernel)


# limit, alpha and up_offset of `op.clamped`; without them nothing is clamped.
_NOT_CLAMPED = (0.0, 1.0, 0.0)


def _launch(out: Tensor, gate: Tensor, up: Tensor, activation: str, *clamp: float) -> None:
    if out.numel():
        tensors, strides, grid, blocks = elementwise_layout(_BLOCK, gate, up, out)
        scalars = (blocks, *(clamp or _NOT_CLAMPED))
        _forward_launcher(grid, tensors, strides, scalars, (activation, bool(clamp), _BLOCK), _WARPS)
        zero_padding(out)


def _launch_backward(
    gradients: tuple[Tensor | None, ...], dout: Tensor, gate: Tensor, up: Tensor, activation: str, *rest: Any
) -> None:
    """Write the gradients that are not None."""
    clamp, (dgate, dup) = rest[:-2], gradients
    if dout.numel():
        targets = (dout if dgate is None else dgate, dout if dup is None else dup)
        tensors, strides, grid, blocks = elementwise_layout(_BLOCK, dout, gate, up, *targets)
        scalars = (blocks, *(clamp or _NOT_CLAMPED))
        constants = (activation, bool(clamp), dgate is not None, dup is not None, _BLOCK)
        _backward_launcher(grid, tensors, strides, scalars, constants, _WARPS)
        for gradient in gradients:
            if gradient is not None:
                zero_padding(gradient)


def _allocate_gradients(dout: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    need_gate, need_up = rest[-2:]
    return empty_rows_like(gate) if need_gate else None, empty_rows_like(up) if need_up else None


_swiglu, _clamped = (
    differentiable_op(
        f"{schema} -> Tensor",
        allocate=lambda gate, up, *_: empty_rows_like(gate, torch.promote_types(gate.dtype, up.dtype)),
        launch=_launch,
        allocate_gradients=_allocate_gradients,
        launch_backward=_launch_backward,
        recomputable=True,
    )
    for schema in (
        "swiglu(Tensor gate, Tensor up, str activation)",
        "swiglu_clamped(Tensor gate, Tensor up, str activation, float limit, float alpha, float up_offset)",
    )
)
_fused = differentiable_op(
    "swiglu_fused(Tensor gate_up, str activation) -> Tensor",
    allocate=lambda gate_up, activation: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    launch=lambda out, gate_up, activation: _launch(out, *gate_up.chunk(2, -1), activation),
    launch_backward=lambda dgate_up, dout, gate_up, activation: _launch_backward(
        dgate_up.chunk(2, -1), dout, *gate_up.chunk(2, -1), activation, True, True
    ),
    recomputable=True,
)

_LABEL = "swiglu_mlp_implementation='triton'"


def _check_pair(gate: Tensor, up: Tensor) -> None:
    require_floats(_LABEL, gate=gate, up=up)
    if gate.shape != up.shape:
        found = f"its shape is {tuple(up.shape)} beside gate's {tuple(gate.shape)}"
        reject(_LABEL, "up", found, "use eager, which broadcasts")


def _name_of(activation: Activation) -> str:
    name = activation_name(activation)
    if name is None:
        reject(_LABEL, "activation", str(activation_problem(activation)), "use eager")
    return name


def standard(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """`op.standard` for float32, bfloat16 and float16, computed in fp32; `gate` and `up` have one shape."""
    _check_pair(gate, up)
    return mark_padded(_swiglu(gate, up, _name_of(activation)))


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """`op.clamped`, within the limits of `standard`."""
    _check_pair(gate, up)
    return _clamped(gate, up, "silu", float(limit), float(alpha), float(up_offset))


def fused_gate_up(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`op.fused_gate_up` for float32, bfloat16 and float16, computed in fp32."""
    require_floats(_LABEL, gate_up=gate_up)
    if gate_up.shape[-1] % 2:
        reject(_LABEL, "gate_up", f"its width {gate_up.shape[-1]} is odd", "use eager")
    return _fused(gate_up, _name_of(activation))
