"""Slots of losses: text before and after."""

from __future__ import annotations

import re
import textwrap

import pytest

from opslot.patchgen import PatchError, Slot
from tests.patchgen.text import lines

HEAD = """
    class Head(Model):
        def forward(self, x, labels=None, **kwargs):
            hidden_states = self.model(x)
            {logits}

            loss = None
            if labels is not None:
                loss = {call}

            return loss, logits
"""
ARGUMENTS = "self.lm_head.weight, labels, bias=getattr(self.lm_head, 'bias', None), head=self.lm_head"
OF_FORWARD = (
    "**{name: kwargs[name] for name in ('num_items_in_batch', 'ignore_index', 'shift_labels') if name in kwargs}"
)
KEYWORDS = "logits=logits, labels=labels, vocab_size=self.config.vocab_size"


@pytest.mark.parametrize(
    ("logits", "head_input"),
    [
        ("logits = self.lm_head(hidden_states[:, slice_indices, :])", "hidden_states[:, slice_indices, :]"),
        ("logits = self.lm_head(hidden_states)", "hidden_states"),
    ],
)
@pytest.mark.parametrize(
    ("call", "rest"),
    [
        (f"self.loss_function({KEYWORDS}, **kwargs)", f", {OF_FORWARD}"),
        ("self.loss_function(logits, labels, self.vocab_size, **kwargs)", f", {OF_FORWARD}"),
        ("self.loss_function(logits, labels, self.vocab_size)", ""),
    ],
)
def test_slot_loss_causal(rewrite, patch, logits, head_input, call, rest):
    patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "causal"))
    text = rewrite(HEAD.format(logits=logits, call=call), patch)
    expected = f"""
        hidden_states = self.model(x)
        # --- Patch.1 ---
        loss_kernel = self._opslot_cross_entropy_loss if labels is not None else None
        if loss_kernel is not None and loss_kernel.can_serve(self, self.lm_head):
            logits = None
            loss = loss_kernel({head_input}, {ARGUMENTS}{rest})
        else:
            {logits}

            loss = None
            if labels is not None:
                loss = {call}
        # --- Patch.1 ---

        return loss, logits
    """
    assert text.split("**kwargs):\n", 1)[1] == textwrap.indent(lines(expected), " " * 8)


def test_slot_loss_passes_the_number_of_labels_on(rewrite, patch):
    patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "causal"))
    call = "self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)"
    text = rewrite(HEAD.format(logits="logits = self.lm_head(hidden_states)", call=call), patch)
    given = "**{name: kwargs[name] for name in ('num_items_in_batch', 'shift_labels') if name in kwargs}"
    assert f"loss_kernel(hidden_states, {ARGUMENTS}, {given})" in text
    assert f"{call.removesuffix(')')}, {given})" in text


CALL = "self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)"


@pytest.mark.parametrize(
    ("logits", "arguments"),
    [
        (["logits = self.lm_head(x) * self.scale"], "logit_scale=self.scale"),
        (
            ["logits = self.lm_head(x)", "logits = logits / self.config.scaling"],
            "logit_scale=1.0 / self.config.scaling",
        ),
        (["logits = self.lm_head(x)", "logits = logits.float()"], ""),
        (
            ["logits = self.lm_head(x)", "cap = self.config.cap", "logits = torch.tanh(logits / cap) * cap"],
            "softcap=cap",
        ),
        (
            [
                "logits = self.lm_head(x)",
                "logits *= self.config.scale",
                "if (cap := self.config.get_text_config().cap) is not None:",
                "    logits = logits / cap",
                "    logits = torch.tanh(logits)",
                "    logits = logits * cap",
            ],
            "softcap=self.config.get_text_config().cap, logit_scale=self.config.scale",
        ),
        (
            ["logits = self.lm_head(x)", "if self.scale is not None:", "    logits = logits * self.scale"],
            "logit_scale=self.scale if self.scale is not None else 1.0",
        ),
    ],
)
def test_slot_loss_with_changed_logits(rewrite, patch, logits, arguments):
    patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "causal"))
    text = rewrite(HEAD.format(logits="\n            ".join(logits), call=CALL), patch)
    (call,) = [line.strip() for line in text.splitlines() if "loss_kernel(" in line]
    middle = f", {arguments}" if arguments else ""
    assert call == f"loss = loss_kernel(x, {ARGUMENTS}{middle}, {OF_FORWARD})"


OWN_LOSS = """
    class Head(Model):
        def forward(self, x, attention_mask=None, labels=None, **kwargs):
            logits = self.lm_head(x)
            loss = None
            if labels is not None:
                logits = logits.float()
                shift_logits = logits[..., :-1, :]
                shift_labels = labels[..., 1:]
                if attention_mask is not None:
                    mask = attention_mask[:, -shift_logits.shape[1] :].to(logits.device)
                    shift_logits = shift_logits[mask.to(logits.device) != 0].contiguous()
                    shift_labels = shift_labels[mask.to(shift_labels.device) != 0].contiguous()
                loss_fct = nn.CrossEntropyLoss()
                flat_logits = shift_logits.view(-1, self.config.vocab_size)
                loss = loss_fct(flat_logits, shift_labels.view(-1))
            return loss, logits
"""


def test_slot_loss_selects_the_same_rows_of_the_hidden_states(rewrite, patch):
    patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "causal"))
    text = rewrite(OWN_LOSS, patch)
    fused = text.split("can_serve(self, self.lm_head):\n")[1].split("        else:\n")[0]
    assert textwrap.dedent(fused) == lines("""
        logits = None
        head_input = x
        shift_head_input = head_input[..., :-1, :]
        shift_labels = labels[..., 1:]
        if attention_mask is not None:
            mask = attention_mask[:, -shift_head_input.shape[1]:].to(head_input.device)
            shift_head_input = shift_head_input[mask.to(head_input.device) != 0]
            shift_labels = shift_labels[mask.to(shift_labels.device) != 0].contiguous()
        flat_head_input = shift_head_input
        loss = loss_kernel(flat_head_input, self.lm_head.weight, None, bias=getattr(self.lm_head, 'bias', None), \
head=self.lm_head, shift_labels=shift_labels.view(-1))
    """)


@pytest.mark.parametrize(
    ("line", "other", "reason"),
    [
        ("logits = self.lm_head(x)", "logits = self.final(self.lm_head(x), x)", "computes its logits as"),
        (
            "logits = self.lm_head(x)",
            "logits = self.lm_head(x) * self.mask(x)",
            "by `self.mask(x)`, which may be a tensor",
        ),
        ("logits = self.lm_head(x)", "logits = self.lm_head(x) * attention_mask", "which may be a tensor"),
        ("logits = self.lm_head(x)", "logits = self.lm_head(x) + self.bias", "which is not a buffer with one row"),
        ("logits = self.lm_head(x)", "logits = torch.tanh(self.lm_head(x))", "changes the logits by tanh"),
        ("logits = self.lm_head(x)", "logits = torch.tanh(self.lm_head(x) / 30) * 20", "changes the logits"),
        ("logits = self.lm_head(x)", "logits = torch.tanh(self.lm_head(x) / 30) * 30 * 2", "after their softcap"),
        ("[..., :-1, :]", "[..., :-1, :100]", "selects logits in its loss"),
        ("[..., :-1, :]", "[..., :-1]", "selects logits in its loss"),
        ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(reduction='sum')", "calls its loss as"),
        ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(weight=self.weights)", "calls its loss as"),
        ("return loss, logits", "return loss, logits.argmax(-1)", "uses the logits after the loss"),
        ("flat_logits, shift", "flat_logits.exp(), shift", "computes the loss of `flat_logits.exp()`"),
        ("if attention_mask is not None:", "if shift_logits.sum() > 0:", "uses `shift_logits` for more"),
    ],
)
def test_slot_loss_of_other_computations_raises(rewrite, patch, line, other, reason):
    assert line in OWN_LOSS
    patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "causal"))
    with pytest.raises(PatchError, match=re.escape(reason)):
        rewrite(OWN_LOSS.replace(line, other, 1), patch)


def test_slot_loss_of_an_unknown_form_raises(patch):
    with pytest.raises(PatchError, match=r"found: 'regression'\n  hint: use PatchConfig\.replace"):
        patch.slot_loss("Head.forward", Slot("cross_entropy_loss", "regression"))
