"""Packed documents in code that depends on positions elsewhere than in masks and rotary embeddings."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import opslot
from opslot.models.discovery import discover
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release
from opslot.slots.protocol import keeps_sequences
from opslot.verify import check_architecture
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_llama4_scales_queries_by_positions_in_documents(ops):
    config = tiny_config("llama4_text")
    assert config.floor_scale == 4
    assert 0 in config.no_rope_layers
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, ops)
    ids = torch.randint(3, 48, (1, 17))
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [original(document, use_cache=False).logits for document in ids.split([9, 8], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_llama4_counts_padding_on_the_left_as_transformers_does():
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(tiny_config("llama4_text"), attn_implementation="eager").eval()
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    ids, mask = torch.randint(3, 48, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, original(**inputs).logits)
        options = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
        for cache in (True, False):
            options["use_cache"] = cache
            ours, theirs = (m.generate(ids, attention_mask=mask, **options).logits for m in (model, original))
            assert torch.equal(torch.stack(ours), torch.stack(theirs))
    for mode in (False, True):
        ours, theirs = (m.train(mode)(**inputs, use_cache=False).logits for m in (model, original))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("arch", "attribute", "reason"),
    [
        (
            "inkling",
            "keeps_sequences",
            "InklingAttention counts the positions of a whole row, not those of each document",
        ),
        (
            "bart",
            "masks_without_positions",
            "its masks are made without position_ids, so packed documents would attend to each other",
        ),
    ],
)
def test_models_whose_documents_would_mix_state_the_reason(arch, attribute, reason):
    text = generate(discover(arch).patch, installed_release())
    assert f"_opslot_{attribute} = '{reason}'" in text


def test_default_positions_do_not_prevent_packing():
    """MiniMax-M3's attention calls arange only where it gets no position_ids."""
    text = generate(discover("minimax_m3_vl").patch, installed_release())
    assert "counts the positions" not in text


@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_positions_separate_documents_where_a_model_makes_a_padding_mask(ops):
    original = random_model(tiny_config("biogpt")).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, ops)
    assert keeps_sequences(model) is None
    ids = torch.arange(3, 37).reshape(2, 17)
    positions = torch.cat([torch.arange(9), torch.arange(8)]).expand(2, -1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [original(document, use_cache=False).logits for document in ids.split([9, 8], 1)]
        padding = torch.ones_like(ids).index_fill(1, torch.arange(4), 0)
        found, wanted = (
            own(input_ids=ids, attention_mask=padding, use_cache=False).logits for own in (model, original)
        )
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, 4:], wanted[:, 4:], rtol=1e-4, atol=1e-5)


def test_kernels_get_the_documents_where_a_model_makes_a_padding_mask():
    assert check_architecture("biogpt", checks=["packed"])["packed"].result == "passed"
