"""Llama 4 with images, also on Transformers 5.24, where Transformers' own forward raises."""

import torch
import torch.nn.functional as F

import opslot
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config


def test_model_with_images_trains_on_text():
    config = tiny_config("llama4")
    model, ids = random_model(config), random_ids(config)
    opslot.apply(model, "eager")
    outputs = model(input_ids=ids, labels=ids)
    logits = model.language_model(input_ids=ids).logits
    assert torch.equal(outputs.logits, logits)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    outputs.loss.backward()
    assert model.language_model.get_input_embeddings().weight.grad.any()
