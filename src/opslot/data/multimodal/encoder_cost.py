"""Estimated FLOPs of the encoders of images, video and audio, for load balancing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Of encoders whose layers are not known: mel features of 10 ms, in pairs.
_USUAL_ROWS = 0.5


@dataclass(frozen=True)
class AudioRows:
    """What the layers of an audio encoder compute.

    Attributes:
        rows: for each frame of mel features.
        window: rows that attend to each other; None where all of an audio do. An encoder with windows computes no
            padding.
    """

    rows: float
    window: int | None


class EncoderCost:
    """Estimated FLOPs of a sample's encoders, in tokens of the language model (without its attention).

    A layer of width h takes 24 h^2 FLOPs per token, and bidirectional attention 4 h for each token that it sees: n
    patches cost n * (layers * h * (h + s / 6)) / (layers * h^2 of the language model), where a patch sees s patches:
    those of its image, or on average over the layers, of its window.

    Args:
        config: of the model.
        audio: None where the layers of the encoder are unknown.
        feature_extractor: of the processor, which names its features.
    """

    def __init__(self, config: Any, audio: AudioRows | None = None, feature_extractor: Any = None) -> None:
        self.config = config
        self.audio = audio or AudioRows(_USUAL_ROWS, None)
        self._features = getattr(feature_extractor, "model_input_names", None) or ["input_features"]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """Of the features that the processor returned for a sample."""
        total = 0.0
        for kind, counts in (("vision", self._patches), ("audio", self._audio_rows)):
            tower = getattr(self.config, f"{kind}_config", None)
            if tower is not None:
                linear, width = self._linear(tower)
                total += sum(n * linear * (1 + s / (6 * width)) for n, s in counts(tower, inputs))
        return total

    def per_row(self, kind: str) -> float:
        """The cost of a patch ("vision") or of a frame of mel features ("audio") without attention; 0 without such an
        encoder."""
        tower = getattr(self.config, f"{kind}_config", None)
        rows = self.audio.rows if kind == "audio" else 1.0
        return 0.0 if tower is None else self._linear(tower)[0] * rows

    def _linear(self, tower: Any) -> tuple[float, int]:
        """Estimated FLOPs of the matmuls of an encoder for a row, in tokens of the language model, and its width."""
        text = self.config.get_text_config()
        decoder = _number(text, "num_hidden_layers") * _number(text, "hidden_size") ** 2
        width = _number(tower, "embed_dim", "hidden_size", "d_model")
        return _layers(tower) * width**2 / decoder, width

    def _patches(self, tower: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, float]]:
        """Patches of images and videos, and how many of them a patch sees."""
        for kind, name in {"image": "pixel_values", "video": "pixel_values_videos"}.items():
            pixels, grid = inputs.get(name), inputs.get(f"{kind}_grid_thw")
            if grid is not None:
                yield from ((t * h * w, _seen(tower, h * w)) for t, h, w in grid.tolist())
            elif pixels is not None and pixels.ndim >= 4:
                own = pixels.shape[-1] * pixels.shape[-2] // _number(tower, "patch_size") ** 2
                yield own * pixels[..., 0, 0, 0].numel(), own
            elif pixels is not None and pixels.ndim >= 2:
                # Patches in sequences, of one or of several images.
                yield pixels[..., 0].numel(), pixels.shape[-2]

    def _audio_rows(self, tower: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, float]]:
        """Rows of each audio, and how many of them a row sees."""
        features = next((inputs[name] for name in self._features if name in inputs), None)
        if features is None:
            return
        mels = _number(tower, "num_mel_bins", "input_feat_size", "input_size", "mel_bins")
        if features.ndim >= 3 and features.is_floating_point() and 1 not in features.shape[-2:]:
            # Mel features of [frames, mels] or [mels, frames].
            frames = features.shape[-2] if features.shape[-1] == mels else features.shape[-1]
            audios = [frames] * len(features)
            mask = next((inputs[name] for name in self._features if "mask" in name and name in inputs), None)
            mask = inputs.get("feature_attention_mask", mask)
            if self.audio.window is not None and mask is not None:
                audios = mask.sum(-1).tolist()
            rows = [int(frames * self.audio.rows) for frames in audios]
        else:
            # A waveform: as many rows as placeholders, of which a sample has those of all its audio.
            token = getattr(self.config, "audio_token_id", None)
            rows = [int((inputs["input_ids"] == token).sum())] if token is not None and "input_ids" in inputs else []
        yield from ((count, min(count, self.audio.window or count)) for count in rows)


def _layers(tower: Any) -> int:
    return _number(tower, "depth", "num_hidden_layers", "encoder_layers", "num_layers")


def _seen(tower: Any, patches: int) -> float:
    """Patches of an image of so many that each sees, on average over the layers: some see a window alone."""
    full, side = getattr(tower, "fullatt_block_indexes", None), getattr(tower, "window_size", None)
    if full is None or not side:
        return patches
    layers, window = _layers(tower), (side // _number(tower, "patch_size")) ** 2
    return (len(full) * patches + (layers - len(full)) * min(window, patches)) / layers


def _number(config: Any, *names: str) -> int:
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return int(found[0] if isinstance(found, list | tuple) else found)
