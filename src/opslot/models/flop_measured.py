"""What an audio encoder of any form computes for each frame, measured on a copy without weights.

A frame is one of mel features, or a sample of a waveform. Conformers mix convolutions, attention within blocks and
projections of relative positions, in code of their own. The copy runs on the meta device, which computes nothing; hooks
count the rows of its modules, and torch's counter the rest.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opslot.models._multimodal.audio import METHOD, PLACED_MELS, AudioInputs, feature_sizes
from opslot.models._multimodal.probe import find_once, meta_copy
from opslot.models.flop_streams import parents_of

# Lengths of two audios. What is quadratic in them is attention within all of an audio.
_FRAMES = (800, 1600)
# Of waveforms: multiples of the samples that encoders take for a row, such as 320, 1920 and 3200.
_SAMPLES = (153_600, 307_200)
# What PEFT puts around a module.
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.[^.]+|original_module)(?=\.|$)")


@dataclass(frozen=True)
class MeasuredAudioEncoder:
    """The rows of an encoder and of what follows it, as `AudioEncoder` has them for encoders in Whisper's form.

    Attributes:
        rows: of most matmuls of linear layers, for each frame.
        frames_dim: of the features that the encoder takes.
        by_path: rows of each linear layer and convolution of the model, for each frame.
        linear, quadratic: FLOPs of the forward pass beside them for n frames, linear * n + quadratic * n^2.
        detached: paths of the modules that run with torch.no_grad(), and so have no backward pass.
    """

    rows: float
    frames_dim: int
    by_path: Mapping[str, float]
    linear: float
    quadratic: float
    detached: frozenset[str]
    window: None = None
    positions: Mapping[str, float] = field(default_factory=dict)

    def rows_of(self, path: str) -> float:
        """Rows of a module of the model for each frame."""
        return self.by_path.get(_WRAPPED.sub("", path), 0.0)

    def is_detached(self, path: str) -> bool:
        """Whether a module of the model runs with torch.no_grad()."""
        return _WRAPPED.sub("", path) in self.detached


def measure_audio_encoder(modules: Mapping[str, nn.Module], encoder_path: str) -> MeasuredAudioEncoder | None:
    """The rows of an encoder in a model with these modules; None where its code does not run without values."""
    encoder_path = _WRAPPED.sub("", encoder_path)
    plain = {_WRAPPED.sub("", path): module for path, module in modules.items()}
    parents = list(parents_of(encoder_path))
    holder = next((path for path in parents if hasattr(plain.get(path), METHOD)), None)
    placing = None
    if holder is None:
        placing = next((path for path in parents if _places(plain.get(path))), None)
        holder = next((path for path in parents if hasattr(plain.get(path), "_from_config")), None)
    if holder is None:
        return None
    prefix = f"{holder}." if holder else ""
    inside, placing = encoder_path.removeprefix(prefix), placing and placing.removeprefix(prefix)
    found = find_once(plain[holder], "measure_audio_encoder", lambda: _measure(plain[holder], inside, placing))
    if found is None:
        return None
    by_path = {prefix + path: rows for path, rows in found["by_path"].items()}
    detached = frozenset(prefix + path for path in found["detached"])
    return MeasuredAudioEncoder(**{**found, "by_path": by_path, "detached": detached})


def _places(module: nn.Module | None) -> bool:
    """Whether a module computes features of audio and places them between those of the text."""
    return module is not None and PLACED_MELS in inspect.signature(module.forward).parameters


def _measure(holder: Any, encoder: str, placing: str | None) -> dict[str, Any] | None:
    """The fields of a `MeasuredAudioEncoder`, with paths in `holder`.

    Args:
        placing: path of the module that places the features; None if `holder` has `get_audio_features`.
    """
    try:
        model = meta_copy(holder)
        measured = [
            next(
                (features, *found)
                for features, call in _calls(holder, model, encoder, placing, *lengths)
                if (found := _run(model, call, encoder))
            )
            for lengths in zip(_FRAMES, _SAMPLES, strict=True)
        ]
    # A model's own code may raise anything, and may take no features of these lengths.
    except Exception:
        return None
    (_, _, shorter, _), (features, rows, longer, detached) = measured
    first, second = _SAMPLES if features.shape[-1] == _SAMPLES[1] else _FRAMES
    quadratic = max(0.0, (longer / second - shorter / first) / (second - first))
    flops: Counter[int] = Counter()
    for path, count in rows.items():
        if path.startswith(f"{encoder}.") and isinstance(model.get_submodule(path), nn.Linear):
            flops[count] += _flops(model, path, count)
    return {
        "rows": flops.most_common(1)[0][0] / second,
        "frames_dim": -1 if features.shape[-1] == second else -2,
        "by_path": {path: count / second for path, count in rows.items()},
        "linear": longer / second - quadratic * second,
        "quadratic": quadratic,
        "detached": detached,
    }


def _calls(
    holder: Any, model: Any, encoder: str, placing: str | None, frames: int, samples: int
) -> Iterator[tuple[torch.Tensor, Callable[[], Any]]]:
    """Features of so many frames or samples, and what computes with them, in each form that the encoder may take."""
    if placing is None:
        for features, given in AudioInputs(holder).of_length(model, frames, samples):
            yield features, functools.partial(getattr(model, METHOD), **given)
        return
    # The placeholders of the text are searched for their values. The text itself follows the encoder.
    text = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "inputs_embeds": torch.ones(1, 1, 1, device="meta")}
    for size in feature_sizes(holder.config, model.get_submodule(encoder).config):
        features = torch.ones(1, frames, size, device="meta")
        yield features, functools.partial(model.get_submodule(placing), **text, **{PLACED_MELS: features})


def _run(model: Any, call: Callable[[], Any], encoder: str) -> tuple[dict[str, int], int, set[str]] | None:
    """The rows of each module, the FLOPs of everything else, and the modules that ran without gradients; None where
    the encoder raises."""
    rows: dict[str, int] = {}
    detached: set[str] = set()
    ends: list[bool] = []
    handles = [model.get_submodule(encoder).register_forward_hook(lambda *_: ends.append(True))]
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_noting(detached, path)))
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            handles.append(module.register_forward_hook(_counting(rows, path)))
    counter = FlopCounterMode(display=False)
    # Also what follows an encoder may raise, where it selects the features that are not padding.
    with contextlib.suppress(Exception), counter, torch.enable_grad():
        call()
    for handle in handles:
        handle.remove()
    rest = counter.get_total_flops() - sum(_flops(model, path, count) for path, count in rows.items())
    return (rows, rest, detached) if ends else None


def _noting(detached: set[str], path: str) -> Callable[..., None]:
    def note(*_: Any) -> None:
        if not torch.is_grad_enabled():
            detached.add(path)

    return note


def _counting(rows: dict[str, int], path: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def count(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        sizes = output.shape[:-1] if isinstance(module, nn.Linear) else (len(output), *output.shape[2:])
        rows[path] = rows.get(path, 0) + torch.Size(sizes).numel()

    return count


def _flops(model: Any, path: str, rows: int) -> int:
    return 2 * rows * model.get_submodule(path).weight.numel()
