"""Chunked linear cross entropy without the full logits: the loop over chunks, shared by all fused kernels.

Rows are split into chunks whose logits fit a memory budget. Each chunk has a matmul for the logits, a step that
computes the losses and overwrites the logits with their gradient, and two matmuls for the gradients of hidden states
and weight. The loss is a scalar, so forward computes its gradient up to one factor, which backward applies. Per-token
outputs have one factor per token, so backward recomputes the logits.

Shapes: N rows, H hidden size, V vocabulary size, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Rows of a chunk are a multiple of this, so that matmuls have full tiles.
_ROW_TILE = 128
# Each chunk rounds a 16-bit gradient once; for more chunks than this it is accumulated in float32.
_MAX_16_BIT_SUMS = 8
# Below this fraction of labels that are not ignored, the ignored rows are skipped (on CPU, where counting them needs no
# synchronization).
_WORTH_COMPACTING = 0.9
# cuBLAS has fast kernels in 16 bits for sizes that are multiples of this; those for others have a sixth of the speed.
_ALIGNED_SIZE = 8
# Smaller vocabularies take one matmul, as in Transformers' code: two would cost more.
_FEWEST_IN_TWO_PARTS = 1024


class Head(NamedTuple):
    """The logits: hidden weight^T + bias, plus low_hidden low_weight^T of the head's adapters (LoRA).

    Attributes:
        hidden, weight, bias: [N, H], [V, H] and [V].
        low_hidden, low_weight: [N, r] and [V, r], or None without adapters.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    low_hidden: Tensor | None = None
    low_weight: Tensor | None = None

    def of_rows(self, rows: Tensor) -> Head:
        low_hidden = None if self.low_hidden is None else self.low_hidden[rows]
        return self._replace(hidden=self.hidden[rows], low_hidden=low_hidden)


Wanted = tuple[bool, bool, bool, bool, bool]
"""Whether the gradients by the tensors of `Head` are wanted."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""By the tensors of `Head`; empty where not wanted."""


@dataclass(frozen=True)
class Shaping:
    """How a logit z enters the loss: x = scale * z, then cap * tanh(x / cap) unless `cap` is 0.

    `smoothing` is label smoothing. Rows whose label is `ignore_index` give 0 and get a gradient of exactly 0.
    """

    ignore_index: int
    smoothing: float
    cap: float
    scale: float


def _torch_linear_into(
    out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, add: bool = False
) -> None:
    few, many = _vocabulary_parts(weight)
    if few is not None:
        _few_columns(out[:, few], hidden, weight[few].t(), None if bias is None else bias[few], add)
    out, transposed = out[:, many], weight[many].t()
    if add:
        out.addmm_(hidden, transposed)
    elif bias is None:
        torch.mm(hidden, transposed, out=out)
    else:
        torch.addmm(bias[many], hidden, transposed, out=out)


def _few_columns(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, add: bool) -> None:
    """out (+)= a @ b + bias in float32: cuBLAS would sum parts of such matmuls in float16."""
    result = out.new_empty(out.shape, dtype=torch.float32)
    _matmul(a, b, result, add=False)
    if bias is not None:
        result += bias
    if add:
        result += out
    out.copy_(result)


def _vocabulary_parts(weight: Tensor) -> tuple[slice | None, slice]:
    """The few entries at the end of the vocabulary that make cuBLAS slow, or None, and the others."""
    size = weight.shape[0]
    aligned = size - size % _ALIGNED_SIZE
    if not weight.is_cuda or weight.element_size() != 2 or size < _FEWEST_IN_TWO_PARTS or aligned == size:
        return None, slice(0, size)
    return slice(aligned, size), slice(0, aligned)


@dataclass(frozen=True)
class Backend:
    """The steps between the matmuls, on one chunk: logits [R, V], everything else [R].

    Attributes:
        name: the kernel's name and part of its custom ops'.
        loss_step: (logits, labels, losses, factor, shaping, grad) writes `losses` and returns `factor` times their
            gradient in the logits' dtype (unused without `grad`); `factor` is a 0-d tensor, or None for 1. May
            overwrite `logits`.
        token_step: (logits, labels, log_probs, entropy, shaping) writes the two.
        token_grad_step: (logits, labels, entropy, grad_log_probs, grad_entropy, shaping) returns the logits' gradient.
        rescale: (gradient, factor) multiplies in place by a 0-d tensor; does nothing for 1.
        rows: (vocabulary, dtype, device) -> rows whose logits fit the budget.
        unsupported: (hidden_states) -> why a tensor of this dtype or device is not supported, or None.
        factor_last: apply the factor to the summed gradients, which is cheaper if they are smaller than the logits.
        linear_into: (out, hidden, weight, bias) writes the logits; (out, hidden, weight, add=True) adds to them.
    """

    name: str
    loss_step: Callable[[Tensor, Tensor, Tensor, Tensor | None, Shaping, bool], Tensor]
    token_step: Callable[[Tensor, Tensor, Tensor, Tensor, Shaping], None]
    token_grad_step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Shaping], Tensor]
    rescale: Callable[[Tensor, Tensor], None]
    rows: Callable[[int, torch.dtype, torch.device], int]
    unsupported: Callable[[Tensor], str | None] = lambda _: None
    factor_last: bool = False
    linear_into: Callable[..., None] = _torch_linear_into

    def logits_into(self, out: Tensor, head: Head, rows: slice) -> None:
        """The logits of some rows."""
        self.linear_into(out, head.hidden[rows], head.weight, head.bias)
        if head.low_hidden is not None and head.low_weight is not None:
            self.linear_into(out, head.low_hidden[rows], head.low_weight, add=True)


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and loss: float32 or float64."""
    return torch.promote_types(dtype, torch.float32)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the gradients that forward saves for backward.

    float16 cannot represent p / N before the loss scale is applied in backward, so these gradients are float32.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def loss_and_gradients(
    backend: Backend, head: Head, labels: Tensor, divisor: Tensor, shaping: Shaping, wanted: Wanted
) -> tuple[Tensor, Gradients]:
    """Summed loss / `divisor`, and its gradients in `gradient_dtype`.

    `divisor` is a 0-d tensor in `loss_dtype`. If all labels are ignored, the loss is 0 / divisor and the gradients are
    0.
    """
    kept = _rows_that_count(labels, shaping.ignore_index)
    if kept is not None:
        loss, found = loss_and_gradients(backend, head.of_rows(kept), labels[kept], divisor, shaping, wanted)
        by_hidden, by_weight, by_bias, by_low_hidden, by_low_weight = found
        by_hidden = _in_all_rows(by_hidden, kept, len(labels)) if wanted[0] else by_hidden
        by_low_hidden = _in_all_rows(by_low_hidden, kept, len(labels)) if wanted[3] else by_low_hidden
        return loss, (by_hidden, by_weight, by_bias, by_low_hidden, by_low_weight)

    # The divisor is at least 1 unless all labels are ignored; then 0 instead of 1 / 0 keeps the gradients 0.
    factor = torch.where(divisor == 0, 0.0, shaping.scale / divisor)
    dtype = head.hidden.dtype
    last = backend.factor_last or dtype == torch.float16
    losses = labels.new_empty(len(labels), dtype=divisor.dtype)
    sums = _GradientSums(backend, head, wanted, upcast=last)
    for rows, logits in _logit_chunks(backend, head):
        grad = backend.loss_step(logits, labels[rows], losses[rows], None if last else factor, shaping, any(wanted))
        sums.add(rows, grad)
    return _mean(losses, divisor), sums.finish(factor if last else None, gradient_dtype(dtype))


def _in_all_rows(rows: Tensor, kept: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, rows.shape[1]).index_copy_(0, kept, rows)


def tokens(backend: Backend, head: Head, labels: Tensor, shaping: Shaping) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each row, [N] in float32 or float64."""
    log_probs = labels.new_empty(len(labels), dtype=loss_dtype(head.hidden.dtype))
    entropy = torch.empty_like(log_probs)
    for rows, logits in _logit_chunks(backend, head):
        backend.token_step(logits, labels[rows], log_probs[rows], entropy[rows], shaping)
    return log_probs, entropy


def token_gradients(
    backend: Backend,
    head: Head,
    labels: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    shaping: Shaping,
    wanted: Wanted,
) -> Gradients:
    """Gradients of `tokens`; `entropy` is its output."""
    grad_log_probs, grad_entropy = grad_log_probs.contiguous(), grad_entropy.contiguous()
    sums = _GradientSums(backend, head, wanted)
    for rows, logits in _logit_chunks(backend, head):
        per_row = labels[rows], entropy[rows], grad_log_probs[rows], grad_entropy[rows]
        sums.add(rows, backend.token_grad_step(logits, *per_row, shaping))
    return sums.finish(None, head.hidden.dtype)


def _mean(losses: Tensor, divisor: Tensor) -> Tensor:
    """Their sum / divisor, in float64 if supported, so rounded once."""
    precise = torch.float64 if losses.device.type in ("cpu", "cuda") else losses.dtype
    return (losses.sum(dtype=precise) / divisor).to(losses.dtype)


def _rows_that_count(labels: Tensor, ignore_index: int) -> Tensor | None:
    """Indices of the rows to compute, or None for all."""
    if labels.device.type != "cpu":
        return None
    kept = (labels != ignore_index).nonzero().squeeze(1)
    return kept if kept.numel() < _WORTH_COMPACTING * labels.numel() else None


def _chunk_rows(backend: Backend, hidden: Tensor, vocab: int) -> int:
    """Rows of each chunk but the last: within the budget, and balanced, so that the last one is not small."""
    total, width = hidden.shape
    most = max(1, backend.rows(vocab, hidden.dtype, hidden.device))
    if hidden.is_cuda and hidden.element_size() == 2 and total > _MAX_16_BIT_SUMS * most:
        # Fewer chunks need no float32 gradient of the weight, which would take 4 more bytes per element at its peak and
        # be read and written for every chunk.
        larger = -(-total // (_MAX_16_BIT_SUMS * _ROW_TILE)) * _ROW_TILE
        if (larger - most) * hidden.element_size() <= 4 * width:
            most = larger
    chunks = max(1, -(-total // most))
    even = -(-total // chunks)
    return min(most, max(1, -(-even // _ROW_TILE)) * _ROW_TILE)


def _logit_chunks(backend: Backend, head: Head) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [R, V]) chunk by chunk; every chunk uses the same memory."""
    hidden, weight = head.hidden, head.weight
    total, vocab = hidden.shape[0], weight.shape[0]
    rows = _chunk_rows(backend, hidden, vocab)
    # On a GPU, matmuls and kernels are fastest when every row starts on 16 bytes.
    pitch = -(-vocab // 16) * 16 if hidden.is_cuda else vocab
    buffer = hidden.new_empty(min(rows, total), pitch)[:, :vocab]
    for start in range(0, total, rows):
        chunk = slice(start, min(start + rows, total))
        logits = buffer[: chunk.stop - start]
        backend.logits_into(logits, head, chunk)
        yield chunk, logits


class _GradientSums:
    """Gradients of the tensors of a head, accumulated from chunks of the logits' gradient."""

    def __init__(self, backend: Backend, head: Head, wanted: Wanted, upcast: bool = False) -> None:
        self.head, self.wanted = head, wanted
        hidden, weight, _, low_hidden, low_weight = head
        input_dtype, upcast_dtype = hidden.dtype, loss_dtype(hidden.dtype)
        chunks = -(-hidden.shape[0] // _chunk_rows(backend, hidden, weight.shape[0]))
        sum_dtype = upcast_dtype if upcast or chunks > _MAX_16_BIT_SUMS else input_dtype
        row_dtype = upcast_dtype if upcast else input_dtype

        def empty(like: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor:
            return hidden.new_empty(like.shape if wanted and like is not None else 0, dtype=dtype)

        self.grad_hidden = empty(hidden, wanted[0], row_dtype)
        self.grad_weight = (
            torch.empty_like(weight, dtype=sum_dtype) if wanted[1] else weight.new_empty(0, dtype=sum_dtype)
        )
        self.grad_bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=upcast_dtype)
        self.grad_low_hidden = empty(low_hidden, wanted[3], row_dtype)
        self.grad_low_weight = empty(low_weight, wanted[4], upcast_dtype)
        if not hidden.shape[0]:
            self.grad_weight.zero_()
            self.grad_low_weight.zero_()

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        hidden, weight, _, low_hidden, low_weight = self.head
        want_hidden, want_weight, want_bias, want_low_hidden, want_low_weight = self.wanted
        if want_hidden:
            _by_input(grad_logits, weight, self.grad_hidden[rows])
        if want_weight:
            _by_weight(grad_logits, hidden[rows], self.grad_weight, add=rows.start > 0)
        if want_bias:
            self.grad_bias += grad_logits.sum(0, dtype=self.grad_bias.dtype)
        if want_low_hidden and low_weight is not None:
            _by_input(grad_logits, low_weight, self.grad_low_hidden[rows])
        if want_low_weight and low_hidden is not None:
            _by_weight(grad_logits, low_hidden[rows], self.grad_low_weight, add=rows.start > 0)

    def finish(self, factor: Tensor | None, dtype: torch.dtype) -> Gradients:
        sums = self.grad_hidden, self.grad_weight, self.grad_bias, self.grad_low_hidden, self.grad_low_weight
        if factor is not None:
            for gradient in sums:
                gradient.mul_(factor)
        hidden, weight, bias, low_hidden, low_weight = (gradient.to(dtype) for gradient in sums)
        return hidden, weight, bias, low_hidden, low_weight


def _by_input(grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [R, H] = grad_logits [R, V] weight [V, H]."""
    few, many = _vocabulary_parts(weight)
    if few is not None:
        # First the few, so that the sum is rounded once.
        _matmul(grad_logits[:, few], weight[few], out, add=False)
    _matmul(grad_logits[:, many], weight[many], out, add=few is not None)


def _by_weight(grad_logits: Tensor, hidden: Tensor, out: Tensor, add: bool) -> None:
    """out [V, H] (+)= grad_logits^T [V, R] hidden [R, H]."""
    transposed = grad_logits.t()
    few, many = _vocabulary_parts(transposed)
    if few is not None:
        _few_columns(out[few], transposed[few], hidden, None, add)
    _matmul(transposed[many], hidden, out[many], add)


def _matmul(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """out (+)= a @ b; a float32 `out` gets the matmul's float32 results without rounding."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _matmul(a.to(out.dtype), b.to(out.dtype), out, add)
