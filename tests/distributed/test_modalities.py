"""Ranks whose batches have different modalities: none waits for the others, with the gradients of one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from transformers import AutoConfig

import opslot
from opslot.distributed import init_parallel_state

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
IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
IMAGE, VIDEO, START = 100, 101, 102


def config_of(name):
    if name == "llava":
        vision = {"model_type": "siglip_vision_model", **IMAGES, "image_size": 16, "patch_size": 8}
        return AutoConfig.for_model(
            "llava",
            vision_config=vision,
            text_config={"model_type": "llama", **TEXT},
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
        )
    vision = {**PATCHES, "patch_size": 4}
    if name == "qwen3_vl":
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": 103}
    return AutoConfig.for_model(name, text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **ids)


def build(name):
    torch.manual_seed(0)
    config = config_of(name)
    if name == "llava":
        return opslot.build_foundation_model(config, architecture="LlavaForConditionalGeneration")
    return opslot.build_foundation_model(config)


def batches_of(name):
    """Text, an image, and a video (for Llava two images)."""
    torch.manual_seed(1)
    tokens = 4 if name == "llava" else 1
    text, image = [5, 6, 7, 8], [START, *[IMAGE] * tokens, 9]
    if name == "llava":
        return [
            batch(text),
            batch(image, pixel_values=torch.randn(1, 3, 16, 16)),
            batch(image + image, pixel_values=torch.randn(2, 3, 16, 16)),
        ]
    grid, pixels = torch.tensor([[1, 2, 2]]), torch.randn(4, 96)
    return [
        batch(text),
        batch(image, pixel_values=pixels, image_grid_thw=grid),
        batch([START, VIDEO, 9, 7], pixel_values_videos=-pixels, video_grid_thw=grid),
    ]


def batch(ids, **inputs):
    ids = torch.tensor([ids])
    types = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    return {"input_ids": ids, "labels": ids, **inputs, **({} if "image_grid_thw" not in inputs else types)} | (
        types if "video_grid_thw" in inputs else {}
    )


def step(model, batch):
    loss = model(**batch, num_items_in_batch=torch.tensor(10), use_cache=False).loss
    loss.backward()


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name] = (torch.zeros(parameter.shape) if grad is None else grad).tolist()
    return found


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ("visual" in name or "vision" in name)))


def on_ranks(name, frozen, first):
    state = init_parallel_state(device_type="cpu")
    model = build(name)
    freeze(model, frozen)
    opslot.parallelize(model, state)
    step(model, batches_of(name)[first + state.rank])
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "frozen", "first"),
    [
        ("qwen3_vl", False, 0),
        ("qwen3_vl", False, 1),
        ("qwen3_vl", True, 0),
        ("qwen2_5_vl", False, 0),
        ("llava", False, 0),
    ],
)
def test_ranks_with_different_modalities(ranks, name, frozen, first):
    """`first` 0: text and an image; 1: an image and a video."""
    model = build(name)
    freeze(model, frozen)
    for inputs in batches_of(name)[first : first + 2]:
        step(model, inputs)
    expected = gradients(model)
    for found in ranks.run(on_ranks, name, frozen, first):
        assert found.keys() == expected.keys()
        for key, grad in found.items():
            torch.testing.assert_close(torch.tensor(grad), torch.tensor(expected[key]), atol=1e-5, rtol=1e-4, msg=key)


def test_unknown_smallest_input_is_logged(monkeypatch, caplog):
    from opslot.models import _modalities

    model = build("qwen3_vl")
    monkeypatch.setattr(_modalities, "_smallest_input", lambda *_: None)
    with caplog.at_level("WARNING"):
        _modalities.run_towers_on_every_rank(model)
    assert "get_image_features" in caplog.text
