"""`chunk_loss`: the fused loss in plain torch, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops.cross_entropy_loss.chunked import Backend, Shaping, loss_dtype
from opslot.ops.cross_entropy_loss.fused import make_kernels

# Measured on 2 cores of an EPYC with H=256: 8 MiB is fastest for V=4096 and 8192 (4 and 32 MiB are 3 to 6% slower).
# With fewer than 128 rows the weight and its gradient are read too often.
_CPU_LOGITS_BYTES = 8 << 20
_CPU_MIN_ROWS = 128
# Elsewhere: few enough chunks that the matmuls stay large; counts all copies of a logit alive at once.
_DEVICE_BYTES = 1 << 30
_DEVICE_MIN_ROWS = 256


def rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows whose logits fit the budget of the device."""
    logit = loss_dtype(dtype).itemsize
    if device.type == "cpu":
        return max(_CPU_MIN_ROWS, _CPU_LOGITS_BYTES // (vocab * logit))
    # The logits, their fp32 copy, the probabilities and the gradient.
    return max(_DEVICE_MIN_ROWS, _DEVICE_BYTES // (vocab * 2 * (dtype.itemsize + logit)) // 256 * 256)


def loss_step(
    logits: Tensor, labels: Tensor, losses: Tensor, factor: Tensor | None, shaping: Shaping, grad: bool
) -> Tensor:
    """See `Backend.loss_step`."""
    ignored, index = _columns(labels, logits.shape[1], shaping)
    x, slope = _shape(logits, shaping)
    mean = x.mean(1) if shaping.smoothing else None
    others, own, rest, nll, label_x = _softmax(x, index)
    loss = nll.squeeze(1)
    if mean is not None:
        loss = loss + shaping.smoothing * (label_x.squeeze(1) - mean)
    losses.copy_(loss.masked_fill_(ignored, 0.0))
    if not grad:
        return logits
    # Compute p - 1 as minus the sum of the others, without cancellation for p near 1; with smoothing also for p near 0.
    sure = shaping.smoothing - rest
    of_label = torch.where(own > rest, sure, own - (1.0 - shaping.smoothing)) if shaping.smoothing else sure
    gradient = others.scatter_(1, index, of_label)
    if shaping.smoothing:
        gradient.sub_(shaping.smoothing / x.shape[1])
    return _finish(gradient, slope, ignored, factor, logits.dtype)


def _finite(log_p: Tensor) -> Tensor:
    """`log_p`, in place, without the -inf of logits of -inf, of which p log p is 0."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def token_step(logits: Tensor, labels: Tensor, log_probs: Tensor, entropy: Tensor, shaping: Shaping) -> None:
    """See `Backend.token_step`."""
    ignored, index, log_p, probs, _, _ = _log_softmax(logits, labels, shaping)
    log_probs.copy_(log_p.gather(1, index).squeeze(1).masked_fill_(ignored, 0.0))
    entropy.copy_(probs.mul_(_finite(log_p)).sum(1).neg_().masked_fill_(ignored, 0.0))


def token_grad_step(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    shaping: Shaping,
) -> Tensor:
    """See `Backend.token_grad_step`: a (onehot - p) - b p (log p + entropy) for incoming gradients a and b."""
    ignored, index, log_p, probs, rest, slope = _log_softmax(logits, labels, shaping)
    a, b = grad_log_probs.unsqueeze(1), grad_entropy.unsqueeze(1)
    by_entropy = _finite(log_p).add_(entropy.unsqueeze(1)).mul_(probs).mul_(-b)
    own = by_entropy.gather(1, index) + a * rest
    grad = by_entropy.addcmul_(probs, a, value=-1.0).scatter_(1, index, own)
    if shaping.scale != 1.0:
        grad.mul_(shaping.scale)
    return _finish(grad, slope, ignored, None, logits.dtype)


def rescale(grad: Tensor, factor: Tensor) -> None:
    """See `Backend.rescale`."""
    if factor.device.type != "cpu" or factor.item() != 1.0:
        grad.mul_(factor)


def _columns(labels: Tensor, vocab: int, shaping: Shaping) -> tuple[Tensor, Tensor]:
    """(ignored [R], each label's column of the logits [R, 1], 0 where ignored).

    Raises:
        KernelError: a label on a CPU is out of range; on a GPU torch's device-side assertion fails instead.
    """
    ignored = labels == shaping.ignore_index
    index = labels.masked_fill(ignored, 0)
    if labels.device.type == "cpu":
        outside = index[(index < 0) | (index >= vocab)]
        if outside.numel():
            reject(
                "cross_entropy_loss_implementation='chunk_loss'",
                "labels",
                f"label {outside[0].item()} is out of bounds: the vocabulary has {vocab}, ignored is "
                f"{shaping.ignore_index}",
                "fix the labels, or the tokenizer that made them for a larger vocabulary",
            )
    return ignored, index.unsqueeze(1)


def _shape(logits: Tensor, shaping: Shaping) -> tuple[Tensor, Tensor | None]:
    """(x in float32 or float64, dx/dz without the scale or None); may overwrite `logits`."""
    x = logits.to(loss_dtype(logits.dtype))
    if shaping.scale != 1.0:
        x.mul_(shaping.scale)
    if not shaping.cap:
        return x, None
    tanh = torch.tanh(x / shaping.cap)
    return tanh * shaping.cap, 1.0 - tanh * tanh


def _softmax(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Overwrites `x`. Not torch.softmax: on CPU its exponential has an error of up to 20 ULP.

    Returns:
        The softmax with 0 at the label [R, V], and [R, 1] each, the label's probability, the sum of the others', the
        negative log-likelihood and the label's x.
    """
    label_logit = x.gather(1, index)
    highest = x.amax(1, keepdim=True)
    x.sub_(highest).exp_()
    own = x.gather(1, index)
    rest = x.scatter_(1, index, 0.0).sum(1, keepdim=True)
    total = own + rest
    nll = torch.where(own > rest, torch.log1p(rest / own), total.log() + (highest - label_logit))
    return x.div_(total), own / total, rest / total, nll, label_logit


def _log_softmax(
    logits: Tensor, labels: Tensor, shaping: Shaping
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(ignored [R], label index [R, 1], log p [R, V], p [R, V], 1 - p of the label [R, 1], slope of `_shape`)."""
    ignored, index = _columns(labels, logits.shape[1], shaping)
    x, slope = _shape(logits, shaping)
    log_p = x.log_softmax(1)
    probs = log_p.exp()
    own = probs.gather(1, index)
    others = probs.scatter(1, index, 0.0).sum(1, keepdim=True)
    rest = torch.where(own > 0.5, others, 1.0 - own)
    log_p.scatter_(1, index, torch.where(own > 0.5, torch.log1p(-others), log_p.gather(1, index)))
    return ignored, index, log_p, probs, rest, slope


def _finish(grad: Tensor, slope: Tensor | None, ignored: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if slope is not None:
        grad.mul_(slope)
    if factor is not None:
        grad.mul_(factor)
    return grad.masked_fill_(ignored.unsqueeze(1), 0.0).to(dtype)


causal, sequence_classification, token_log_probs = make_kernels(
    Backend("chunk_loss", loss_step, token_step, token_grad_step, rescale, rows, factor_last=True)
)
