from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from opslot._base.errors import ParallelError
from opslot.models._own_loss import averages_its_own_labels, call_with_share_of_loss, keeps_labels_in_place
from opslot.models._sequence import _require_positions
from opslot.verify.tiny import tiny_config


class OwnForCausalLM(nn.Module):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = torch.randn(*input_ids.shape, 8)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BartForCausalLM", True),
        ("BertForMaskedLM", True),
        ("DistilBertForMaskedLM", True),
        ("GPT2LMHeadModel", False),
        ("MarianMTModel", True),
        ("SeamlessM4TForTextToText", True),
        ("EuroBertForMaskedLM", False),
        ("LlamaForCausalLM", False),
        ("Qwen3VLForConditionalGeneration", False),
    ],
)
def test_losses_of_transformers(name, expected):
    cls = getattr(transformers, name)
    assert averages_its_own_labels(cls.__new__(cls)) is expected


def test_generated_class_passes_the_number_of_labels_on():
    import opslot.generated.llama as generated

    cls = generated.LlamaForCausalLM
    assert not averages_its_own_labels(cls.__new__(cls))


def test_losses_of_micro_batches_add_up():
    """The loss of a call is its share in the mean over the labels of the step; 0 for a call without labels."""
    torch.manual_seed(0)
    model = OwnForCausalLM()
    parts = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-100, 5, -100, -100]]), torch.full((1, 4), -100)]
    calls = [{"input_ids": labels.clamp(min=0), "labels": labels} for labels in parts]
    outputs = [call_with_share_of_loss(model, call, num_items_in_batch=4) for call in calls]
    logits = torch.cat([output.logits[:, :-1] for output in outputs]).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, torch.cat(parts)[:, 1:].flatten())
    torch.testing.assert_close(sum(output.loss for output in outputs), expected)
    assert outputs[-1].loss == 0


def test_sharded_sequences_raise():
    labels = torch.zeros(1, 4, dtype=torch.long)
    call = {"position_ids": labels, "labels": labels, "shift_labels": labels, "num_items_in_batch": 4}
    with pytest.raises(ParallelError, match="computes the loss from its own labels"):
        _require_positions(OwnForCausalLM(), (), call)
    _require_positions(OwnForCausalLM(), (), {"position_ids": labels})


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [
        ("EuroBertForMaskedLM", "eurobert", True),
        ("LlamaForTokenClassification", "llama", True),
        ("LlamaForCausalLM", "llama", False),
        ("LlamaModel", "llama", False),
    ],
)
def test_losses_with_labels_in_place(name, arch, expected):
    with torch.device("meta"):
        model = getattr(transformers, name)(tiny_config(arch))
    assert keeps_labels_in_place(model) is expected
