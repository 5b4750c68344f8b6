"""RMSNorm in Triton: one pass over the rows forward, one persistent pass backward.

Backward recomputes the row's statistics from `x`, which it loads anyway, so forward saves only its inputs.
The weight's gradient is summed per program in registers, then over programs by a second kernel in a fixed order: no
atomics, bitwise deterministic. Results for a row do not depend on its index or on the number of rows (`aligned_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv, sm_count
from opslot.ops._common.arguments import are_given, reject, zero
from opslot.ops._common.custom_op import differentiable_op, empty_gradients, launch_op, once_differentiable
from opslot.ops._common.row_tiles import aligned_rows, backward_plan, forward_plan, sum_partials
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops.rms_norm.op import GATES

MAX_WIDTH = 65536


@triton.jit
def _load_gate(gate_ptr, mask, SIGMOID: tl.constexpr):
    """silu(gate), or sigmoid(gate), and its derivative."""
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    decay = 1.0 + tl.exp(-gate)
    if SIGMOID:
        value = 1.0 / decay
        slope = value * (1.0 - value)
    else:
        value = gate / decay
        slope = (1.0 + gate - value) / decay
    return value, slope


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    gate_stride,
    residual_stride,
    rows,
    eps,
    OFFSET: tl.constexpr,
    CAST_LAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE_BEFORE: tl.constexpr,
    SIGMOID: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if GROUPS > 1:
        # Without a residual: WIDTH of the columns.
        x_ptr += tl.program_id(1) * WIDTH
        weight_ptr += tl.program_id(1) * WIDTH
        out_ptr += tl.program_id(1) * WIDTH
        if HAS_GATE:
            gate_ptr += tl.program_id(1) * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < WIDTH)
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        # Transformers rounds the sum to the model's dtype, and normalizes the rounded sum.
        stored = (stored.to(tl.float32) + added).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column, stored, mask=mask)
    x = stored.to(tl.float32)
    if GATE_BEFORE:
        gate, _ = _load_gate(gate_ptr + row * gate_stride + column, mask, SIGMOID)
        x *= gate
    normalized = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if OFFSET:
            weight += 1.0
        if not CAST_LAST and out_ptr.dtype.element_ty == stored.dtype:
            # Round here as Transformers does, if the output has the same dtype.
            normalized = normalized.to(stored.dtype).to(tl.float32)
        normalized *= weight
    if HAS_GATE and not GATE_BEFORE:
        gate, _ = _load_gate(gate_ptr + row * gate_stride + column, mask, SIGMOID)
        normalized *= gate
    tl.store(out_ptr + row * (GROUPS * WIDTH) + column, normalized.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dout_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    gate_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dout_stride,
    dsum_stride,
    x_stride,
    gate_stride,
    rows,
    eps,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_GATE: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE_BEFORE: tl.constexpr,
    SIGMOID: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    if GROUPS > 1:
        dout_ptr += tl.program_id(1) * WIDTH
        x_ptr += tl.program_id(1) * WIDTH
        weight_ptr += tl.program_id(1) * WIDTH
        if NEED_X:
            dx_ptr += tl.program_id(1) * WIDTH
        if NEED_WEIGHT:
            partial_ptr += tl.program_id(1) * WIDTH
        if HAS_GATE:
            gate_ptr += tl.program_id(1) * WIDTH
        if NEED_GATE:
            dgate_ptr += tl.program_id(1) * WIDTH
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
        if GATE_BEFORE:
            gate, slope = _load_gate(gate_ptr + row * gate_stride + column, mask, SIGMOID)
            given = x
            x *= gate
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
        # With eps=0, rows past the end, which are zeros, would make the weight's gradient NaN.
        rstd = tl.where(row < rows, rstd, 0.0)
        normalized = x * rstd
        if HAS_GATE and not GATE_BEFORE:
            gate, slope = _load_gate(gate_ptr + row * gate_stride + column, mask, SIGMOID)
            if NEED_GATE:
                dgate = dnormalized * normalized * weight * slope
                tl.store(dgate_ptr + row * (GROUPS * WIDTH) + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
            dnormalized *= gate
        if NEED_WEIGHT:
            dweight += dnormalized * normalized
        if NEED_X or (GATE_BEFORE and NEED_GATE):
            if HAS_WEIGHT:
                dnormalized *= weight
            along = tl.sum(dnormalized * normalized, axis=1, keep_dims=True) / WIDTH
            dx = rstd * (dnormalized - normalized * along)
            if GATE_BEFORE:
                if NEED_GATE:
                    dgate = (dx * given * slope).to(dgate_ptr.dtype.element_ty)
                    tl.store(dgate_ptr + row * (GROUPS * WIDTH) + column, dgate, mask=mask)
                dx *= gate
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + row * dsum_stride + column, mask=mask, other=0.0).to(tl.float32)
            if NEED_X:
                tl.store(dx_ptr + row * (GROUPS * WIDTH) + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_WEIGHT:
        total = tl.sum(dweight, axis=0)
        column = tl.arange(0, COLUMNS)
        partial_ptr += tl.program_id(0).to(tl.int64) * (GROUPS * WIDTH)
        tl.store(partial_ptr + column, total, mask=column < WIDTH)


_launch_forward = KernelLauncher(_forward_kernel)
_launch_backward = KernelLauncher(_backward_kernel)


def _out_dtype(x: Tensor, weight: Tensor | None, casts_last: bool) -> torch.dtype:
    if weight is None or casts_last or weight.dtype == x.dtype:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized contiguous rows."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _run_forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    weight_offset: bool,
    cast_after_weight: bool,
    groups: int = 1,
    gate_before: bool = False,
    sigmoid: bool = False,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Write `out`, and with a residual also the sum, `total`; without a residual in `groups` of columns."""
    if not x.numel():
        return
    width, rows = x.shape[-1] // groups, x.numel() // x.shape[-1]
    x, x_stride = aligned_rows(x)
    gate, gate_stride = (None, 0) if gate is None else aligned_rows(gate)
    residual, residual_stride = (None, 0) if residual is None else aligned_rows(residual)
    plan = forward_plan(width)
    _launch_forward(
        (cdiv(rows, plan.rows), groups, 1),
        (x, None if weight is None else weight.contiguous(), gate, residual, out, total),
        (x_stride, gate_stride, residual_stride),
        (rows, eps),
        (
            *(weight_offset, cast_after_weight, *are_given(weight, gate, residual)),
            *(groups, gate_before, sigmoid, width, *plan.tile),
        ),
        plan.warps,
    )


def _run_backward(
    gradients: tuple[Tensor | None, ...],
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    weight_offset: bool,
    cast_after_weight: bool = False,
    groups: int = 1,
    gate_before: bool = False,
    sigmoid: bool = False,
    *_: bool,
    dsum: Tensor | None = None,
) -> None:
    """Write those of the `gradients` of x, weight and gate that are not None; `dsum` is the gradient of a sum x."""
    dx, dweight, dgate = gradients
    if not x.numel():
        zero(dweight)
        return
    width, rows = x.shape[-1] // groups, x.numel() // x.shape[-1]
    element_bytes = sum(t.element_size() for t in (dout, dsum, x, gate) if t is not None)
    plan = backward_plan(width, element_bytes)
    programs = min(cdiv(rows, plan.rows), cdiv(sm_count(x.device) * plan.programs, groups))
    partial = None if dweight is None else x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    dout, dout_stride = aligned_rows(dout)
    x, x_stride = aligned_rows(x)
    dsum, dsum_stride = (None, 0) if dsum is None else aligned_rows(dsum)
    gate, gate_stride = (None, 0) if gate is None else aligned_rows(gate)
    _launch_backward(
        (programs, groups, 1),
        (dout, dsum, x, None if weight is None else weight.contiguous(), gate, dx, dgate, partial),
        (dout_stride, dsum_stride, x_stride, gate_stride),
        (rows, eps),
        (
            *(weight_offset, *are_given(weight, gate, dsum, dx, dweight, dgate)),
            *(groups, gate_before, sigmoid, width, *plan.tile, plan.stages),
        ),
        plan.warps,
    )
    if partial is not None and dweight is not None:
        sum_partials(partial, dweight)


_norm = differentiable_op(
    "rms_norm(Tensor x, Tensor? weight, Tensor? gate, float eps, bool weight_offset, bool cast_after_weight,"
    " SymInt groups, bool gate_before, bool sigmoid) -> Tensor",
    allocate=lambda x, weight, gate, eps, weight_offset, cast_after_weight, groups, gate_before, sigmoid: _dense(
        x, _out_dtype(x, weight, cast_after_weight or (gate is not None and not gate_before))
    ),
    launch=_run_forward,
    launch_backward=_run_backward,
)
# One group, and a gate, if there is one, of SiLU after the norm.
_WHOLE_ROWS = (1, False, False)


def _allocate_fused_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: bool, cast_after_weight: bool
) -> tuple[Tensor, Tensor]:
    total = _dense(x, torch.promote_types(x.dtype, residual.dtype))
    return _dense(x, _out_dtype(total, weight, cast_after_weight)), total


_fused_add_op = launch_op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool weight_offset,"
    " bool cast_after_weight) -> (Tensor, Tensor)",
    _allocate_fused_add,
    lambda outputs, x, residual, weight, eps, weight_offset, cast_after_weight: _run_forward(
        outputs[0], x, weight, None, eps, weight_offset, cast_after_weight, residual=residual, total=outputs[1]
    ),
)
_fused_add_backward_op = launch_op(
    "fused_add_rms_norm_backward(Tensor dout, Tensor? dsum, Tensor total, Tensor weight, float eps,"
    " bool weight_offset, bool need_x, bool need_weight) -> (Tensor, Tensor)",
    # The gradients of the sum, which both terms share, and of the weight.
    lambda dout, dsum, total, weight, *rest: empty_gradients((total, weight), rest[-2:]),
    lambda gradients, dout, dsum, total, weight, eps, weight_offset, *_: _run_backward(
        (*gradients, None), dout, total, weight, None, eps, weight_offset, dsum=dsum
    ),
)


class _FusedAddRMSNorm(torch.autograd.Function):
    """Not a `differentiable_op`: backward needs the sum, an output, and both terms share dx."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: bool, cast_after_weight: bool
    ) -> tuple[Tensor, Tensor]:
        out, total = _fused_add_op(x, residual, weight, eps, weight_offset, cast_after_weight)
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.weight_offset, ctx.dtypes = eps, weight_offset, (x.dtype, residual.dtype)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        dx, dweight = dsum, None
        if dout is not None:
            needs = need_x or need_residual, need_weight
            dx, dweight = _fused_add_backward_op(dout, dsum, total, weight, ctx.eps, ctx.weight_offset, *needs)

        def of(dtype: torch.dtype, need: bool) -> Tensor | None:
            return dx.to(dtype) if need and dx is not None else None

        of_x, of_residual = (of(*wanted) for wanted in zip(ctx.dtypes, (need_x, need_residual), strict=True))
        return of_x, of_residual, dweight if need_weight else None, None, None, None


def _check(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> None:
    width = x.shape[-1:]
    size = width[0] if group_size is None else group_size
    if (
        x.dtype in FLOATS
        and (size == width[0] or (size > 0 and width[0] % size == 0))
        and size <= MAX_WIDTH
        and (weight is None or (weight.dtype in FLOATS and weight.shape == width))
        and (gate is None or (gate.dtype in FLOATS and gate.shape == x.shape))
        and (residual is None or (residual.dtype in FLOATS and residual.shape == x.shape))
    ):
        return
    label = _label(gated=gate is not None)
    wanted = {"hidden_states": (x, x.shape), "weight": (weight, width), "gate": (gate, x.shape)}
    for name, (tensor, shape) in (wanted | {"residual": (residual, x.shape)}).items():
        if tensor is not None and tensor.dtype not in FLOATS:
            reject(label, name, unsupported_dtype(tensor.dtype), "use eager")
        if tensor is not None and tensor.shape != shape:
            reject(label, name, f"its shape is {tuple(tensor.shape)}, not {tuple(shape)}", "use eager")
    if size != width[0]:
        reject(label, "hidden_states", f"rows of {width[0]} in groups of {size}, at most {MAX_WIDTH}", "use eager")
    reject(label, "hidden_states", f"its rows have {width[0]} elements, the limit is {MAX_WIDTH}", "use eager")


def _label(gated: bool) -> str:
    if gated:
        return "rms_norm_gated_implementation='triton' or 'batch_invariant'"
    return "rms_norm_implementation='triton', 'triton_or_torch' or 'batch_invariant'"


def _weighted(weight_offset: bool = False, cast_after_weight: bool = False) -> Callable[..., Tensor]:
    """The kernel of a variant with a weight."""

    def norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """For float32, bfloat16 and float16, also mixed, and rows of up to 65536 elements."""
        _check(hidden_states, weight)
        return _norm(hidden_states, weight, None, float(eps), weight_offset, cast_after_weight, *_WHOLE_ROWS)

    return norm


def _with_residual(weight_offset: bool = False, cast_after_weight: bool = False) -> Callable[..., Any]:
    """The kernel of a variant with a residual: one pass forward, one backward that adds the sum's gradient."""

    def norm(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Within the limits of the norm alone."""
        _check(hidden_states, weight, residual=residual)
        return _FusedAddRMSNorm.apply(hidden_states, residual, weight, float(eps), weight_offset, cast_after_weight)

    return norm


standard = _weighted()
weight_offset = _weighted(weight_offset=True, cast_after_weight=True)
cast_after_weight = _weighted(cast_after_weight=True)
fused_add = _with_residual()
fused_add_weight_offset = _with_residual(weight_offset=True, cast_after_weight=True)
fused_add_cast_after_weight = _with_residual(cast_after_weight=True)


def weight_offset_groups(hidden_states: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """`op.weight_offset_groups`, within the limits of `standard` for each group."""
    _check(hidden_states, weight, group_size=group_size)
    groups = 1 if group_size is None else hidden_states.shape[-1] // group_size
    return _norm(hidden_states, weight, None, float(eps), True, True, groups, False, False)


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """`op.gated`, within the limits of `standard`."""
    _check(hidden_states, weight, gate)
    return _norm(hidden_states, weight, gate, float(eps), False, False, *_WHOLE_ROWS)


def gated_groups(
    hidden_states: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    group_size: int,
    gate_after: bool = False,
    cast_after_weight: bool = False,
    activation: str = "silu",
) -> Tensor:
    """`op.gated_groups`, within the limits of `standard` for each group."""
    if gate is None:
        reject(_label(gated=True), "gate", "it is None", "use eager")
    if activation not in GATES:
        reject(_label(gated=True), "activation", f"it is {activation!r}, not {' or '.join(GATES)}", "use eager")
    _check(hidden_states, weight, gate, group_size=group_size)
    form = hidden_states.shape[-1] // group_size, not gate_after, activation == "sigmoid"
    return _norm(hidden_states, weight, gate, float(eps), False, cast_after_weight, *form)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """`op.unweighted`, within the limits of `standard`."""
    _check(hidden_states, None)
    return _norm(hidden_states, None, None, float(eps), False, False, *_WHOLE_ROWS)
