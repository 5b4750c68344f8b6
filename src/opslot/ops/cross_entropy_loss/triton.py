"""`triton`: cuBLAS matmuls, and one kernel per chunk that writes losses and replaces the logits by their gradient.

Each program processes one row: it reads the row once for the maximum and the sum of exponentials (online softmax,
Milakov and Gimelshein 2018), and again to write the gradient. The label is excluded from the sum, so that p - 1 and
-log p are computed from the sum of the others, without cancellation for p near 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.device import triton_interpreted
from opslot._base.jit import downcast
from opslot._base.kernel_launch import cdiv
from opslot.ops._common.batch_invariant import linear_into
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops.cross_entropy_loss.chunked import Backend, Shaping
from opslot.ops.cross_entropy_loss.fused import make_kernels

# Memory budget of a chunk's logits: 2,048 rows of 151,936 in 16 bits, enough for matmuls at full speed.
_LOGITS_BYTES = 640 << 20
_MIN_ROWS = 256


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, accurate for small x (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def _tanh(x):
    """tanh; by its series near 0, to avoid cancellation."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 - s * (1382.0 / 155925)))))
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _shape(z, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """x of a logit, in float32."""
    x = z.to(tl.float32)
    if SCALED:
        x = x * scale
    if CAPPED:
        x = cap * _tanh(x / cap)
    return x


@triton.jit
def _slope(x, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """dx/dz at x."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SCALED:
        slope = slope * scale
    if CAPPED:
        slope = slope * (1.0 - (x / cap) * (x / cap))
    return slope


@triton.jit
def _loss_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    factor_ptr,
    pitch,
    vocab,
    ignore_index,
    smoothing,
    cap,
    scale,
    GRAD: tl.constexpr,
    FACTOR: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Losses; with GRAD the logits become their gradient: p - (1 - e) onehot - e / V, times factor and slope."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    row_ptr = logits_ptr + row * pitch
    columns = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRAD:
            for start in range(0, vocab, BLOCK):
                nothing = tl.zeros((BLOCK,), dtype=logits_ptr.dtype.element_ty)
                tl.store(row_ptr + start + columns, nothing, mask=start + columns < vocab)
        return

    # A label outside the vocabulary makes the row NaN, without out-of-bounds reads.
    own_z = tl.load(row_ptr + label, mask=(label >= 0) & (label < vocab), other=float("nan"))
    own = _shape(own_z, scale, cap, SCALED, CAPPED)
    highest = own
    others = 0.0
    logit_sum = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + columns
        z = tl.load(row_ptr + column, mask=column < vocab, other=0.0)
        x = _shape(z, scale, cap, SCALED, CAPPED)
        if SMOOTHED:
            logit_sum += tl.sum(tl.where(column < vocab, x, 0.0))
        x = tl.where((column < vocab) & (column != label), x, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(x))
        others = others * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest))
        highest = new_highest
    own_exp = tl.exp(own - highest)
    total = own_exp + others
    loss = tl.where(own == highest, _log1p(others), tl.log(total) + (highest - own))
    if SMOOTHED:
        loss += smoothing * (own - logit_sum / vocab)
    tl.store(losses_ptr + row, loss)

    if GRAD:
        factor = 1.0
        if FACTOR:
            factor = tl.load(factor_ptr)
        # Factors that are constant over the row are applied to its normalizer.
        norm = factor / total
        # p - (1 - e) or e - (1 - p), whichever has less cancellation.
        sure = own_exp > others
        own_grad = tl.where(sure, -others * norm + factor * smoothing, own_exp * norm - factor * (1.0 - smoothing))
        # From the end of the row, which is still cached.
        blocks = tl.cdiv(vocab, BLOCK)
        for i in range(blocks):
            column = (blocks - 1 - i) * BLOCK + columns
            z = tl.load(row_ptr + column, mask=column < vocab, other=0.0)
            x = _shape(z, scale, cap, SCALED, CAPPED)
            if SMOOTHED:
                grad = tl.exp(x - highest) * norm
                grad = tl.where(column == label, own_grad, grad) - factor * (smoothing / vocab)
            else:
                grad = tl.where(column == label, -others, tl.exp(x - highest)) * norm
            if CAPPED:
                grad *= _slope(x, scale, cap, False, CAPPED)
            tl.store(row_ptr + column, downcast(grad, logits_ptr.dtype.element_ty), mask=column < vocab)


@triton.jit
def _token_kernel(
    logits_ptr,
    labels_ptr,
    log_probs_ptr,
    entropy_ptr,
    grad_log_probs_ptr,
    grad_entropy_ptr,
    pitch,
    vocab,
    ignore_index,
    cap,
    scale,
    GRAD: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probability and entropy; with GRAD the logits become a (onehot - p) - b p (log p + entropy)."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    row_ptr = logits_ptr + row * pitch
    columns = tl.arange(0, BLOCK)
    if label == ignore_index:
        if GRAD:
            for start in range(0, vocab, BLOCK):
                nothing = tl.zeros((BLOCK,), dtype=logits_ptr.dtype.element_ty)
                tl.store(row_ptr + start + columns, nothing, mask=start + columns < vocab)
        else:
            tl.store(log_probs_ptr + row, 0.0)
            tl.store(entropy_ptr + row, 0.0)
        return

    own_z = tl.load(row_ptr + label, mask=(label >= 0) & (label < vocab), other=float("nan"))
    own = _shape(own_z, scale, cap, SCALED, CAPPED)
    # A finite one: differences from logits of -inf would be NaN.
    highest = tl.where(own == float("-inf"), -1.0e38, own)
    others = 0.0
    # Sum of exp(x - highest) * (x - highest) without the label, as in `others`; a logit of -inf adds 0.
    weighted = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + columns
        z = tl.load(row_ptr + column, mask=column < vocab, other=0.0)
        x = _shape(z, scale, cap, SCALED, CAPPED)
        counts = (column < vocab) & (column != label)
        new_highest = tl.maximum(highest, tl.max(tl.where(counts, x, float("-inf"))))
        above = tl.where(counts & (x != float("-inf")), x - new_highest, -1.0e4)
        e = tl.exp(above)
        shrink = tl.exp(highest - new_highest)
        weighted = shrink * (weighted + (highest - new_highest) * others) + tl.sum(e * above)
        others = others * shrink + tl.sum(e)
        highest = new_highest
    own_above = own - highest
    own_exp = tl.exp(own_above)
    total = own_exp + others
    log_total = tl.where(own == highest, _log1p(others), tl.log(total))

    if GRAD:
        a = tl.load(grad_log_probs_ptr + row)
        b = tl.load(grad_entropy_ptr + row)
        shift = tl.load(entropy_ptr + row) - log_total
        blocks = tl.cdiv(vocab, BLOCK)
        for i in range(blocks):
            column = (blocks - 1 - i) * BLOCK + columns
            z = tl.load(row_ptr + column, mask=column < vocab, other=0.0)
            x = _shape(z, scale, cap, SCALED, CAPPED)
            p = tl.exp(x - highest) / total
            above = tl.where(x == float("-inf"), 0.0, x - highest + shift)
            grad = tl.where(column == label, a * (others / total), -a * p) - b * p * above
            if SCALED or CAPPED:
                grad *= _slope(x, scale, cap, SCALED, CAPPED)
            tl.store(row_ptr + column, downcast(grad, logits_ptr.dtype.element_ty), mask=column < vocab)
    else:
        tl.store(log_probs_ptr + row, own_above - log_total)
        own_weighted = own_exp * tl.where(own == float("-inf"), 0.0, own_above)
        tl.store(entropy_ptr + row, log_total - (weighted + own_weighted) / total)


@triton.jit
def _rescale_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """x *= factor; reads nothing for the usual factor of 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for block in range(start, numel, step):
            offsets = block + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offsets, mask=offsets < numel)
            tl.store(x_ptr + offsets, downcast(x.to(tl.float32) * factor, x.dtype), mask=offsets < numel)


def rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows whose logits fit the budget."""
    return max(_MIN_ROWS, _LOGITS_BYTES // (vocab * dtype.itemsize) // 256 * 256)


def _launch(vocab: int) -> dict[str, int]:
    # Fastest of 2048 to 32768 with 4 to 32 warps at V=151936 on an H200.
    block = min(4096, triton.next_power_of_2(vocab))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def loss_step(
    logits: Tensor, labels: Tensor, losses: Tensor, factor: Tensor | None, shaping: Shaping, grad: bool
) -> Tensor:
    """See `Backend.loss_step`; overwrites `logits`."""
    vocab = logits.shape[1]
    _loss_kernel[(logits.shape[0],)](
        logits,
        labels,
        losses,
        losses if factor is None else factor,
        logits.stride(0),
        vocab,
        shaping.ignore_index,
        shaping.smoothing,
        shaping.cap,
        shaping.scale,
        GRAD=grad,
        FACTOR=factor is not None,
        SMOOTHED=shaping.smoothing != 0.0,
        SCALED=shaping.scale != 1.0,
        CAPPED=shaping.cap != 0.0,
        **_launch(vocab),
    )
    return logits


def _tokens(
    logits: Tensor, labels: Tensor, values: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor] | None, shaping: Shaping
) -> Tensor:
    vocab = logits.shape[1]
    _token_kernel[(logits.shape[0],)](
        logits,
        labels,
        *values,
        *(grads or values),
        logits.stride(0),
        vocab,
        shaping.ignore_index,
        shaping.cap,
        shaping.scale,
        GRAD=grads is not None,
        SCALED=shaping.scale != 1.0,
        CAPPED=shaping.cap != 0.0,
        **_launch(vocab),
    )
    return logits


def token_step(logits: Tensor, labels: Tensor, log_probs: Tensor, entropy: Tensor, shaping: Shaping) -> None:
    """See `Backend.token_step`."""
    _tokens(logits, labels, (log_probs, entropy), None, shaping)


def token_grad_step(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    shaping: Shaping,
) -> Tensor:
    """See `Backend.token_grad_step`; overwrites `logits`."""
    return _tokens(logits, labels, (entropy, entropy), (grad_log_probs, grad_entropy), shaping)


def rescale(grad: Tensor, factor: Tensor) -> None:
    """See `Backend.rescale`; `grad` is dense."""
    block = 4096
    programs = min(cdiv(grad.numel(), block), 2048)
    if programs:
        _rescale_kernel[(programs,)](grad, factor, grad.numel(), BLOCK=block, num_warps=8)


def unsupported(hidden: Tensor) -> str | None:
    """See `Backend.unsupported`."""
    if hidden.dtype not in FLOATS:
        return unsupported_dtype(hidden.dtype)
    if not hidden.is_cuda and not triton_interpreted():
        return f"it is on {hidden.device}, not a GPU"
    return None


_BACKEND = Backend("triton", loss_step, token_step, token_grad_step, rescale, rows, unsupported)
causal, sequence_classification, token_log_probs = make_kernels(_BACKEND)
batch_invariant_causal, batch_invariant_sequence_classification, batch_invariant_token_log_probs = make_kernels(
    replace(_BACKEND, name="batch_invariant", linear_into=linear_into)
)
