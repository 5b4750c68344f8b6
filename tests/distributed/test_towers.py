"""A rank without images runs the tower too, whatever images the model takes, with the gradients of one process."""

import pytest
import torch
from transformers import Kosmos2_5Config, Kosmos2_5ForConditionalGeneration

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


def kosmos():
    """Kosmos-2.5, whose patches follow their row and column, and whose language model embeds the tokens itself."""
    text = {"vocab_size": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 32, "attention_heads": 2, "layerdrop": 0.0}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 32, "num_hidden_layers": 2, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "max_num_patches": 8}
    torch.manual_seed(0)
    model = Kosmos2_5ForConditionalGeneration(
        Kosmos2_5Config(text_config=text, vision_config=vision, latent_query_num=3)
    ).eval()
    image = torch.randn(1, 6, 50)
    image[..., :2] = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 4))
    ids = torch.arange(5, 17)[None]
    text = {"input_ids": ids, "labels": ids}
    mask = ((ids > 6) & (ids < 10)).long()
    given = text | {"flattened_patches": image, "image_embeds_position_mask": mask}
    return model, with_common_divisor([text, given])


def kosmos_on_ranks():
    state = init_parallel_state(device_type="cpu")
    model, batches = kosmos()
    opslot.apply(model)
    opslot.parallelize(model, state)
    return {key: value.tolist() for key, value in train_step(model, [batches[state.rank]]).items()}


def test_language_model_that_embeds_the_tokens_itself(ranks):
    expected = train_step(*kosmos())
    found = [{key: torch.tensor(value) for key, value in part.items()} for part in ranks.run(kosmos_on_ranks)]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""
    assert any(grad.any() for key, grad in expected.items() if "vision" in key)


def answers(changes):
    state = init_parallel_state(device_type="cpu")
    model, batches = build("llava", frozen=False)
    inputs = {name: value for name, value in batches["image"].items() if name != "labels"}
    if changes is not None:
        opslot.parallelize(model, state, **changes)
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize("changes", [{"data_parallel_mode": "fsdp2"}, {"param_dtype": torch.float64}])
def test_generation_from_an_image(ranks, changes):
    """`generate` of Transformers 5.24 encodes images before the forward pass, which gathers or copies parameters."""
    expected, found = (ranks.run(answers, given, timeout=60) for given in (None, changes))
    assert found == expected
