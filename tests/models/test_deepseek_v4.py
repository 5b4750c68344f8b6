import pytest
import torch
from transformers import AutoModelForCausalLM

import opslot
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config


@pytest.mark.parametrize("more", [7, -8])
@pytest.mark.parametrize("when", ["before", "after"])
def test_resized_vocabulary(more, when, tmp_path):
    """Transformers leaves the tables of experts by token id at their size."""
    model = random_model(tiny_config("deepseek_v4"))
    size = model.config.vocab_size
    if when == "before":
        model.resize_token_embeddings(size + more)
    opslot.apply(model, "eager")
    if when == "after":
        model.resize_token_embeddings(size + more)
    ids = torch.arange(size + more)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    opslot.apply(loaded, "eager")
    torch.testing.assert_close(loaded.train()(input_ids=ids, labels=ids, use_cache=False).loss, loss)
