from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from opslot._base.errors import ConfigError, ParallelError
from opslot.models._own_loss import averages_its_own_labels
from opslot.models._sequence import _require_positions
from opslot.trainer.prepare import _require_shared_mean


class OwnForCausalLM(nn.Module):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = torch.randn(*input_ids.shape, 8)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BartForCausalLM", True),
        ("BertForMaskedLM", True),
        ("DistilBertForMaskedLM", True),
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


@pytest.mark.parametrize(("batch", "world", "raises"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_several_micro_batches_or_ranks_raise(batch, world, raises):
    train = SimpleNamespace(global_batch_size=batch, micro_batch_size=1)
    config = SimpleNamespace(task="sft", train=train)
    state = SimpleNamespace(world_size=world)
    if raises:
        with pytest.raises(ConfigError, match=r"OwnForCausalLM .* ignores num_items_in_batch"):
            _require_shared_mean(OwnForCausalLM(), config, state)
        config.task = "classification"
    _require_shared_mean(OwnForCausalLM(), config, state)


def test_sharded_sequences_raise():
    labels = torch.zeros(1, 4, dtype=torch.long)
    call = {"position_ids": labels, "labels": labels, "shift_labels": labels, "num_items_in_batch": 4}
    with pytest.raises(ParallelError, match="computes the loss from its own labels"):
        _require_positions(OwnForCausalLM(), (), call)
    _require_positions(OwnForCausalLM(), (), {"position_ids": labels})
