"""Which models keep packed documents apart, with slots and (OPSLOT_BACKEND=hf) without."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

import opslot
from opslot.models._sequence.packing import packing_problem
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("llama", None),
        ("bloom", "BloomAttention calls update, which may mix tokens"),
        ("mamba", "MambaMixer carries state from one document to the next"),
        ("rwkv", "RwkvSelfAttention has a ZeroPad2d, which may mix tokens"),
    ],
)
def test_classes_of_transformers(arch, reason):
    assert packing_problem(random_model(tiny_config(arch))) == reason


@pytest.mark.parametrize("arch", ["bloom", "mamba"])
def test_slots_keep_documents_apart(arch):
    model = random_model(tiny_config(arch))
    opslot.apply(model, "eager")
    assert packing_problem(model) is None


class Unknown(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(8, 8)
        self.post_init()


def test_code_that_discovery_does_not_read():
    with torch.device("meta"):
        model = Unknown(LlamaConfig())
    assert packing_problem(model) == (
        "what Unknown does with documents is unknown, since opslot finds no slots in its code"
    )
