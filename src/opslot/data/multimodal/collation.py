"""Micro batches of tokens and of the features of their images, videos and audio."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from opslot._base.errors import DataError
from opslot.data.collation import collate, collate_padded
from opslot.data.multimodal.samples import PER_TOKEN, MultimodalEncoder


class MultimodalCollator:
    """A micro batch with features, from samples with extras.

    Args:
        encoder: computes features.
        packing: samples are packed documents; else each is one document, padded.
        dtype: of floating-point features, such as pixel values; default as the processor returns them, in float32.

    Raises (a call):
        DataError: the model does not take the videos of the samples, or its images and videos, together.

    Returns (of a call):
        What `collate` or `collate_padded` return, and the features of all documents in their order. position_ids have
        the axes of the model's rotary embedding, int64 [axes, B, S], preceded by the position in the document where
        the model takes it; [B, S] for a model with one axis.
    """

    def __init__(self, encoder: MultimodalEncoder, packing: bool, dtype: torch.dtype | None = None) -> None:
        self.encoder = encoder
        self.packing = packing
        self.dtype = dtype

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(samples) if self.packing else collate_padded(samples)
        positions = self.encoder.positions
        axes = positions.axes
        text = batch["position_ids"]
        rotary = text.expand(axes, *text.shape).clone()
        per_token: dict[str, torch.Tensor] = {}
        features: dict[str, list[torch.Tensor]] = {}
        made = None
        for row, sample in enumerate(samples):
            start = 0
            for length, extra in zip(sample["lengths"], sample.get("extras", ()), strict=False):
                stop = start + length
                found = self.encoder.features(extra, sample["input_ids"][start:stop])
                rotary[:, row, start:stop] = found.pop("position_ids")
                made = self._add_audio_mask(found) or made
                for name, value in found.items():
                    if name in PER_TOKEN:
                        zeros = torch.zeros(*text.shape, *value.shape[1:], dtype=value.dtype)
                        per_token.setdefault(name, zeros)[row, start:stop] = value
                    else:
                        features.setdefault(name, []).append(value)
                start = stop
        if axes > 1:
            batch["position_ids"] = torch.cat([text[None], rotary]) if positions.takes_text_axis else rotary
        joined = {name: _joined(values, self.dtype) for name, values in features.items()}
        if made is not None and len(joined[made]) == 1:
            # As the processor returns for it.
            del joined[made]
        self._check_videos(batch["input_ids"], features, {**per_token, **joined})
        return {**batch, **per_token, **joined}

    def _add_audio_mask(self, found: dict[str, torch.Tensor]) -> str | None:
        """Add the mask of the frames of a document's audio where the processor returns none for one audio alone, since
        other audio in the micro batch may be longer; returns its name."""
        features, mask = self.encoder.audio_mask or (None, None)
        if features not in found or mask is None or mask in found:
            return None
        found[mask] = torch.ones(found[features].shape[:2], dtype=torch.bool)
        return mask

    def _check_videos(
        self, ids: torch.Tensor, features: dict[str, list[torch.Tensor]], inputs: dict[str, torch.Tensor]
    ) -> None:
        """Raise DataError where the model takes each of the videos of a micro batch, but not all of them together.

        Some models compute features of the frames by which shorter videos are padded, or mark images and videos with
        one token.
        """
        shapes = dict.fromkeys(" x ".join(map(str, v.shape[1:])) for v in features.get("pixel_values_videos", ()))
        problem: str | None = None
        if self.encoder.mixes_images_and_videos(ids, features):
            problem = "it marks images and videos with one token"
        elif len(shapes) > 1:
            problem = self.encoder.check(ids, inputs)
        if problem:
            raise DataError(
                f"the model does not take these samples in one micro batch: {problem}",
                found=f"videos of {', '.join(shapes)}" + (", and images" if "pixel_values" in features else ""),
                hint="set data.packing: false and train.micro_batch_size: 1",
            )


def _joined(values: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Tensors in one, along the first dimension; other sizes are padded with zeros to the largest."""
    shapes = {value.shape[1:] for value in values}
    if len(shapes) > 1:
        sizes = [max(lengths) for lengths in zip(*shapes, strict=True)]
        missing = [[size - own for size, own in zip(sizes, value.shape[1:], strict=True)] for value in values]
        values = [
            F.pad(value, [n for count in reversed(counts) for n in (0, count)])
            for value, counts in zip(values, missing, strict=True)
        ]
    if dtype is None or not values[0].is_floating_point():
        dtype = values[0].dtype
    in_worker = get_worker_info() is not None
    if len(values) == 1 and not in_worker:
        return values[0].to(dtype)
    shape = (sum(map(len, values)), *values[0].shape[1:])
    if in_worker:
        # A process of the loader sends tensors through shared memory: joined there, they are not copied again.
        storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
        joined = torch.empty(0, dtype=dtype).set_(storage).view(shape)
    else:
        joined = torch.empty(shape, dtype=dtype)
    # Casts without a copy in the first dtype, unlike torch.cat.
    for part, value in zip(joined.split([len(value) for value in values]), values, strict=True):
        part.copy_(value)
    return joined
