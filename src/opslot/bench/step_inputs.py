"""Batches of a training step: tokens, or images and audio with text, alone or packed into one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opslot._base.errors import ConfigError
from opslot._base.labels import IGNORE_INDEX
from opslot._base.source import method_parameters
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models._build import auto_class_name
from opslot.verify.media import marks, pack, token_id
from opslot.verify.random_model import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Feature extractors of Whisper and later models make one frame of 10 ms.
_MEL_FRAMES_PER_S = 100

Batch = dict[str, Any]


def text_batch(input_ids: Tensor) -> Batch:
    """Every token is predicted from those before it; input_ids: int64 [B, S]."""
    return {"input_ids": input_ids, "labels": input_ids}


def media_batch(
    model: dict[str, Any], samples: int, text_length: int, side: int, seconds: int, dtype: torch.dtype
) -> Batch:
    """Samples of one random square image, one random audio and `text_length` random tokens after them, on the CPU.

    Args:
        model: a Transformers config as plain data, of a model that takes images as patches with a grid and audio as
            mel features, such as Qwen2.5-Omni.
        side: of the image in pixels, rounded down to what the patches and their merging allow; 0 for none.
        seconds: of audio; 0 for none.

    Returns:
        input_ids, labels: int64 [samples, S], S tokens of images, audio and text. Only text has labels.
        pixel_values: `dtype` [patches, channels * frames * patch_size ** 2], and image_grid_thw: int64 [samples, 3].
        input_features: `dtype` [samples, mels, frames], and feature_attention_mask: int64 [samples, frames].
        mm_token_type_ids, or attention_mask: int64 [samples, S]; what the model computes rotary positions from.

    Raises:
        ConfigError: as `image_grid` and `audio_tokens`.
    """
    config = trained_config(model)
    generator = torch.Generator().manual_seed(1)
    features: Batch = {}
    prefix: list[int] = []
    if side:
        grid = image_grid(model, side)
        vision: Any = config.vision_config
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        features["pixel_values"] = torch.randn(samples * grid * grid, width, generator=generator).to(dtype)
        features["image_grid_thw"] = torch.tensor([[1, grid, grid]] * samples)
        prefix += _placeholders(config, "image", (grid // vision.spatial_merge_size) ** 2)
    if seconds:
        frames = seconds * _MEL_FRAMES_PER_S
        shape = samples, config.audio_config.num_mel_bins, frames
        features["input_features"] = torch.randn(shape, generator=generator).to(dtype)
        features["feature_attention_mask"] = torch.ones(samples, frames, dtype=torch.int64)
        prefix += _placeholders(config, "audio", audio_tokens(model, seconds))
    text = text_ids(config)
    ids = text[torch.randint(len(text), (samples, len(prefix) + text_length), generator=generator)]
    ids[:, : len(prefix)] = torch.tensor(prefix)
    labels = ids.clone()
    labels[:, : len(prefix)] = IGNORE_INDEX
    batch = {"input_ids": ids, "labels": labels, **features}
    if "mm_token_type_ids" in method_parameters(model_class(config)):
        return batch | {"mm_token_type_ids": (ids == config.image_token_id).long()}
    return batch | {"attention_mask": torch.ones_like(ids)}


def _placeholders(config: PreTrainedConfig, kind: str, count: int) -> list[int]:
    """Tokens of one image or audio, between those that mark its begin and end where the config has them."""
    before, after = marks(config, kind)
    return [*before, *[token_id(config, kind)] * count, *after]


def image_grid(model: dict[str, Any], side: int) -> int:
    """Patches along a side of an image of `side` pixels.

    Raises:
        ConfigError: the model takes images in another form than patches with a grid, or the image is too small.
    """
    config = trained_config(model)
    vision = getattr(config, "vision_config", None)
    needed = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if vision is None or not all(hasattr(vision, name) for name in needed):
        raise ConfigError(
            "--image-size requires models that take images as patches with a grid, such as qwen3_vl",
            found=f"model_type {config.model_type!r}",
            hint="leave out --image-size, or name such a model",
        )
    merged = vision.patch_size * vision.spatial_merge_size
    if side < merged:
        raise ConfigError(
            f"--image-size {side} is less than a merged patch of {config.model_type}", hint=f"use {merged} or more"
        )
    return side // merged * vision.spatial_merge_size


def audio_tokens(model: dict[str, Any], seconds: int) -> int:
    """Tokens of an audio of `seconds`.

    Raises:
        ConfigError: the model takes no audio, or takes it in another form than mel features with a mask.
    """
    config = trained_config(model)
    lengths = "_get_feat_extract_output_lengths"
    takes_audio = getattr(config, "audio_config", None) is not None and hasattr(config.audio_config, "num_mel_bins")
    modules = RopePositions(config, model_class(config).__name__).model.modules() if takes_audio else ()
    encoder: Any = next((module for module in modules if hasattr(module, lengths)), None)
    if encoder is None:
        raise ConfigError(
            "--audio-seconds requires models that take audio as mel features with a mask, such as qwen2_5_omni",
            found=f"model_type {config.model_type!r}",
            hint="leave out --audio-seconds, or name such a model",
        )
    found = getattr(encoder, lengths)(torch.tensor([seconds * _MEL_FRAMES_PER_S]))
    return int(found[-1])


def packed(batch: Batch, model: dict[str, Any]) -> Batch:
    """The samples as documents of one sequence: the same loss, without a token's label in another document.

    Returns:
        On the CPU, the batch's other features, with input_ids, labels: [1, B * S], position_ids: [1, B * S], or
        [axes, 1, B * S] for multimodal rotary embeddings, and cu_seq_lens_q, cu_seq_lens_k, max_length_q,
        max_length_k as Transformers' flash attention takes them.
    """
    config = trained_config(model)
    samples = len(batch["input_ids"])
    chunks = {name: value.cpu().chunk(samples) for name, value in batch.items()}
    alone = [{name: each[i] for name, each in chunks.items()} for i in range(samples)]
    made = pack(RopePositions(config, model_class(config).__name__), alone)
    # The positions are computed from it.
    made.pop("mm_token_type_ids", None)
    return made


def config_of(model: dict[str, Any]) -> PreTrainedConfig:
    """The Transformers config of plain data."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**model)


def trained_config(model: dict[str, Any]) -> PreTrainedConfig:
    """The config of the part that trains: of an omni model, that of its thinker."""
    config = config_of(model)
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return next((part for part in (config, *parts) if getattr(part, "vision_config", None) is not None), config)


def takes_images(model: dict[str, Any]) -> bool:
    """Whether it is the config of a model with an encoder of images."""
    return getattr(trained_config(model), "vision_config", None) is not None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Transformers' class of a causal or multimodal language model."""
    import transformers

    return getattr(transformers, (config.architectures or [auto_class_name(config)])[0])


def model_vocab_size(model: dict[str, Any]) -> int:
    """The size of the vocabulary, which multimodal models have in the config of their language model."""
    return model["vocab_size"] if "vocab_size" in model else trained_config(model).get_text_config().vocab_size
