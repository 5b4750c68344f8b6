"""`triton`: one launch over all layers for the sums, one for all gradients; deterministic.

The gradient of a row's logits depends only on that row and the experts' counts: with c_e = E * f_e / rows it is
p_e * (c_e - sum_j p_j c_j). So the forward keeps the counts, and the backward computes the softmax again.

The top-k is taken over the logits. Transformers takes it over their softmax in the logits' dtype, which gives the same
order except for ties: if rounding makes probabilities equal, this kernel selects the larger logit, and among equal
logits the first expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.device import triton_interpreted
from opslot._base.host_values import device_copy
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import custom_op, once_differentiable, variadic
from opslot.ops._common.specs import FLOATS, unsupported_dtype


@triton.jit
def _layer(layer_ptrs, layer, LAYERS: tl.constexpr):
    """Pointer of one layer. All pointers are kernel arguments, so no table is copied to the device."""
    ptr = layer_ptrs[0]
    for i in tl.static_range(1, LAYERS):
        if layer == i:
            ptr = layer_ptrs[i]
    return ptr


@triton.jit
def _choice_key(x, column, WIDTH: tl.constexpr, KEY32: tl.constexpr):
    """Integers in the order of the logits, ties in descending order of columns, so that all of a row are distinct."""
    if KEY32:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * WIDTH + (WIDTH - 1 - column)


@triton.jit(do_not_specialize=["rows", "rows_per_program", "experts"])
def _sums_kernel(
    layer_ptrs,
    weights_ptr,
    partial_ptr,
    pitch,
    rows,
    rows_per_program,
    experts,
    LAYERS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    KEY32: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choices and probabilities per expert of one layer's rows: partial[program, 2, WIDTH]."""
    layer = tl.program_id(1)
    logits_ptr = _layer(layer_ptrs, layer, LAYERS)
    column = tl.arange(0, WIDTH)
    inside = column < experts
    # Reduced over rows once, at the end: in the loop it would synchronize all warps.
    chosen = tl.zeros((BLOCK, WIDTH), tl.float32)
    probability = tl.zeros((BLOCK, WIDTH), tl.float32)
    first = tl.program_id(0) * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        valid = row < last
        mask = valid[:, None] & inside[None, :]
        offsets = row.to(tl.int64)[:, None] * pitch + column[None, :]
        raw = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf"))
        x = raw.to(tl.float32)
        weight = valid.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + row, mask=valid, other=0.0)

        # A row outside the layer is all -inf: its maximum is replaced so that no NaN arises.
        highest = tl.where(valid, tl.max(x, 1), 0.0)
        e = tl.exp(x - highest[:, None])
        total = tl.where(valid, tl.sum(e, 1), 1.0)
        probability += e * (weight / total)[:, None]

        key = _choice_key(raw, column[None, :], WIDTH, KEY32)
        lowest = tl.max(key, 1)
        for _ in tl.static_range(TOP_K - 1):
            lowest = tl.max(tl.where(key < lowest[:, None], key, -(1 << 31) if KEY32 else -(1 << 62)), 1)
        picked = (key >= lowest[:, None]) & inside[None, :]
        chosen += tl.where(picked, weight[:, None], 0.0)
    program = layer * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + program * 2 * WIDTH + column, tl.sum(chosen, 0))
    tl.store(partial_ptr + program * 2 * WIDTH + WIDTH + column, tl.sum(probability, 0))


@triton.jit(do_not_specialize=["experts"])
def _finish_kernel(sums_ptr, loss_ptr, coefficients_ptr, experts, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Loss and coefficients from the sums [2, WIDTH] in float64, so that the loss is rounded once."""
    column = tl.arange(0, WIDTH)
    inside = column < experts
    chosen = tl.load(sums_ptr + column, mask=inside, other=0.0)
    probability = tl.load(sums_ptr + WIDTH + column, mask=inside, other=0.0)
    rows = tl.sum(chosen) / TOP_K
    coefficients = chosen * (experts / (rows * rows))
    tl.store(loss_ptr, tl.sum(coefficients * probability).to(tl.float32))
    tl.store(coefficients_ptr + column, coefficients.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gradients_kernel(
    layer_ptrs,
    weights_ptr,
    coefficients_ptr,
    grad_loss_ptr,
    grads_ptr,
    pitch,
    experts,
    rows,
    LAYERS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of one block of rows of one layer: weight * p * (c - sum(p c))."""
    layer = tl.program_id(1)
    logits_ptr = _layer(layer_ptrs, layer, LAYERS)
    column = tl.arange(0, WIDTH)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    mask = valid[:, None] & (column < experts)[None, :]
    offsets = row.to(tl.int64)[:, None] * pitch + column[None, :]
    x = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    c = tl.load(coefficients_ptr + column, mask=column < experts, other=float("inf"))
    # The gradient is the same for c + constant; smaller values of c cancel less.
    c = tl.where(column < experts, c - tl.min(c), 0.0)
    highest = tl.where(valid, tl.max(x, 1), 0.0)
    e = tl.exp(x - highest[:, None])
    p = e / tl.where(valid, tl.sum(e, 1), 1.0)[:, None]
    mean = tl.sum(p * c[None, :], 1)
    factor = tl.load(grad_loss_ptr) + tl.zeros((BLOCK,), tl.float32)
    if WEIGHTED:
        factor *= tl.load(weights_ptr + row, mask=valid, other=0.0)
    grad = p * (c[None, :] - mean[:, None]) * factor[:, None]
    out = (layer.to(tl.int64) * rows + row)[:, None] * experts + column[None, :]
    tl.store(grads_ptr + out, grad.to(grads_ptr.dtype.element_ty), mask=mask)


# Elements of a tile, held in the registers of 4 warps: the sums' with two accumulators, the gradients' without.
_SUMS_TILE = 2048
_GRADIENTS_TILE = 4096
# Enough programs to fill the largest GPU a few times over, few enough that their partial sums stay small.
_PROGRAMS = 2048


_launch_sums = KernelLauncher(_sums_kernel)
_launch_finish = KernelLauncher(_finish_kernel)
_launch_gradients = KernelLauncher(_gradients_kernel)


@functools.lru_cache(maxsize=1024)
def _plan(layers: int, rows: int, experts: int) -> tuple[int, int, int, int]:
    """(width, rows of a tile of the sums, programs a layer there, rows of a tile of the gradients)."""
    width = triton.next_power_of_2(experts)
    highest = triton.next_power_of_2(max(rows, 1))
    block = max(1, min(_SUMS_TILE // width, highest))
    programs = max(1, min(cdiv(rows, block), cdiv(_PROGRAMS, layers)))
    return width, block, programs, max(1, min(_GRADIENTS_TILE // width, highest))


def _aligned(layers: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
    """The layers, and their pitch: one for all, columns side by side; copied only where a model's logits are views."""
    strides = layers[0].stride()
    if strides[1] == 1 and all(x.stride() == strides for x in layers):
        return tuple(layers), strides[0]
    return tuple([x.contiguous() for x in layers]), layers[0].shape[1]


def _forward(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """(loss, coefficients c [E]) of layers [T, E] and weights of rows [T], in float32."""
    rows, experts = layers[0].shape
    layers, pitch = _aligned(layers)
    width, block, programs, _ = _plan(len(layers), rows, experts)
    partial = torch.empty(len(layers) * programs, 2, width, dtype=torch.float32, device=layers[0].device)
    _launch_sums(
        (programs, len(layers), 1),
        (layers, weights, partial),
        (pitch,),
        (rows, cdiv(cdiv(rows, block), programs) * block, experts),
        (len(layers), top_k, weights is not None, layers[0].element_size() == 2, width, block),
        4,
    )
    loss = partial.new_empty(())
    coefficients = partial.new_empty(experts)
    sums = partial.sum(0, dtype=torch.float64)
    _launch_finish((1, 1, 1), (sums, loss, coefficients), (), (experts,), (top_k, width), 1)
    return loss, coefficients


def _backward(layers: Sequence[Tensor], weights: Tensor | None, coefficients: Tensor, grad_loss: Tensor) -> Tensor:
    """Gradients of the layers' logits, [L, T, E] in their dtype."""
    rows, experts = layers[0].shape
    layers, pitch = _aligned(layers)
    width, _, _, block = _plan(len(layers), rows, experts)
    grads = layers[0].new_empty(len(layers), rows, experts)
    if rows:
        _launch_gradients(
            (cdiv(rows, block), len(layers), 1),
            (layers, weights, coefficients, grad_loss, grads),
            (pitch, experts),
            (rows,),
            (len(layers), weights is not None, width, block),
            4,
        )
    return grads


def _forward_fake(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    first = layers[0]
    return first.new_empty((), dtype=torch.float32), first.new_empty(first.shape[1], dtype=torch.float32)


_forward_op = custom_op(
    "load_balancing_loss(Tensor[] layers, Tensor? weights, int top_k) -> (Tensor, Tensor)", _forward, _forward_fake
)
_backward_op = custom_op(
    "load_balancing_loss_backward(Tensor[] layers, Tensor? weights, Tensor coefficients, Tensor grad_loss) -> Tensor",
    _backward,
    lambda layers, *_: layers[0].new_empty(len(layers), *layers[0].shape),
)


class _LoadBalancingLoss(torch.autograd.Function):
    """Not a `differentiable_op`: autograd needs the tensors of a list as separate arguments."""

    @staticmethod
    @variadic
    def forward(ctx: Any, weights: Tensor | None, top_k: int, *layers: Tensor) -> Tensor:
        loss, coefficients = _forward_op(layers, weights, top_k)
        ctx.save_for_backward(coefficients, weights, *layers)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        coefficients, weights, *layers = ctx.saved_tensors
        return None, None, *_backward_op(layers, weights, coefficients, grad_loss).unbind()


def standard(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """See `op.standard`.

    Raises:
        KernelError: layers of several shapes or dtypes, another dtype than float32, bfloat16 or float16, no GPU, a mask
            of another size, or numbers of experts and choices that do not fit the logits.
    """
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    _check(gate_logits, num_experts, top_k, attention_mask)
    device = gate_logits[0].device
    weights = None
    if attention_mask is not None:
        if attention_mask.device != device:
            attention_mask = device_copy(attention_mask, device)
        weights = attention_mask.reshape(-1).to(torch.float32).contiguous()
    gate_logits = tuple([layer if layer.device == device else layer.to(device) for layer in gate_logits])
    return _LoadBalancingLoss.apply(weights, top_k, *gate_logits)


def _check(gate_logits: tuple[Tensor, ...], num_experts: int | None, top_k: int, attention_mask: Tensor | None) -> None:
    if not gate_logits:
        _reject("gate_logits", "an empty tuple")
    first = gate_logits[0]
    shape, dtype = first.shape, first.dtype
    if len(shape) != 2 or not all(x.shape == shape and x.dtype == dtype for x in gate_logits):
        kinds = ", ".join(sorted({f"{tuple(x.shape)} {x.dtype}" for x in gate_logits}))
        _reject("gate_logits", f"{kinds}, not one shape [T, E] and dtype")
    if first.dtype not in FLOATS:
        _reject("gate_logits", unsupported_dtype(first.dtype))
    if first.device.type != "cuda" and not triton_interpreted():
        _reject("gate_logits", f"it is on {first.device}, not a GPU")
    if num_experts != first.shape[1]:
        _reject("num_experts", f"{num_experts} beside gate_logits of shape {tuple(first.shape)}")
    if not 1 <= top_k <= first.shape[1]:
        _reject("top_k", f"{top_k} of {first.shape[1]} experts")
    if attention_mask is not None and attention_mask.numel() != first.shape[0]:
        found = f"shape {tuple(attention_mask.shape)} beside gate_logits of shape {tuple(first.shape)}"
        _reject("attention_mask", found)


def _reject(argument: str, found: str) -> NoReturn:
    field = "load_balancing_loss_implementation"
    reject(f"{field}='triton'", argument, found, f"fix the argument, or set {field} to 'eager'")
