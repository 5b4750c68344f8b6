"""The losses of Transformers' generic classifiers, and what computes them with a kernel."""

from __future__ import annotations

from opslot.patchgen.edits import Slot

# Transformers' generic classifiers. Their logits are few, so only the loss is replaced. Regression and multi-label
# classification keep Transformers' implementation.
_SEQUENCE_PATTERN = """\
loss = None
if labels is not None:
    loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)"""

_SEQUENCE_TEMPLATE = """\
loss_kernel = self.{attribute} if labels is not None else None
if (
    loss_kernel is not None
    and self.num_labels > 1
    and labels.dtype in (torch.int32, torch.int64)
    and self.config.problem_type in (None, "single_label_classification")
    and loss_kernel.can_serve(self, self.score)
):
    self.config.problem_type = "single_label_classification"
    pooled_hidden_states = hidden_states[
        torch.arange(batch_size, device=hidden_states.device), last_non_pad_token
    ]
    bias = getattr(self.score, "bias", None)
    loss = loss_kernel(pooled_hidden_states, self.score.weight, labels, bias=bias, head=self.score)
else:
    $match"""

_TOKEN_PATTERN = """\
loss = None
if labels is not None:
    loss = self.loss_function(logits, labels, self.config)"""

_TOKEN_TEMPLATE = """\
loss_kernel = self.{attribute} if labels is not None else None
if loss_kernel is not None and loss_kernel.can_serve(self, self.score):
    bias = getattr(self.score, "bias", None)
    loss = loss_kernel(sequence_output, self.score.weight, labels, bias=bias, head=self.score)
else:
    $match"""


def classifier_form(target: str, slot: Slot) -> tuple[str, str]:
    """Pattern and template for the loss of a classifier, which classifies what its class is named after."""
    of_tokens = target.split(".")[0].endswith("ForTokenClassification")
    pattern, template = (_TOKEN_PATTERN, _TOKEN_TEMPLATE) if of_tokens else (_SEQUENCE_PATTERN, _SEQUENCE_TEMPLATE)
    return pattern, template.format(attribute=slot.attribute)
