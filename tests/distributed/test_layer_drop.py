"""Ranks that drop different layers (LayerDrop) have the collectives of all layers."""

import pytest
import torch
from transformers import OPTConfig

import opslot
from opslot.distributed import init_parallel_state
from opslot.verify.random_model import random_ids, random_model, train_step, whole_batch, worst_difference

SIZES = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
# Of ranks, which drop different layers.
SEEDS = (0, 3)


def opt():
    config = OPTConfig(**SIZES, num_hidden_layers=4, layerdrop=0.5, dropout=0.0, word_embed_proj_dim=16)
    return random_model(config), whole_batch(random_ids(config))


def on_ranks(checkpointing):
    state = init_parallel_state(device_type="cpu")
    model, batch = opt()
    opslot.apply(model)
    opslot.parallelize(model, state, activation_checkpointing=checkpointing)
    torch.manual_seed(SEEDS[state.rank])
    return {key: value.tolist() for key, value in train_step(model, [batch]).items()}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_ranks_that_drop_different_layers_equal_one_process(ranks, checkpointing):
    expected = {}
    for seed in SEEDS:
        model, batch = opt()
        torch.manual_seed(seed)
        expected[seed] = train_step(model, [batch])
    dropped = [
        {key for key, grad in part.items() if ".fc1.weight" in key and not grad.any()} for part in expected.values()
    ]
    assert all(dropped)
    assert dropped[0] != dropped[1]
    one, other = expected.values()
    whole = {key: value + other[key] for key, value in one.items()}
    found = [{key: torch.tensor(value) for key, value in part.items()} for part in ranks.run(on_ranks, checkpointing)]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], whole) == ""


def of_a_sequence():
    state = init_parallel_state(device_type="cpu", sp=2)
    model, _ = opt()
    opslot.apply(model)
    try:
        opslot.parallelize(model, state)
    except opslot.OpslotError as error:
        return str(error)


def test_language_model_on_ranks_of_a_sequence_raises(ranks):
    assert all("OPTDecoder drops layers (layerdrop=0.5)" in error for error in ranks.run(of_a_sequence))
