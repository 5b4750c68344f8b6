"""Batches of a training step: tokens, or images with text, alone or packed into one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opslot._base.errors import ConfigError
from opslot.data.rope_positions import RopePositions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Batch = dict[str, Any]


def text_batch(input_ids: Tensor) -> Batch:
    """Every token is predicted from those before it; input_ids: int64 [B, S]."""
    return {"input_ids": input_ids, "labels": input_ids}


def image_batch(model: dict[str, Any], samples: int, text_length: int, side: int, dtype: torch.dtype) -> Batch:
    """Samples of one random square image and `text_length` random tokens after it, on the CPU.

    Args:
        model: a Transformers config as plain data, of a model that takes images as patches with a grid, such as
            Qwen3-VL.
        side: of the image in pixels, rounded down to what the patches and their merging allow.

    Returns:
        input_ids, labels, mm_token_type_ids: int64 [samples, S], S image and text tokens. Image tokens have no label.
        pixel_values: `dtype` [patches, channels * frames * patch_size ** 2].
        image_grid_thw: int64 [samples, 3].

    Raises:
        ConfigError: as `image_grid`.
    """
    grid = image_grid(model, side)
    config = read_config(model)
    vision: Any = config.vision_config
    merge = vision.spatial_merge_size
    generator = torch.Generator().manual_seed(1)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    image_tokens = (grid // merge) ** 2
    ids = torch.randint(0, model_vocab_size(model), (samples, image_tokens + text_length), generator=generator)
    special = [value for name, value in config.to_dict().items() if name.endswith("_token_id") and value is not None]
    ids[torch.isin(ids, torch.tensor(special))] = next(i for i in range(len(special) + 1) if i not in special)
    ids[:, :image_tokens] = config.image_token_id
    labels = ids.clone()
    labels[:, :image_tokens] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": torch.randn(samples * grid * grid, width, generator=generator).to(dtype),
        "image_grid_thw": torch.tensor([[1, grid, grid]] * samples),
    }


def image_grid(model: dict[str, Any], side: int) -> int:
    """Patches along a side of an image of `side` pixels.

    Raises:
        ConfigError: the model takes images in another form than patches with a grid, or the image is too small.
    """
    config = read_config(model)
    vision = getattr(config, "vision_config", None)
    needed = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if vision is None or not all(hasattr(vision, name) for name in needed):
        raise ConfigError(
            "--image-size requires models that take images as patches with a grid, such as qwen3_vl",
            found=f"model_type {config.model_type!r}",
        )
    merged = vision.patch_size * vision.spatial_merge_size
    if side < merged:
        raise ConfigError(f"--image-size {side} is less than a merged patch of {config.model_type}", found=f"{merged}")
    return side // merged * vision.spatial_merge_size


def packed(batch: Batch, model: dict[str, Any]) -> Batch:
    """The samples as documents of one sequence: the same loss, without a token's label in another document.

    Returns:
        The batch's other features, with input_ids, labels: [1, B * S], position_ids: [1, B * S], or
        [axes, 1, B * S] for multimodal rotary embeddings, and cu_seq_lens_q, cu_seq_lens_k, max_length_q,
        max_length_k as Transformers' flash attention takes them.
    """
    ids, labels = batch["input_ids"], batch["labels"].clone()
    labels[:, 0] = -100
    samples, length = ids.shape
    offsets = torch.arange(0, samples * length + 1, length, dtype=torch.int32, device=ids.device)
    return {
        **{name: value for name, value in batch.items() if name != "mm_token_type_ids"},
        "input_ids": ids.reshape(1, -1),
        "labels": labels.reshape(1, -1),
        "position_ids": _positions(batch, model).to(ids.device),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": length,
        "max_length_k": length,
    }


def _positions(batch: Batch, model: dict[str, Any]) -> Tensor:
    ids = batch["input_ids"]
    samples, length = ids.shape
    plain = torch.arange(length).repeat(samples)
    if "image_grid_thw" not in batch:
        return plain[None]
    positions = RopePositions(read_config(model), image_class(model))
    each = [
        positions(
            ids[i].cpu(),
            {
                "mm_token_type_ids": batch["mm_token_type_ids"][i : i + 1].cpu(),
                "image_grid_thw": batch["image_grid_thw"][i : i + 1].cpu(),
            },
        )
        for i in range(samples)
    ]
    found = torch.cat(each, dim=1)[:, None]
    return torch.cat([plain[None, None], found]) if positions.takes_text_axis else found


def read_config(model: dict[str, Any]) -> PreTrainedConfig:
    """The Transformers config of plain data."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**model)


def takes_images(model: dict[str, Any]) -> bool:
    """Whether it is the config of a vision-language model."""
    return getattr(read_config(model), "vision_config", None) is not None


def image_class(model: dict[str, Any]) -> str:
    """The name of Transformers' class of a vision-language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return (model.get("architectures") or [NAMES[model["model_type"]]])[0]


def model_vocab_size(model: dict[str, Any]) -> int:
    """The size of the vocabulary, which vision-language models have in the config of their language model."""
    return model["vocab_size"] if "vocab_size" in model else read_config(model).get_text_config().vocab_size
