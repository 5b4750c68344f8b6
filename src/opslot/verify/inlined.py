"""Images and audio for models whose forward has no method that computes their features.

Forms in which such models take them are tried on the model, until one runs and its loss depends on the features. What
else a form needs follows from the names of the forward's parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opslot._base.source import method_parameters
from opslot.models._multimodal.modalities import media_parameters

Batch = dict[str, Any]

_MOST_TOKENS = 64
# Outputs of an encoder, given in place of its inputs.
_ENCODED = ("_states", "_embeddings", "image_embeds", "encoder_outputs")
_MELS = ("num_mel_bins", "input_size", "feature_size")
_SIDES = ("image_size", "resolution")


@dataclass(frozen=True)
class InlinedForm:
    """How a model takes the images or audio of a sample.

    Attributes:
        kind: "image" or "audio".
        name: of the parameter with their features.
        dims: of the features; the first, or the first after the sample's, counts images or audio.
        inner: dims of an image or audio.
        tokens: placeholders of each.
        has_token: whether the config has an id of the placeholders.
        by_sample: whether the masks of tokens have a dim of images, instead of a mask of patches in an image.
    """

    kind: str
    name: str
    dims: tuple[int, ...]
    inner: tuple[int, ...]
    tokens: int
    has_token: bool
    by_sample: bool

    @property
    def count(self) -> int:
        """Images or audio of a sample."""
        return self.dims[0] if len(self.dims) == 1 else self.dims[1]


class InlinedInputs:
    """What the forward of a model takes for images and audio.

    Args:
        model: of Transformers' own class.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = media_parameters(model)
        self.parameters = method_parameters(type(model))
        config = model.config
        self.configs = {
            kind: next((c for name in names if (c := getattr(config, name, None)) is not None), config)
            for kind, names in {"image": ("vision_config", "encoder"), "audio": ("audio_config",)}.items()
        }

    def forms(self, kind: str, count: int) -> Iterator[InlinedForm]:
        """Forms of `count` images or audio in one sample, those of models that take one as well."""
        by_image = self._of_images if kind == "image" else self._of_audio
        has_token = self._has_token(kind)
        marks = has_token or any(name.endswith("position_mask") for name in self.parameters)
        # Fewer than features are a form of their own in some models, which insert the others.
        tokens: Sequence[int] = range(_MOST_TOKENS, 0, -1) if marks else (0,)
        if "cross_attention_mask" in self.parameters:
            # One token stands for an image whose features are keys and values.
            tokens = (1,)
        for dims, inner in by_image(count):
            for number, by_sample in itertools.product(tokens, (True, False)):
                yield InlinedForm(kind, self.names[kind], dims, inner, number, has_token, by_sample)

    def inputs(self, form: InlinedForm, is_placeholder: Tensor, generator: torch.Generator) -> Batch:
        """Arguments of the forward besides the tokens.

        Args:
            is_placeholder: bool [S], the tokens of the images or audio.
        """
        made = {name: self._other(name, form, is_placeholder) for name in self._others(form.kind)}
        found = {name: value for name, value in made.items() if value is not None}
        return found | {form.name: torch.rand(*form.dims, *form.inner, generator=generator)}

    def _others(self, kind: str) -> list[str]:
        """Parameters that describe images, or audio."""
        text = ("input_ids", "attention_mask", "position_ids", "labels", "inputs_embeds")
        own = [name for name in self.parameters if name not in text and not name.endswith(_ENCODED)]
        own = [name for name in own if name not in self.names.values() and not name.startswith("decoder_")]
        if len(self.names) == 1:
            return own
        return [name for name in own if name.startswith(kind)]

    def _other(self, name: str, form: InlinedForm, is_placeholder: Tensor) -> Tensor | None:
        length = len(is_placeholder)
        if name.endswith("position_mask"):
            return is_placeholder[None]
        if name == "cross_attention_mask":
            return torch.ones(1, length, *form.dims[1:], dtype=torch.int64)
        if name.endswith("attention_mask"):
            if form.by_sample:
                return torch.ones(1, length, form.count, dtype=torch.int64)
            return torch.ones(*form.dims, *self._patches(form), dtype=torch.int64)
        if name.endswith("_mask"):
            return torch.ones(form.dims, dtype=torch.int64)
        if name.endswith("_ids"):
            return torch.ones(form.dims[:-1] if len(form.dims) > 1 else form.dims, dtype=torch.int64)
        if name.endswith("embed_sizes"):
            return torch.full((form.count,), form.tokens)
        if name == "image_sizes":
            return torch.tensor([form.inner[1:]] * form.dims[0])
        return None

    def _patches(self, form: InlinedForm) -> tuple[int, ...]:
        """Dims of a mask of an image's patches, or of an audio's frames."""
        if form.kind == "audio":
            return (max(form.inner),) if self._mels in form.inner else form.inner[:1]
        patch = getattr(self.configs["image"], "patch_size", 1)
        return tuple(side // patch for side in form.inner[1:])

    def _of_images(self, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        config = self.configs["image"]
        side = next((v for name in _SIDES if (v := getattr(config, name, None)) is not None), 16)
        inner = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
        tiles = getattr(config, "max_num_tiles", None)
        if tiles is not None:
            yield (1, count, tiles), inner
        # In a crop and as a whole; each of a sample; as one sequence; one for each sample.
        yield from ((dims, inner) for dims in ((count, 2), (1, count), (count,), (1,)))

    def _of_audio(self, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        longest = getattr(self.configs["audio"], "max_source_positions", None)
        for frames in (2 * longest, 16, 64) if longest else (16, 64):
            yield (count,), (self._mels, frames)
            yield (count,), (frames, self._mels)

    @cached_property
    def _mels(self) -> int:
        return next((v for name in _MELS if (v := getattr(self.configs["audio"], name, None)) is not None), 80)

    def _has_token(self, kind: str) -> bool:
        config = self.model.config
        found = (config, *(getattr(config, name, None) for name in config.sub_configs))
        return any(isinstance(getattr(c, f"{kind}_token_{of}", None), int) for c in found for of in ("id", "index"))
