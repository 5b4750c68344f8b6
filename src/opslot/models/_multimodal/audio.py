"""The smallest legal audio of a model, from the code of its audio encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.source import method_parameters
from opslot.models._multimodal.probe import Inputs, find_once, first_with_features

METHOD = "get_audio_features"
MELS, WAVEFORM = "input_features", "input_values"
# Mel features [N, frames, mels] of a module that places features between those of the text, in a model without
# `get_audio_features` (Phi-4 multimodal).
PLACED_MELS = "audio_input_features"
# Names of inputs, the last one of codes.
FEATURES = (MELS, WAVEFORM, "audio_input_ids")
_TOKENS = "input_ids"
# Names of the config of an audio encoder.
AUDIO_CONFIGS = ("audio_config", "encoder_config", "acoustic_tokenizer_encoder_config")
_SHORT = tuple(2**n for n in range(9))
_LONGEST = 6000
_FEW_FRAMES = 8
_USUAL_MELS = (80, 128)


class AudioInputs:
    """What a method that computes features of audio takes, for the shortest audio that gives features.

    Args:
        holder: the module with `get_audio_features`.
    """

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._parameters = {
            name: p for name, p in method_parameters(type(holder), METHOD).items() if p.kind is not p.VAR_KEYWORD
        }
        configs = (getattr(holder.config, name, None) for name in AUDIO_CONFIGS)
        self._config: Any = next((config for config in configs if config is not None), None)

    def make(self, count: int = 1) -> Inputs | None:
        """Arguments for `count` such audios on the module's device; None where they are unknown."""
        smallest = find_once(self._holder, METHOD, self._smallest)
        if smallest is None:
            return None
        parameter = next(self._holder.parameters())
        return {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype).repeat(
                count, *[1] * (value.dim() - 1)
            )
            for name, value in smallest.items()
        }

    def _smallest(self) -> Inputs | None:
        name = next((name for name in self._parameters if name in FEATURES), None)
        if name is None or self._config is None:
            return None
        return first_with_features(self._holder, METHOD, lambda model: self._candidates(name, model, self._lengths()))

    def of_length(self, model: nn.Module, frames: int, samples: int) -> Iterator[tuple[Tensor, Inputs]]:
        """Mel features of so many frames, or a waveform of so many samples, on the meta device, and the arguments with
        them, in each form that the encoder of `model` may take: with all masks, and with those that it requires."""
        name, length = (MELS, frames) if MELS in self._parameters else (WAVEFORM, samples)
        for inputs in self._candidates(name, model, [length]) if name in self._parameters else ():
            features = inputs[name].to("meta")
            yield features, {**inputs, name: features}
            required = {other for other, p in self._parameters.items() if p.default is p.empty}
            yield features, {other: inputs[other] for other in inputs if other in required} | {name: features}

    def _candidates(self, name: str, model: nn.Module, lengths: Sequence[int]) -> Iterator[Inputs]:
        """Inputs of one audio, the shortest first."""
        for dtype in (torch.bool, torch.int64):
            for length in lengths:
                for rest in self._rest(name, length, dtype):
                    yield from ({name: features, **rest} for features in self._forms(name, length, model))

    def _rest(self, name: str, length: int, dtype: torch.dtype) -> Iterator[Inputs]:
        """Masks of `length` frames that are all real; where the method requires tokens too, a placeholder and masks of
        few real frames, of which one gives its feature. Nothing where it requires something else."""
        others = {other: p for other, p in self._parameters.items() if other != name}
        masks = [other for other in others if "mask" in other]
        required = {other for other, p in others.items() if p.default is p.empty} - {*masks}
        token = getattr(self._holder.config, "audio_token_id", None)
        if required - ({_TOKENS} if token is not None else set()):
            return
        # Text separates the placeholders of audios, from which their times follow (Music Flamingo).
        tokens = {_TOKENS: torch.tensor([[token, 0 if token else 1]])} if required else {}
        for real in range(1, min(length, _FEW_FRAMES) + 1) if required else (length,):
            mask = (torch.arange(length) < real).to(dtype)[None]
            yield {**dict.fromkeys(masks, mask), **tokens}

    def _forms(self, name: str, length: int, model: nn.Module) -> Iterator[Tensor]:
        """Features of one audio of `length` frames or samples, in each order of dims that an encoder may take."""
        if name == WAVEFORM:
            # Some have a dim of channels.
            yield from (torch.ones(1, length), torch.ones(1, 1, length))
        elif name == "audio_input_ids":
            yield from (torch.ones(1, length, size, dtype=torch.int64) for size in self._sizes())
        else:
            first = self._first_layer(model)
            if isinstance(first, nn.Linear):
                yield torch.ones(1, length, first.in_features)
            elif isinstance(first, nn.Conv1d):
                yield torch.ones(1, first.in_channels, length)
            else:
                # Dims of the same size could be confused.
                for size in (size for size in self._sizes() if size != length):
                    yield from (torch.ones(1, size, length), torch.ones(1, length, size))

    def _first_layer(self, model: nn.Module) -> nn.Module | None:
        """The layer of the encoder that takes mel features; a Conv2d takes them as an image. None without encoder."""
        tower = next((m for m in model.modules() if type(getattr(m, "config", None)) is type(self._config)), None)
        found = list(tower.modules()) if tower is not None else []
        inside = {m for stack in found if isinstance(stack, nn.ModuleList) for m in stack.modules()}
        images = (m for m in found if isinstance(m, nn.Conv2d) and m.in_channels == 1)
        others = (m for m in found if isinstance(m, nn.Linear | nn.Conv1d) and m not in inside)
        return next(images, None) or next(others, None)

    def _sizes(self) -> list[int]:
        """Sizes in the configs of the encoder and the model, those of mel features first."""
        return feature_sizes(self._holder.config, self._config)

    def _lengths(self) -> list[int]:
        sizes = self._sizes()
        return sorted({*_SHORT, *sizes, *(2 * size for size in sizes if 2 * size <= _LONGEST)})


def feature_sizes(config: Any, audio_config: Any) -> list[int]:
    """Sizes in the configs of a model and its audio encoder that mel features may have, the likely ones first."""
    cls = type(audio_config)
    properties = [name for name in dir(cls) if isinstance(getattr(cls, name), property)]
    computed = {name: getattr(audio_config, name, None) for name in properties}
    named = {**config.to_dict(), **audio_config.to_dict(), **computed}
    ordered = sorted(named.items(), key=lambda item: "mel" not in item[0] and "feat" not in item[0])
    listed = [size for _, value in ordered for size in (value if isinstance(value, list | tuple) else [value])]
    found = [size for size in listed if type(size) is int and 1 < size <= _LONGEST]
    return list(dict.fromkeys([*found, *_USUAL_MELS]))
