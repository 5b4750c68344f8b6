"""`triton`: one launch over all layers for the sums, one for all gradients; deterministic.

Rows are chosen by the logits themselves. Upstream chooses by their softmax in the logits' dtype, which orders rows
the same way up to ties: where rounding makes probabilities equal this kernel takes the larger logit, and among equal
logits the first expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot.ops.load_balancing_loss.fused import Backend, make_kernel


@triton.jit
def _layer(layer_ptrs, layer, LAYERS: tl.constexpr):
    """Pointer of one layer: the launch carries them all, so no table has to reach the device first."""
    ptr = layer_ptrs[0]
    for i in tl.static_range(1, LAYERS):
        if layer == i:
            ptr = layer_ptrs[i]
    return ptr


@triton.jit
def _choice_key(x, column, WIDTH: tl.constexpr, NARROW: tl.constexpr):
    """Integers that order as the logits do and then by falling column, so that no two of a row are equal."""
    if NARROW:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * WIDTH + (WIDTH - 1 - column)


@triton.jit
def _sums_kernel(
    layer_ptrs,
    weights_ptr,
    partial_ptr,
    rows,
    pitch,
    rows_per_program,
    experts,
    LAYERS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NARROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choices and probabilities per expert of one layer's rows: partial[program, 2, WIDTH]."""
    layer = tl.program_id(1)
    logits_ptr = _layer(layer_ptrs, layer, LAYERS)
    column = tl.arange(0, WIDTH)
    inside = column < experts
    # Summed over rows once, at the end: within the loop that would need all warps to meet.
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

        key = _choice_key(raw, column[None, :], WIDTH, NARROW)
        lowest = tl.max(key, 1)
        for _ in tl.static_range(TOP_K - 1):
            lowest = tl.max(tl.where(key < lowest[:, None], key, -(1 << 31) if NARROW else -(1 << 62)), 1)
        picked = (key >= lowest[:, None]) & inside[None, :]
        chosen += tl.where(picked, weight[:, None], 0.0)
    program = layer * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + program * 2 * WIDTH + column, tl.sum(chosen, 0))
    tl.store(partial_ptr + program * 2 * WIDTH + WIDTH + column, tl.sum(probability, 0))


@triton.jit
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


@triton.jit
def _gradients_kernel(
    layer_ptrs,
    weights_ptr,
    coefficients_ptr,
    grad_loss_ptr,
    grads_ptr,
    rows,
    pitch,
    experts,
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
    # The gradient is the same for c + constant; the smaller c is, the less cancels.
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


def _aligned(layers: Sequence[Tensor]) -> list[Tensor]:
    """The layers with one pitch, columns side by side; a copy only where a model's logits are a view."""
    pitch = layers[0].stride(0)
    fits = all(x.stride(1) == 1 and x.stride(0) == pitch for x in layers)
    return list(layers) if fits else [x.contiguous() for x in layers]


def forward(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """See `Backend.forward`."""
    layers = _aligned(layers)
    rows, experts = layers[0].shape
    width = triton.next_power_of_2(experts)
    block = max(1, min(_SUMS_TILE // width, triton.next_power_of_2(max(rows, 1))))
    blocks = triton.cdiv(rows, block)
    per_layer = max(1, min(blocks, triton.cdiv(_PROGRAMS, len(layers))))
    partial = torch.empty(len(layers) * per_layer, 2, width, dtype=torch.float32, device=layers[0].device)
    _sums_kernel[(per_layer, len(layers))](
        tuple(layers),
        weights,
        partial,
        rows,
        layers[0].stride(0),
        triton.cdiv(blocks, per_layer) * block,
        experts,
        LAYERS=len(layers),
        TOP_K=top_k,
        WEIGHTED=weights is not None,
        NARROW=layers[0].element_size() == 2,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    loss = torch.empty((), dtype=torch.float32, device=partial.device)
    coefficients = torch.empty(experts, dtype=torch.float32, device=partial.device)
    sums = partial.sum(0, dtype=torch.float64)
    _finish_kernel[(1,)](sums, loss, coefficients, experts, TOP_K=top_k, WIDTH=width, num_warps=1)
    return loss, coefficients


def backward(layers: Sequence[Tensor], weights: Tensor | None, coefficients: Tensor, grad_loss: Tensor) -> Tensor:
    """See `Backend.backward`."""
    layers = _aligned(layers)
    rows, experts = layers[0].shape
    width = triton.next_power_of_2(experts)
    block = max(1, min(_GRADIENTS_TILE // width, triton.next_power_of_2(max(rows, 1))))
    grads = torch.empty(len(layers), rows, experts, dtype=layers[0].dtype, device=layers[0].device)
    if rows:
        _gradients_kernel[(triton.cdiv(rows, block), len(layers))](
            tuple(layers),
            weights,
            coefficients,
            grad_loss,
            grads,
            rows,
            layers[0].stride(0),
            experts,
            LAYERS=len(layers),
            WEIGHTED=weights is not None,
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
        )
    return grads


standard = make_kernel(Backend("triton", forward, backward))
