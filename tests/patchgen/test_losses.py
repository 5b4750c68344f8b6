import ast
import textwrap

import pytest

from opslot.patchgen.fused_loss import UnknownLossError
from opslot.patchgen.losses import loss_region

FORWARD = """
def forward(self, input_ids=None, labels=None, **kwargs):
    hidden_states = self.model(input_ids, **kwargs)
    logits = self.lm_head(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size{rest})
    return Output(loss=loss, logits=logits)
"""


def region_of(rest):
    (forward,) = ast.parse(textwrap.dedent(FORWARD.format(rest=rest))).body
    return loss_region(forward)


def computed(region, text, **kwargs):
    """What the loss is called with in statements of the region."""
    calls = []

    def called(*args, **options):
        calls.append(options)

    class Model:
        class config:
            vocab_size = 8

        class lm_head:
            weight, bias = "weight", None

            def __new__(cls, hidden_states):
                return "logits"

        loss_function = staticmethod(called)

    names = {"self": Model, "hidden_states": "hidden", "labels": "labels", "loss_kernel": called, "kwargs": kwargs}
    exec(text, names)
    (call,) = calls
    return call


def test_number_of_labels_reaches_losses_that_do_not_pass_it_on():
    region = region_of("")
    for text in (region.original, region.fused):
        given = computed(region, text, num_items_in_batch=7, shift_labels="shifted", use_cache=False)
        assert (given["num_items_in_batch"], given["shift_labels"]) == (7, "shifted")
        assert "use_cache" not in given
        assert "num_items_in_batch" not in computed(region, text)


def test_losses_that_pass_everything_on_keep_their_statements():
    region = region_of(", **kwargs")
    assert region.original == ""
    assert computed(region, region.fused, num_items_in_batch=7)["num_items_in_batch"] == 7


@pytest.mark.parametrize(
    "conditional",
    ["None if labels is None else {loss}", "{loss} if labels is not None else None"],
)
def test_loss_in_a_conditional_expression(conditional):
    block = "loss = None\n    if labels is not None:\n        loss = {loss}"
    loss = "self.loss_function(logits, labels, self.config.vocab_size, **kwargs)"
    text = FORWARD.split("    loss = None")[0] + "    {}\n    return Output(loss=loss, logits=logits)\n"
    regions = []
    for statements in (block, f"loss = {conditional}"):
        (forward,) = ast.parse(text.format(statements.format(loss=loss))).body
        regions.append(loss_region(forward))
    assert regions[0].fused == regions[1].fused
    assert regions[1].stop == regions[0].stop - 1


def test_loss_with_another_default_is_reported():
    loss = "self.loss_function(logits, labels, self.config.vocab_size, **kwargs)"
    text = FORWARD.split("    loss = None")[0] + f"    loss = 0.0 if labels is None else {loss}\n    return loss\n"
    (forward,) = ast.parse(text).body
    with pytest.raises(UnknownLossError, match="another way than in `if labels is not None:`"):
        loss_region(forward)
