"""Ulysses for models with images and videos: two processes that share each sequence equal one."""

import pytest
import torch

import opslot
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.distributed import init_parallel_state, shard_sequence
from opslot.verify.media import media_samples, pack, with_common_divisor
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config


def on_ranks(config, batches, sizes, ops):
    state = init_parallel_state(device_type="cpu", **sizes)
    model = random_model(config).eval()
    opslot.apply(model, ops)
    opslot.parallelize(model, state)
    own = [shard_sequence(batch, state) for batch in batches]
    return {key: value.tolist() for key, value in train_step(model, own).items()}


def check(ranks, name, kinds, ops="auto", **sizes):
    config = tiny_config(name)
    model = random_model(config).eval()
    samples = dict(media_samples(model).batches)
    samples["packed"] = pack(RopePositions(config, type(model).__name__), [samples["image"], samples["text"]])
    batches = with_common_divisor([samples[kind] for kind in kinds])
    opslot.apply(model, ops)
    expected = train_step(model, batches)
    parts = ranks.run(on_ranks, config, batches, {"sp": 2, **sizes}, ops, timeout=60)
    found = [{key: torch.tensor(value) for key, value in part.items()} for part in parts]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""


@pytest.mark.quick("qwen3_5")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_images_and_videos(ranks, name):
    check(ranks, name, ("mixed", "text", "packed"))


@pytest.mark.quick("gemma3", "unlimited_ocr")
@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3", "unlimited_ocr"])
def test_images(ranks, name):
    """gemma3's image tokens see each other. The windows of unlimited_ocr limit decoding alone."""
    check(ranks, name, ("image", "text", "packed"))


def test_experts(ranks):
    check(ranks, "qwen3_vl_moe", ("mixed", "text"), ep=2)


def padded_images(config, shapes, most, seed):
    """A sample with images of several sizes, whose patches are padded to `most`."""
    generator = torch.Generator().manual_seed(seed)
    side, factor = config.vision_config.patch_size, config.downsample_factor
    mask = torch.tensor([[1] * (h * w) + [0] * (most - h * w) for h, w in shapes])
    pixels = torch.randn(len(shapes), most, 3 * side**2, generator=generator) * mask[..., None]
    ids = [5, *(id for h, w in shapes for id in [*[config.image_token_id] * (h * w // factor**2), 7]), *range(10, 17)]
    labels = [-100 if id == config.image_token_id else id for id in ids]
    return {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes),
    }


def test_padded_patches(ranks):
    """LFM2-VL pads the patches of each image to those of the largest in the batch."""
    config = tiny_config("lfm2_vl")
    samples = [padded_images(config, shapes, 16, seed) for seed, shapes in enumerate([[(4, 4), (2, 6)], [(2, 2)]])]
    text = {"input_ids": torch.arange(20, 29)[None], "labels": torch.arange(20, 29)[None]}
    original = random_model(config).eval()
    packed = pack(RopePositions(config, type(original).__name__), [*samples, text])
    alone = with_common_divisor([*samples, text])
    expected = train_step(original, alone)
    batches = with_common_divisor([packed])
    for ops in ("eager", "auto"):
        model = random_model(config).eval()
        opslot.apply(model, ops)
        assert worst_difference(train_step(model, batches), expected) == ""
    parts = ranks.run(on_ranks, config, batches, {"sp": 2}, "auto", timeout=60)
    found = [{key: torch.tensor(value) for key, value in part.items()} for part in parts]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""
