"""Estimated FLOPs of the encoders of images, video and audio, for load balancing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def encoder_cost(config: Any, inputs: Mapping[str, torch.Tensor]) -> float:
    """Estimated FLOPs of a sample's encoders, in tokens of the language model (without its attention).

    A layer of width h takes 24 h^2 FLOPs per token, and bidirectional attention 4 h for each token of the same image:
    n patches cost n * (layers * h * (h + s / 6)) / (layers * h^2 of the language model), with s patches an image.
    """
    total = 0.0
    for kind in ("vision", "audio"):
        tower = getattr(config, f"{kind}_config", None)
        if tower is not None:
            counts = _audio_frames(inputs) if kind == "audio" else _patches(tower, inputs)
            linear, width = _linear_cost(config, tower)
            total += sum(n * linear * (1 + s / (6 * width)) for n, s in counts)
    return total


def linear_patch_cost(config: Any) -> float:
    """What `encoder_cost` has for a patch without attention; 0 without a vision encoder."""
    tower = getattr(config, "vision_config", None)
    return 0.0 if tower is None else _linear_cost(config, tower)[0]


def _linear_cost(config: Any, tower: Any) -> tuple[float, int]:
    """Estimated FLOPs of the matmuls of an encoder for a patch, in tokens of the language model, and its width."""
    text = config.get_text_config()
    decoder = _number(text, "num_hidden_layers") * _number(text, "hidden_size") ** 2
    width = _number(tower, "embed_dim", "hidden_size", "d_model")
    layers = _number(tower, "depth", "num_hidden_layers", "encoder_layers", "num_layers")
    return layers * width**2 / decoder, width


def _patches(tower: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Patches of images and videos, and how many of them attend to each other."""
    for kind, name in {"image": "pixel_values", "video": "pixel_values_videos"}.items():
        pixels, grid = inputs.get(name), inputs.get(f"{kind}_grid_thw")
        if grid is not None:
            yield from ((t * h * w, h * w) for t, h, w in grid.tolist())
        elif pixels is not None and pixels.ndim >= 4:
            own = pixels.shape[-1] * pixels.shape[-2] // _number(tower, "patch_size") ** 2
            yield own * pixels[..., 0, 0, 0].numel(), own
        elif pixels is not None and pixels.ndim >= 2:
            # Patches in sequences, of one or of several images.
            yield pixels[..., 0].numel(), pixels.shape[-2]


def _audio_frames(inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Frames after the usual subsampling, of which those of one audio attend to each other."""
    features = inputs.get("input_features")
    if features is not None and features.ndim >= 2:
        frames = max(features.shape[-2:]) // 2
        yield frames * len(features), frames


def _number(config: Any, *names: str) -> int:
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return int(found[0] if isinstance(found, list | tuple) else found)
