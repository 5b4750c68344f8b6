"""A rank without images runs the tower too, whatever images the model takes, with the gradients of one process."""

import pytest
import torch

import opslot
from opslot.distributed import init_parallel_state
from opslot.verify.media import media_samples, with_common_divisor
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config

NAMES = ["qwen3_vl", "llava", "gemma3", "mistral3", "internvl"]


def build(name, frozen):
    model = random_model(tiny_config(name)).eval()
    samples = media_samples(model)
    opslot.apply(model, "eager")
    for parameter, value in model.named_parameters():
        value.requires_grad_(not (frozen and ("vision" in parameter or "visual" in parameter)))
    return model, samples.batches


def on_ranks(name, frozen, kinds):
    state = init_parallel_state(device_type="cpu")
    model, batches = build(name, frozen)
    opslot.parallelize(model, state)
    own = with_common_divisor([batches[kind] for kind in kinds])[state.rank]
    return {key: value.tolist() for key, value in train_step(model, [own]).items()}


def check(ranks, name, frozen=False, kinds=("text", "image")):
    model, batches = build(name, frozen)
    expected = train_step(model, with_common_divisor([batches[kind] for kind in kinds]))
    found = [
        {key: torch.tensor(value) for key, value in part.items()}
        for part in ranks.run(on_ranks, name, frozen, kinds, timeout=60)
    ]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""
    return expected


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize("name", NAMES)
def test_text_and_image_ranks_equal_one_process(ranks, name):
    expected = check(ranks, name)
    tower = [grad for key, grad in expected.items() if "vision" in key or "visual" in key]
    assert any(grad.any() for grad in tower)


@pytest.mark.quick("llava")
@pytest.mark.parametrize("name", ["llava", "mistral3"])
def test_text_on_all_ranks(ranks, name):
    check(ranks, name, kinds=("text", "text"))


def test_frozen_tower(ranks):
    check(ranks, "gemma3", frozen=True)
