"""The model's own check of placeholders, run without weights."""

import pytest
import torch

from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models._multimodal.placeholders import PlaceholderCheck
from opslot.verify.media import media_samples
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config


def sample_of(name, kind="image"):
    """Tokens and features of a sample with images or videos, and the check of the model."""
    model = random_model(tiny_config(name))
    sample = dict(media_samples(model).batches[kind])
    sample.pop("labels")
    return sample.pop("input_ids")[0], sample, PlaceholderCheck(RopePositions(model.config, type(model).__name__))


@pytest.mark.quick("gemma3", "llava_next", "qwen2_5_vl")
@pytest.mark.parametrize(
    "name", ["aya_vision", "gemma3", "idefics3", "internvl", "kimi_k25", "llava_next", "mistral3", "qwen2_5_vl"]
)
def test_additional_placeholder_is_reported(name):
    ids, features, check = sample_of(name)
    assert check(ids, features) == ""
    place = int((ids == check.positions.config.image_token_id).nonzero()[0, 0])
    more = torch.cat([ids[: place + 1], ids[place:]])
    assert "tokens" in check(more, with_token_more(features, place, len(ids)))
    # The result for the same sizes is known.
    assert check(ids.clone(), features) == ""


def with_token_more(features, place, length):
    return {
        name: torch.cat([x[:, : place + 1], x[:, place:]], 1) if x.ndim == 2 and x.shape[1] == length else x
        for name, x in features.items()
    }


@pytest.mark.parametrize("name", ["llava_onevision", "nemotron_h_omni"])
def test_videos_that_are_padded_to_the_longest_are_reported(name):
    ids, features, check = sample_of(name, "video")
    rows = torch.stack([ids, ids])
    videos = features["pixel_values_videos"]
    assert check(rows, {"pixel_values_videos": torch.cat([videos, videos])}) == ""
    longest = torch.cat([videos, videos], 1)
    assert "tokens" in check(rows, {"pixel_values_videos": torch.cat([longest, longest])})


def test_model_without_feature_method_is_unknown():
    config = tiny_config("mllama")
    check = PlaceholderCheck(RopePositions(config, "MllamaForConditionalGeneration"))
    assert check(torch.arange(5), {"pixel_values": torch.ones(1, 1, 4, 3, 16, 16)}) is None
