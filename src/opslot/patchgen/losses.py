"""The statements of upstream's heads that a fused loss stands for, and what replaces them."""

from __future__ import annotations

from opslot._base.errors import PatchError
from opslot.patchgen.edits import Slot

# The two ways upstream writes the call; `$*rest` is `**kwargs` where the head passes them on.
_CAUSAL_CALLS = (
    "self.loss_function(logits=logits, labels=labels, vocab_size=$vocab_size, $*rest)",
    "self.loss_function(logits, labels, $vocab_size, $*rest)",
)

_CAUSAL_REGION = """\
logits = self.$head($head_input)
loss = None
if labels is not None:
    loss = {call}"""

_CAUSAL_TEMPLATE = """\
loss_kernel = self.{attribute} if labels is not None else None
if loss_kernel is not None and loss_kernel.can_serve(self, self.$head):
    logits = None
    loss = loss_kernel($head_input, self.$head.weight, labels, $*rest)
else:
    $match"""

_CLASSIFICATION_REGION = """\
loss = None
if labels is not None:
    loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)"""

# The kernel computes what upstream's loss does for one label per row; regression and multi-label stay upstream's.
_CLASSIFICATION_TEMPLATE = """\
loss_kernel = self.{attribute} if labels is not None else None
if (
    loss_kernel is not None
    and self.num_labels > 1
    and labels.dtype in (torch.int32, torch.int64)
    and self.config.problem_type in (None, "single_label_classification")
    and loss_kernel.can_serve(self, self.score)
):
    pooled_hidden_states = hidden_states[
        torch.arange(batch_size, device=hidden_states.device), last_non_pad_token
    ]
    loss = loss_kernel(pooled_hidden_states, self.score.weight, labels)
else:
    $match"""


def loss_form(slot: Slot) -> tuple[tuple[str, ...], str]:
    """Patterns and template for the loss of `slot.variant`."""
    if slot.variant == "causal":
        patterns = tuple(_CAUSAL_REGION.format(call=call) for call in _CAUSAL_CALLS)
        return patterns, _CAUSAL_TEMPLATE.format(attribute=slot.attribute)
    if slot.variant == "sequence_classification":
        return (_CLASSIFICATION_REGION,), _CLASSIFICATION_TEMPLATE.format(attribute=slot.attribute)
    raise PatchError(
        f"slot_loss knows the variants causal and sequence_classification, not {slot.variant!r};"
        " use PatchConfig.replace with a slot for another form"
    )
