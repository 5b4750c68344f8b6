"""FLOPs of a training step, counted from a model's modules and the lengths of its documents.

A matmul of [m, k] and [k, n] is 2 * m * k * n FLOPs; elementwise operations, norms, softmax and embeddings are not
counted. Recomputation (activation checkpointing, attention scores in backward) is not counted either, so that FLOPs per
second over the peak are the model FLOPs utilization (MFU).

What a module computes is read from its type, its parameters and the code of its forward; no architecture is named here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opslot._base.errors import ConfigError
from opslot.models._multimodal.audio import MELS, PLACED_MELS, WAVEFORM
from opslot.models.flop_modules import AttentionShape, Flops, ModuleFlops, ModuleReader, Uncounted
from opslot.models.flop_streams import FRAMES, PATCHES, TOKENS
from opslot.slots.bind import require_module


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one training step.

    Attributes:
        parts: by part of the model: "linear", "adapters", "router", "experts", "shared experts", "attention", "delta
            rule", "scan", "convolution", "head", and the same after "image " and "audio " for their towers.
        uncounted: modules whose FLOPs are missing, each with the reason.
        tokens: tokens of the text.
    """

    parts: dict[str, Flops]
    uncounted: tuple[Uncounted, ...]
    tokens: int

    @property
    def forward(self) -> float:
        return sum(part.forward for part in self.parts.values())

    @property
    def backward(self) -> float:
        return sum(part.backward for part in self.parts.values())

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __str__(self) -> str:
        width = max([len(name) for name in self.parts] + [5])
        rows = [*self.parts.items(), ("total", Flops(self.forward, self.backward))]
        lines = [f"{'part':{width}}  {'forward':>10}  {'backward':>10}  share"]
        for name, part in rows:
            share = part.total / self.total if self.total else 0.0
            lines.append(f"{name:{width}}  {_short(part.forward):>10}  {_short(part.backward):>10}  {share:5.1%}")
        lines += [f"not counted: {part.path}: {part.reason}" for part in self.uncounted]
        return "\n".join(lines)


def count_flops(
    model: nn.Module,
    lengths: Sequence[int] | torch.Tensor | int,
    *,
    patches: Sequence[int] | torch.Tensor | int = (),
    frames: Sequence[int] | torch.Tensor | int = (),
) -> FlopCount:
    """FLOPs of one forward and backward pass of `model`, by part.

    Weight gradients are counted for parameters that require one, and input gradients for modules after the first such
    parameter. A token passes through `top_k` experts. Attention is counted over the pairs of query and key that its
    mask lets see each other: causal, window, chunk, and only within a document.

    Args:
        model: on any device, also meta; bound by opslot or not; inside PEFT or not.
        lengths: tokens of each document of the step.
        patches: patches of each image or video frame; towers without any are not run.
        frames: frames of the mel features of each audio, or samples of its waveform where the model takes that,
            likewise; padding of chunks is not counted.

    Returns:
        The FLOPs, and the modules that could not be counted.

    Raises:
        ConfigError: `model` is not a module; a length is negative.

    Example:
        count = opslot.count_flops(model, [4096] * 8)
        print(count)                                   # a table by part
        mfu = count.total / seconds / 989e12
    """
    require_module(model, "opslot.count_flops")
    return FlopCounter(model).count(lengths, patches=patches, frames=frames)


class FlopCounter:
    """Counts steps of one model: reads its modules once, then each step takes microseconds.

    Attributes:
        uncounted: modules whose FLOPs are missing.
        frames_dim: of the audio features that the model takes, for `audio_lengths`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = ModuleReader(model)
        self.uncounted = tuple(modules.uncounted)
        self.frames_dim = modules.audio.frames_dim if modules.audio is not None else -1
        self._frame_rows = modules.audio.rows if modules.audio is not None else 1.0
        self._per_token: dict[tuple[str, str], Flops] = _summed(modules.matmuls)
        self._per_pair: dict[tuple[str, AttentionShape], Flops] = _summed(modules.attention)

    def count(
        self,
        lengths: Sequence[int] | torch.Tensor | int,
        *,
        patches: Sequence[int] | torch.Tensor | int = (),
        frames: Sequence[int] | torch.Tensor | int = (),
    ) -> FlopCount:
        """See `count_flops`."""
        sequences = {
            TOKENS: _lengths(lengths, "lengths"),
            PATCHES: _lengths(patches, "patches"),
            FRAMES: _lengths(frames, "frames"),
        }
        rows_of_audio = [math.ceil(length * self._frame_rows) for length in sequences[FRAMES]]
        parts: defaultdict[str, Flops] = defaultdict(Flops)
        for (stream, part), flops in self._per_token.items():
            name = _named(stream, part)
            parts[name] = parts[name].plus(flops, sum(sequences[stream]))
        for (stream, shape), flops in self._per_pair.items():
            attending = rows_of_audio if stream == FRAMES else sequences[stream]
            name = _named(stream, "attention")
            parts[name] = parts[name].plus(flops, visible_pairs(attending, shape))
        found = {name: flops for name, flops in parts.items() if any(flops)}
        return FlopCount(found, self.uncounted, sum(sequences[TOKENS]))

    def per_row(self, stream: str) -> float:
        """FLOPs of the matmuls of a step for each token of the text, patch of an image or frame of mel features."""
        return sum(flops.total for (of, _), flops in self._per_token.items() if of == stream)

    def attention(self, length: int) -> float:
        """FLOPs of attention of a step for a document of `length` tokens."""
        return sum(
            flops.total * _document_pairs(length, shape)
            for (stream, shape), flops in self._per_pair.items()
            if stream == TOKENS
        )


def visible_pairs(lengths: Iterable[int], shape: AttentionShape) -> int:
    """Pairs of query and key that see each other in documents of `lengths` tokens."""
    return sum(_document_pairs(length, shape) for length in lengths)


def _document_pairs(length: int, shape: AttentionShape) -> int:
    if shape.chunk is not None and length > shape.chunk:
        chunks, rest = divmod(length, shape.chunk)
        whole = dataclasses.replace(shape, chunk=None)
        return chunks * _document_pairs(shape.chunk, whole) + _document_pairs(rest, whole)
    window = min(length, shape.window or length)
    causal = window * (window + 1) // 2 + (length - window) * window
    # Without causality the window extends as far to the right; each token is in both halves.
    return causal if shape.causal else 2 * causal - length


def _summed(found: Iterable[ModuleFlops]) -> dict[tuple[str, Any], Flops]:
    """FLOPs of the matmuls of each stream and part, or attentions of each stream and shape."""
    sums: defaultdict[tuple[str, Any], Flops] = defaultdict(Flops)
    for stream, kind, flops in found:
        sums[stream, kind] = sums[stream, kind].plus(flops)
    return sums


def _named(stream: str, part: str) -> str:
    return part if stream == TOKENS else f"{stream} {part}"


def _lengths(given: Sequence[int] | torch.Tensor | int, name: str) -> list[int]:
    values = given.tolist() if isinstance(given, torch.Tensor) else given
    found = [values] if isinstance(values, int) else list(values)
    wrong = next((value for value in found if not isinstance(value, int) or isinstance(value, bool) or value < 0), None)
    if wrong is not None:
        raise ConfigError(f"{name} takes the tokens of each document", found=repr(wrong), hint="e.g. [4096, 4096]")
    return found


def document_lengths(batch: dict[str, Any]) -> list[int]:
    """Tokens of each document of a micro batch, without padding."""
    cu_seqlens, mask = batch.get("cu_seq_lens_q"), batch.get("attention_mask")
    if cu_seqlens is not None:
        return cu_seqlens.diff().tolist()
    if mask is not None and mask.ndim == 2:
        return mask.sum(-1).tolist()
    rows, length = batch["input_ids"].shape
    return [length] * rows


def image_lengths(batch: dict[str, Any]) -> list[int]:
    """Patches of each image and video frame of a micro batch, from its grids [N, (t, h, w)]."""
    grids = [batch[name] for name in ("image_grid_thw", "video_grid_thw") if batch.get(name) is not None]
    return [height * width for grid in grids for frames, height, width in grid.tolist() for _ in range(frames)]


def audio_lengths(batch: dict[str, Any], frames_dim: int = -1) -> list[int]:
    """Frames of each audio of a micro batch, from its mel features [N, mels, frames], or [N, frames, mels] with
    `frames_dim` -2: without the padding where the model is given its mask. Samples of waveforms [N, samples] or
    [N, 1, samples]."""
    if (waveforms := batch.get(WAVEFORM)) is not None:
        return [waveforms.shape[-1]] * len(waveforms)
    features = batch.get(MELS, batch.get(PLACED_MELS))
    if features is None:
        return []
    mask = batch.get("feature_attention_mask", batch.get("audio_attention_mask"))
    if mask is not None:
        return mask.sum(-1).tolist()
    return [features.shape[frames_dim]] * (len(features) if features.ndim == 3 else 1)


def _short(flops: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= size:
            return f"{flops / size:.2f} {unit}"
    return f"{flops:.0f}"
