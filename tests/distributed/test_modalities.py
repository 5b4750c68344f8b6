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
    step(model, batches()[first + state.rank])
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "frozen", "first"),
    [
        ("qwen3_vl", False, 0),
        ("qwen3_vl", False, 1),
        pytest.param("qwen3_vl", True, 0, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", False, 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_different_modalities(ranks, name, frozen, first):
    """`first` 0: text and an image; 1: an image and a video."""
    model = build(name)
    freeze(model, frozen)
    for inputs in batches()[first : first + 2]:
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


def test_audio_and_visual_towers_run_without_input():
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    from opslot.models._modalities import run_towers_on_every_rank

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
    run_towers_on_every_rank(model)
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    towers = [(name, p) for name, p in model.named_parameters() if "layers." in name or "blocks." in name]
    for part in ("audio_tower", "visual"):
        assert any(part in name for name, _ in towers)
    for name, parameter in towers:
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == ("audio_tower" not in name and "visual" not in name), name
