"""The arguments of the variants of cross_entropy_loss.

Shapes: `hidden_states` [..., H] with any strides, `weight` [V, H] and `bias` [V] are the head's, `labels` [...]
are integers in [0, V) or `ignore_index`. Logits are scaled and capped in the dtype of the inputs, as in Transformers;
softmax and loss in float32 (float64 for float64 inputs). Label smoothing is Szegedy et al. 2016, section 7: targets
(1 - e) onehot + e / V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from opslot._base.labels import shifted_labels


class LossInputs(NamedTuple):
    """What the variants take.

    Attributes:
        labels: of what each hidden state predicts; shifted already.
        softcap: logits become softcap * tanh(logits / softcap), after `logit_scale`.
        logit_scale: factor of the logits.
        head: the module of `weight` and `bias`, where the caller has one.
        num_items_in_batch, label_smoothing: of a loss.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int
    softcap: float | None = None
    logit_scale: float = 1.0
    head: Any = None
    num_items_in_batch: Tensor | int | None = None
    label_smoothing: float = 0.0


def causal(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **kwargs: Any,
) -> LossInputs:
    """Loss of a causal language model: position t predicts `labels[..., t + 1]`.

    Args:
        hidden_states: [B, S, H], or [N, H] beside `shift_labels`.
        labels: [B, S], not shifted; the last position of a sequence predicts nothing.
        num_items_in_batch: divisor of the summed loss, e.g. the labels of all accumulation steps; None divides by
            the number of labels that are not ignored (NaN if there are none).
        shift_labels: labels that are shifted already, used as they are.
        bias: [V], the head's.
        softcap, logit_scale: see `LossInputs`.
        kwargs: other arguments of a model's forward (position_ids, cu_seq_lens_q, ...), ignored, and `head`, the
            module of `weight` and `bias`: kernels with an attribute `adds_adapters` add its LoRA adapters.
    """
    if shift_labels is None:
        shift_labels = shifted_labels(labels, ignore_index)
    inputs = hidden_states, weight, bias, shift_labels, ignore_index
    return LossInputs(*inputs, softcap, logit_scale, kwargs.get("head"), num_items_in_batch, label_smoothing)


def sequence_classification(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> LossInputs:
    """Loss of a classifier: `hidden_states` [..., H] predict `labels` [...] in place."""
    inputs = hidden_states, weight, bias, labels, ignore_index
    return LossInputs(*inputs, None, 1.0, kwargs.get("head"), num_items_in_batch, label_smoothing)


def token_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **kwargs: Any,
) -> LossInputs:
    """Per-token log-probabilities and entropies, as policy gradients need them; `logit_scale` is 1 / temperature.

    Kernels return (log_probs, entropy), both shaped like `labels`, float32 or float64: at position t the
    log-probability of `labels[..., t + 1]` (`shift_labels[..., t]`) and the entropy in nats of its distribution; 0
    where the label is ignored.
    """
    if shift_labels is None:
        shift_labels = shifted_labels(labels, ignore_index)
    head = kwargs.get("head")
    return LossInputs(hidden_states, weight, bias, shift_labels, ignore_index, softcap, logit_scale, head)


# Their kernels return a scalar, float32 or float64.
LOSSES = (causal, sequence_classification)
