"""Rotary embeddings whose frequencies depend on lengths: documents have those of their own lengths."""

import copy

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import opslot
from opslot.ops.rotary_pos_emb.by_length import last_positions, per_document
from opslot.verify import check_architecture
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def config_of(arch, rope, limit=10):
    given = {**tiny_config(arch).to_dict(), "max_position_embeddings": limit}
    given["original_max_position_embeddings"] = limit
    given["rope_parameters"] = {"rope_theta": 10000.0, "original_max_position_embeddings": limit, **rope}
    return AutoConfig.for_model(**given)


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize(("arch", "rope"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_packed_documents_equal_the_documents_alone(arch, rope):
    """Of 12 and 8 tokens, where 10 is the longest short document."""
    found = check_architecture(config_of(arch, rope), checks=["eager", "packed"])
    assert found.ok, str(found)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("lengths", [(4, 13, 7, 17), (3, 3), (11,), (1, 1, 12)])
def test_frequencies_are_those_of_each_document(rope, lengths):
    config, x = config_of("llama", rope), torch.zeros(1, 1, 32)
    packed = per_document(LlamaRotaryEmbedding.forward)(LlamaRotaryEmbedding(config), x, positions_of(*lengths))
    alone = [LlamaRotaryEmbedding(config)(x, positions_of(n)) for n in lengths]
    for i, part in enumerate(packed):
        assert torch.equal(part, torch.cat([each[i] for each in alone], 1))


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_one_document_leaves_the_module_as_transformers_does(rope):
    config, x = config_of("llama", rope), torch.zeros(1, 1, 32)
    ours, theirs = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    for length in (13, 6, 17, 12):
        found = per_document(LlamaRotaryEmbedding.forward)(ours, x, positions_of(length))
        assert all(map(torch.equal, found, theirs(x, positions_of(length))))
        assert torch.equal(ours.inv_freq, theirs.inv_freq)


@pytest.mark.parametrize("lengths", [(4,), (10, 4), (3, 10, 12)])
def test_short_documents_after_a_longer_sequence_have_their_own_frequencies(lengths):
    """Before Transformers 5.13 those of the longer one stay, since its length is not kept."""
    config, x = config_of("llama", DYNAMIC), torch.zeros(1, 1, 32)
    rotary = LlamaRotaryEmbedding(config)
    rotary(x, positions_of(20))
    for kept in (rotary.max_seq_len_cached, rotary.original_max_seq_len):
        rotary.max_seq_len_cached = kept
        found = per_document(LlamaRotaryEmbedding.forward)(rotary, x, positions_of(*lengths))
        alone = [LlamaRotaryEmbedding(config)(x, positions_of(n)) for n in lengths]
        assert torch.equal(found[0], torch.cat([each[0] for each in alone], 1))
        rotary(x, positions_of(20))


def test_kinds_of_layers_have_their_own_type():
    config = tiny_config("gemma3_text")
    original = {**DYNAMIC, "rope_theta": 10000.0}
    config.rope_parameters = {"full_attention": original, "sliding_attention": {**original, "rope_type": "default"}}
    config.max_position_embeddings = 10
    x, places = torch.zeros(1, 1, 32), positions_of(4, 13)
    for kind in ("full_attention", "sliding_attention"):
        packed = per_document(Gemma3RotaryEmbedding.forward)(Gemma3RotaryEmbedding(config), x, places, layer_type=kind)
        alone = [Gemma3RotaryEmbedding(config)(x, positions_of(n), kind) for n in (4, 13)]
        assert torch.equal(packed[0], torch.cat([each[0] for each in alone], 1))


def test_last_positions():
    assert last_positions(torch.tensor([[0, 1, 2, 0, 0, 1], [5, 6, 7, 8, 0, 0]])).tolist() == [
        [2, 2, 2, 0, 1, 1],
        [8, 8, 8, 8, 0, 0],
    ]


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("fill", [0, 1])
def test_padded_rows_have_the_frequencies_of_the_longest_one(rope, fill):
    """A row of 13 tokens beside one of 6 after padding, as `generate` gives their positions."""
    config, x = config_of("llama", rope), torch.zeros(2, 1, 32)
    positions = torch.stack([torch.arange(13), torch.cat([torch.full((7,), fill), torch.arange(6)])])
    found = per_document(LlamaRotaryEmbedding.forward)(LlamaRotaryEmbedding(config), x, positions)
    assert all(map(torch.equal, found, LlamaRotaryEmbedding(config)(x, positions)))


@pytest.mark.parametrize(("arch", "rope"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_batches_generate_as_in_transformers(arch, rope, use_cache):
    original = random_model(config_of(arch, rope)).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    ids, mask = torch.randint(3, 48, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    options = {"do_sample": False, "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    options |= {"use_cache": use_cache, "pad_token_id": 0, "eos_token_id": None}
    ours, theirs = (m.generate(ids, attention_mask=mask, **options).logits for m in (model, original))
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
