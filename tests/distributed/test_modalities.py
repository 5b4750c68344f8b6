"""Ranks whose batches have different modalities: none waits for the others, with the gradients of one process."""

import copy

import pytest
import torch
from transformers import AutoConfig

import opslot
from opslot.distributed import gradient_sync, init_parallel_state
from opslot.models._multimodal.modalities import alias_outputs
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.distributed.tiny import assert_gradients_close, gradients

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": 1,
}
PATCHES = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
IMAGE, VIDEO, START = 100, 101, 102


def config_of(name):
    vision = {**PATCHES, "patch_size": 4}
    if name == "qwen3_vl":
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": 103}
    return AutoConfig.for_model(name, text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **ids)


def build(name):
    torch.manual_seed(0)
    return opslot.build_foundation_model(config_of(name))


def batches():
    """Text, an image, and a video."""
    torch.manual_seed(1)
    grid, pixels = torch.tensor([[1, 2, 2]]), torch.randn(4, 96)
    return [
        batch([5, 6, 7, 8]),
        batch([START, IMAGE, 9], pixel_values=pixels, image_grid_thw=grid),
        batch([START, VIDEO, 9, 7], pixel_values_videos=-pixels, video_grid_thw=grid),
    ]


def batch(ids, **inputs):
    ids = torch.tensor([ids])
    if inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"input_ids": ids, "labels": ids, **inputs}


def step(model, batch):
    loss = model(**batch, num_items_in_batch=torch.tensor(10), use_cache=False).loss
    loss.backward()


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ("visual" in name or "vision" in name)))


def on_ranks(name, frozen, first, mode):
    state = init_parallel_state(device_type="cpu")
    model = build(name)
    freeze(model, frozen)
    opslot.parallelize(model, state, data_parallel_mode=mode)
    step(model, batches()[first + state.rank])
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "frozen", "first", "mode"),
    [
        ("qwen3_vl", False, 0, "fsdp2"),
        ("qwen3_vl", False, 1, "fsdp2"),
        ("qwen3_vl", False, 0, "ddp"),
        pytest.param("qwen3_vl", False, 1, "ddp", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", True, 0, "ddp", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", True, 0, "fsdp2", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", False, 0, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_different_modalities(ranks, name, frozen, first, mode):
    """`first` 0: text and an image; 1: an image and a video."""
    model = build(name)
    freeze(model, frozen)
    for inputs in batches()[first : first + 2]:
        step(model, inputs)
    expected = gradients(model)
    assert_gradients_close(ranks.run(on_ranks, name, frozen, first, mode), expected)


# Models whose towers have no known smallest input.
WITHOUT_DUMMY = ("mllama", "fuyu", "qwen2_audio")


def build_without_dummy(name):
    model = random_model(tiny_config(name)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("_gate"):
            # Initialized with 0, which would switch the layer off.
            parameter.data.fill_(0.5)
    opslot.apply(model, "eager")
    return model


def media_batch(model):
    """A batch with an image or audio of a model in `WITHOUT_DUMMY`."""
    config = model.config
    torch.manual_seed(1)
    if config.model_type == "mllama":
        vision = config.vision_config
        side, tiles = vision.image_size, vision.max_num_tiles
        mask = torch.zeros(1, 4, 1, tiles, dtype=torch.int64)
        mask[..., :1] = 1
        return batch([5, config.image_token_index, 7, 8]) | {
            "pixel_values": torch.randn(1, 1, tiles, 3, side, side),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.tensor([[[1] + [0] * (tiles - 1)]]),
            "cross_attention_mask": mask,
        }
    if config.model_type == "fuyu":
        patches = torch.randn(1, 2, model.model.vision_embed_tokens.in_features)
        return batch([5, config.image_token_id, config.image_token_id, 8]) | {"pixel_values": patches}
    audio = config.audio_config
    frames = 2 * audio.max_source_positions
    found = batch([5, *[config.audio_token_index] * (audio.max_source_positions // 2), 8, 9])
    return found | {
        "input_features": torch.randn(1, audio.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.int64),
        "attention_mask": torch.ones_like(found["input_ids"]),
    }


def scaled_step(model, batch):
    (model(**batch, use_cache=False).logits.float().pow(2).mean()).backward()


def on_ranks_without_dummy(name, checkpointing):
    state = init_parallel_state(device_type="cpu")
    model = build_without_dummy(name)
    opslot.parallelize(model, state, activation_checkpointing=checkpointing)
    for turn in range(2):
        scaled_step(model.train(checkpointing), [batch([5, 6, 7, 8]), media_batch(model)][(state.rank + turn) % 2])
    return gradients(model)


@pytest.mark.parametrize("name", [*WITHOUT_DUMMY, "llava"])
def test_outputs_of_a_sharded_model_are_not_those_that_the_loss_reads(name):
    """Else FSDP gathers parameters where gradients reach features, which Transformers returns from 5.24."""
    model, ids = random_model(tiny_config(name)).eval(), torch.ones(1, 3, dtype=torch.long)
    alias_outputs(model)
    assert model(input_ids=ids, use_cache=False).logits.grad_fn.name() == "_AliasBackward"


@pytest.mark.quick("mllama-True", "fuyu-False")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", WITHOUT_DUMMY)
def test_tower_without_smallest_input(ranks, name, checkpointing):
    """Each rank has text in one step and an image or audio in the other."""
    model = build_without_dummy(name)
    for _ in range(2):
        for inputs in (batch([5, 6, 7, 8]), media_batch(model)):
            scaled_step(model, inputs)
    expected = gradients(model)
    assert_gradients_close(ranks.run(on_ranks_without_dummy, name, checkpointing), expected)


def with_unused_layer():
    """As in Janus, which generates images with layers that its loss does not read."""
    model = random_model(tiny_config("qwen3"))
    model.unused = torch.nn.ModuleList([copy.deepcopy(model.model.layers[0])])
    return model


def on_ranks_with_unused_layers():
    state = init_parallel_state(device_type="cpu")
    model = with_unused_layer()
    opslot.apply(model, "eager")
    opslot.parallelize(model, state, data_parallel_mode="fsdp2")
    for is_last in (False, True):
        with gradient_sync(model, is_last):
            step(model, batch([5, 6, 7, 8 + state.rank]))
    return gradients(model)


def test_gradient_accumulation_with_layers_that_no_forward_uses(ranks):
    model = with_unused_layer()
    for last in (8, 8, 9, 9):
        step(model, batch([5, 6, 7, last]))
    assert_gradients_close(ranks.run(on_ranks_with_unused_layers), gradients(model))


def momentum_steps(model, steps):
    """Steps on lists of batches, by an optimizer that moves a parameter with a gradient of zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs in steps:
        optimizer.zero_grad()
        for own in inputs:
            scaled_step(model, own)
        opslot.drop_gradients_of_unused_modules(model)
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist() for name, p in weights.items()}


def image_and_text_steps(model):
    return [[media_batch(model), batch([5, 6, 7, 8])], [batch([5, 6, 7, 8]), batch([9, 6, 7, 8])]]


def on_ranks_with_conditional_layers():
    state = init_parallel_state(device_type="cpu")
    model = build_without_dummy("mllama")
    opslot.parallelize(model, state, data_parallel_mode="fsdp2")
    return momentum_steps(model, [[inputs[state.rank]] for inputs in image_and_text_steps(model)])


def test_layers_that_no_rank_runs_are_not_moved_by_their_momentum(ranks):
    """Mllama's cross-attention layers in a step without images."""
    model = build_without_dummy("mllama")
    expected = momentum_steps(model, image_and_text_steps(model))
    assert_gradients_close(ranks.run(on_ranks_with_conditional_layers), expected)


def test_norms_of_dummy_inputs_stay_in_evaluation_until_they_are_computed_again(ranks):
    """Nemotron-H Omni with an image: the frames of dummy audio are fewer than a batch norm in training takes."""
    for gradients_are_finite in ranks.run(on_ranks_with_images_and_norms_of_audio):
        assert gradients_are_finite


def on_ranks_with_images_and_norms_of_audio():
    from opslot.verify.media import media_samples

    state = init_parallel_state(device_type="cpu")
    model = random_model(tiny_config("nemotron_h_omni"))
    images = media_samples(random_model(model.config).eval()).batches["image"]
    opslot.apply(model, "eager")
    opslot.parallelize(model, state, data_parallel_mode="fsdp2", activation_checkpointing="full")
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    before = [norm.running_mean.clone() for norm in norms]
    for _ in range(2):
        step(model, images)
    assert norms
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    return all(bool(p.grad.full_tensor().isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_audio_and_visual_towers_run_without_input():
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    from opslot.models._multimodal.modalities import find_towers

    audio = {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "encoder_layers": 1, "output_dim": 32}
    config = Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**PATCHES, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        audio_config={**audio, "num_mel_bins": 8, "n_window": 4},
    )
    torch.manual_seed(0)
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(input_ids=ids, use_cache=False).logits
    assert all(p.grad is None for p in model.parameters())
    find_towers(model).run_on_every_rank(model)
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    towers = [(name, p) for name, p in model.named_parameters() if "layers." in name or "blocks." in name]
    for part in ("audio_tower", "visual"):
        assert any(part in name for name, _ in towers)
    for name, parameter in towers:
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == ("audio_tower" not in name and "visual" not in name), name
