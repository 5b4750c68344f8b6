"""Activations in Triton: one elementwise launch forward, one backward, computed in fp32.

Only the input is kept for backward. Contiguous inputs are one long row.

Backward of xIELU also sums the gradients of both alphas: each program over its elements, then one program over the
programs, in an order that depends on the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.aligned_rows import empty_rows_like, mark_padded, zero_padding
from opslot.ops._common.arguments import autocast_dtype, elementwise_layout, reject, require_floats, zero
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.triton_activations import activation, activation_and_slope

_BLOCK = 1024
_WARPS = 4
# Each thread computes softplus of the alphas for 32 elements, and one program sums what the others have.
_PARTS = 4
_XIELU_BLOCK = _PARTS * _BLOCK
_FINAL_BLOCK = 4096
_FINAL_WARPS = 16


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, blocks, NAME: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    out = activation(x, NAME)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dout_ptr,
    x_ptr,
    dx_ptr,
    columns,
    dout_stride,
    x_stride,
    dx_stride,
    blocks,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    _, slope = activation_and_slope(x, NAME)
    dx = dout * slope
    tl.store(dx_ptr + row * dx_stride + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where the sum rounds to 1."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    # The logarithm of the rounded sum, times how much rounding changed what was added.
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _expm1(x, PRECISE: tl.constexpr):
    """exp(x) - 1 for x <= 0."""
    # A series near zero, where the difference cancels. The first term that is left out is below 4e-8 of the sum for
    # float32, and below 1e-5 for 16 bits, which need fewer.
    if PRECISE:
        series = 0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))))
        near = x > -0.25
    else:
        series = 0.5 + x * (1.0 / 6)
        near = x > -0.03125
    # With tl.exp, results below the smallest normal number would take three more instructions.
    return tl.where(near, x + x * x * series, tl.exp2(1.4426950408889634 * x) - 1.0)


@triton.jit
def _load_scalars(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, x_ptr):
    """The slope of x^2, that of the negative branch, beta, and eps as a comparison with x rounds it."""
    beta = tl.load(beta_ptr).to(tl.float32)
    eps = tl.load(eps_ptr).to(x_ptr.dtype.element_ty).to(tl.float32)
    positive = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    negative = beta + _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    return positive, negative, beta, eps


@triton.jit(do_not_specialize=["blocks"])
def _xielu_kernel(
    x_ptr,
    alpha_p_ptr,
    alpha_n_ptr,
    beta_ptr,
    eps_ptr,
    out_ptr,
    columns,
    x_stride,
    out_stride,
    blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    positive, negative, beta, eps = _load_scalars(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, x_ptr)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    expm1 = _expm1(tl.minimum(x, eps), x_ptr.dtype.element_ty == tl.float32)
    # NaN takes the negative branch, as in torch.
    out = tl.where(x > 0.0, x * (positive * x + beta), negative * expm1 + (beta - negative) * x)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _xielu_backward_kernel(
    dout_ptr,
    x_ptr,
    alpha_p_ptr,
    alpha_n_ptr,
    beta_ptr,
    eps_ptr,
    dx_ptr,
    partial_ptr,
    columns,
    dout_stride,
    x_stride,
    dx_stride,
    blocks,
    NEED_X: tl.constexpr,
    NEED_ALPHAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * (PARTS * BLOCK)
    positive, negative, beta, eps = _load_scalars(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, x_ptr)
    dpositive = tl.zeros((BLOCK,), tl.float32)
    dnegative = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        column = start + part * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        below = tl.minimum(x, eps, propagate_nan=tl.PropagateNan.ALL)
        expm1 = _expm1(below, x_ptr.dtype.element_ty == tl.float32)
        if NEED_X:
            # From eps on, min(x, eps) has no gradient. (torch's is half of it at eps itself.)
            slope = negative * tl.where(x >= eps, -1.0, expm1) + beta
            dx = dout * tl.where(x > 0.0, 2.0 * positive * x + beta, slope)
            tl.store(dx_ptr + row * dx_stride + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_ALPHAS:
            above_zero = tl.maximum(x, 0.0)
            dpositive += dout * above_zero * above_zero
            dnegative += dout * tl.where(x > 0.0, 0.0, expm1 - x)
    if NEED_ALPHAS:
        tl.store(partial_ptr + tl.program_id(0), tl.sum(dpositive, 0))
        tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(dnegative, 0))


@triton.jit(do_not_specialize=["programs"])
def _xielu_alphas_kernel(
    partial_ptr,
    alpha_p_ptr,
    alpha_n_ptr,
    dalpha_p_ptr,
    dalpha_n_ptr,
    programs,
    NEED_P: tl.constexpr,
    NEED_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum what all programs have for one alpha, and multiply it by the derivative of softplus."""
    index = tl.arange(0, BLOCK)
    partial_ptr += tl.program_id(0) * programs
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, programs, BLOCK):
        total += tl.load(partial_ptr + start + index, mask=start + index < programs, other=0.0)
    summed = tl.sum(total, 0)
    if tl.program_id(0) == 0:
        if NEED_P:
            dalpha_p = summed * tl.sigmoid(tl.load(alpha_p_ptr).to(tl.float32))
            tl.store(dalpha_p_ptr, dalpha_p.to(dalpha_p_ptr.dtype.element_ty))
    else:
        if NEED_N:
            dalpha_n = summed * tl.sigmoid(tl.load(alpha_n_ptr).to(tl.float32))
            tl.store(dalpha_n_ptr, dalpha_n.to(dalpha_n_ptr.dtype.element_ty))


_launcher = KernelLauncher(_forward_kernel)
_backward_launcher = KernelLauncher(_backward_kernel)
_xielu_launcher = KernelLauncher(_xielu_kernel)
_xielu_backward_launcher = KernelLauncher(_xielu_backward_kernel)
_xielu_alphas_launcher = KernelLauncher(_xielu_alphas_kernel)


def _launch(out: Tensor, x: Tensor, name: str) -> None:
    if out.numel():
        tensors, strides, grid, blocks = elementwise_layout(_BLOCK, x, out)
        _launcher(grid, tensors, strides, (blocks,), (name, _BLOCK), _WARPS)
        zero_padding(out)


def _launch_backward(dx: Tensor, dout: Tensor, x: Tensor, name: str) -> None:
    if dx.numel():
        tensors, strides, grid, blocks = elementwise_layout(_BLOCK, dout, x, dx)
        _backward_launcher(grid, tensors, strides, (blocks,), (name, _BLOCK), _WARPS)
        zero_padding(dx)


def _launch_xielu(
    out: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, keep_dtype: bool
) -> None:
    if out.numel():
        (x, rows), strides, grid, blocks = elementwise_layout(_XIELU_BLOCK, x, out)
        tensors = (x, alpha_p, alpha_n, beta, eps, rows)
        _xielu_launcher(grid, tensors, strides, (blocks,), (_XIELU_BLOCK,), _WARPS)
        zero_padding(out)


def _launch_xielu_backward(
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    dout: Tensor,
    x: Tensor,
    alpha_p: Tensor,
    alpha_n: Tensor,
    beta: Tensor,
    eps: Tensor,
    *_: bool,
) -> None:
    """Write the gradients that are not None."""
    dx, dalpha_p, dalpha_n = gradients
    need_alphas = dalpha_p is not None or dalpha_n is not None
    if not dout.numel():
        zero(dalpha_p, dalpha_n)
        return
    (dout, x, target), strides, grid, blocks = elementwise_layout(_XIELU_BLOCK, dout, x, dout if dx is None else dx)
    programs = grid[0]
    partial = x.new_empty(2, programs, dtype=torch.float32) if need_alphas else alpha_p
    tensors = (dout, x, alpha_p, alpha_n, beta, eps, target, partial)
    constants = (dx is not None, need_alphas, _PARTS, _BLOCK)
    _xielu_backward_launcher(grid, tensors, strides, (blocks,), constants, _WARPS)
    if dx is not None:
        zero_padding(dx)
    if need_alphas:
        outs = (alpha_p if dalpha_p is None else dalpha_p, alpha_n if dalpha_n is None else dalpha_n)
        wanted = (dalpha_p is not None, dalpha_n is not None)
        _xielu_alphas_launcher(
            (2, 1, 1), (partial, alpha_p, alpha_n, *outs), (), (programs,), (*wanted, _FINAL_BLOCK), _FINAL_WARPS
        )


def _allocate_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, keep_dtype: bool) -> Tensor:
    alphas = torch.promote_types(alpha_p.dtype, alpha_n.dtype)
    return empty_rows_like(x, x.dtype if keep_dtype else torch.promote_types(x.dtype, alphas))


def _allocate_xielu_gradients(
    dout: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    need_x, need_p, need_n = rest[-3:]
    dalphas = (torch.empty_like(a) if need else None for a, need in ((alpha_p, need_p), (alpha_n, need_n)))
    return (empty_rows_like(x) if need_x else None, *dalphas)


_activation = differentiable_op(
    "mlp_activation(Tensor x, str name) -> Tensor",
    allocate=lambda x, name: empty_rows_like(x),
    launch=_launch,
    allocate_gradients=lambda dout, x, name: empty_rows_like(x),
    launch_backward=_launch_backward,
    recomputable=True,
)
_xielu = differentiable_op(
    "mlp_xielu(Tensor x, Tensor alpha_p, Tensor alpha_n, Tensor beta, Tensor eps, bool keep_dtype) -> Tensor",
    allocate=_allocate_xielu,
    launch=_launch_xielu,
    allocate_gradients=_allocate_xielu_gradients,
    launch_backward=_launch_xielu_backward,
    differentiable=3,
    recomputable=True,
)

_LABEL = "mlp_activation_implementation='triton'"


def _of_x(x: Tensor, name: str) -> Tensor:
    require_floats(_LABEL, x=x)
    return mark_padded(_activation(x, name))


def relu2(x: Tensor) -> Tensor:
    """`op.relu2` for float32, bfloat16 and float16, computed in fp32."""
    return _of_x(x, "relu2")


def quick_gelu(x: Tensor) -> Tensor:
    """`op.quick_gelu` for float32, bfloat16 and float16, computed in fp32."""
    return _of_x(x, "quick_gelu")


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """`op.xielu` for float32, bfloat16 and float16, computed in fp32."""
    require_floats(_LABEL, x=x, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps)
    for name, scalar in {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}.items():
        if scalar.numel() != 1:
            reject(_LABEL, name, f"its shape is {tuple(scalar.shape)}, not one element", "use eager, which broadcasts")
    return mark_padded(_xielu(x, alpha_p, alpha_n, beta, eps, autocast_dtype(x) is not None))
