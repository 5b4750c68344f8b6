"""Ulysses for models with images and videos: two processes that share each sequence equal one."""

import pytest
import torch

import opslot
from opslot.data.rope_positions import RopePositions
from opslot.distributed import init_parallel_state, shard_sequence
from opslot.verify.media import media_samples, pack, with_common_divisor
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config


def build(name, ops="auto"):
    config = tiny_config(name)
    model = random_model(config).eval()
    batches = dict(media_samples(model).batches)
    batches["packed"] = pack(RopePositions(config, type(model).__name__), [batches["image"], batches["text"]])
    opslot.apply(model, ops)
    return model, batches


def on_ranks(name, kinds, sizes, ops):
    state = init_parallel_state(device_type="cpu", **sizes)
    model, batches = build(name, ops)
    opslot.parallelize(model, state)
    own = with_common_divisor([batches[kind] for kind in kinds])
    return {key: value.tolist() for key, value in train_step(model, [shard_sequence(b, state) for b in own]).items()}


def check(ranks, name, kinds, ops="auto", **sizes):
    model, batches = build(name, ops)
    expected = train_step(model, with_common_divisor([batches[kind] for kind in kinds]))
    parts = ranks.run(on_ranks, name, kinds, {"sp": 2, **sizes}, ops, timeout=60)
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
