"""The signatures of the variants of cross_entropy_loss.

Shapes: `hidden_states` [..., H] with any strides, `weight` [V, H] and `bias` [V] are the head's, `labels` [...]
are integers in [0, V) or `ignore_index`. Logits are scaled and capped in the dtype of the inputs, as in Transformers;
softmax and loss in float32 (float64 for float64 inputs). Label smoothing is Szegedy et al. 2016, section 7: targets
(1 - e) onehot + e / V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from opslot._base.labels import shifted_labels


class LossInputs(NamedTuple):
    """What all variants take.

    Attributes:
        labels: of what each hidden state predicts; shifted already.
        softcap: logits become softcap * tanh(logits / softcap), after `logit_scale`.
        logit_scale: factor of the logits.
        head: the module of `weight` and `bias`, where the caller has one.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int
    softcap: float | None = None
    logit_scale: float = 1.0
    head: Any = None


# (inputs, num_items_in_batch, label_smoothing) -> a scalar
Loss = Callable[[LossInputs, Tensor | int | None, float], Tensor]
TokenLogProbs = Callable[[LossInputs], tuple[Tensor, Tensor]]


def loss_variants(loss: Loss, module: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`loss` with the signatures of causal and sequence_classification, for names of `module`."""

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
    ) -> Tensor:
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
                module of `weight` and `bias`: kernels marked by `set_adds_adapters` add its LoRA adapters.

        Returns:
            A scalar, float32 or float64.
        """
        if shift_labels is None:
            shift_labels = shifted_labels(labels, ignore_index)
        head = kwargs.get("head")
        inputs = LossInputs(hidden_states, weight, bias, shift_labels, ignore_index, softcap, logit_scale, head)
        return loss(inputs, num_items_in_batch, label_smoothing)

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
    ) -> Tensor:
        """Loss of a classifier: `hidden_states` [..., H] predict `labels` [...] in place.

        Returns:
            A scalar, float32 or float64.
        """
        inputs = LossInputs(hidden_states, weight, bias, labels, ignore_index, head=kwargs.get("head"))
        return loss(inputs, num_items_in_batch, label_smoothing)

    return _named(causal, module), _named(sequence_classification, module)


def token_log_probs_variant(run: TokenLogProbs, module: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run` with the signature of token_log_probs, for a name of `module`."""

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
    ) -> tuple[Tensor, Tensor]:
        """Per-token log-probabilities and entropies, as policy gradients need them; `logit_scale` is 1 / temperature.

        Returns:
            (log_probs, entropy), both shaped like `labels`, float32 or float64: at position t the log-probability of
            `labels[..., t + 1]` (`shift_labels[..., t]`) and the entropy in nats of its distribution; 0 where the label
            is ignored.
        """
        if shift_labels is None:
            shift_labels = shifted_labels(labels, ignore_index)
        head = kwargs.get("head")
        return run(LossInputs(hidden_states, weight, bias, shift_labels, ignore_index, softcap, logit_scale, head))

    return _named(token_log_probs, module)


def _named(function: Any, module: str) -> Any:
    """The function as one of `module`, which prints and is pickled by name."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function
