"""What an audio encoder of any form computes for each frame, measured on a copy without weights.

A frame is one of mel features, or a sample of a waveform. Conformers mix convolutions, attention within blocks and
projections of relative positions, in code of their own. The copy runs on the meta device, which computes nothing; hooks
count the rows of its modules, and torch's counter the rest.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opslot.models._multimodal.audio import METHOD, AudioInputs
from opslot.models._multimodal.probe import Inputs, find_once, meta_copy

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
    """

    rows: float
    frames_dim: int
    by_path: Mapping[str, float]
    linear: float
    quadratic: float
    window: None = None
    positions: Mapping[str, float] = field(default_factory=dict)

    def rows_of(self, path: str) -> float:
        """Rows of a module of the model for each frame."""
        return self.by_path.get(_WRAPPED.sub("", path), 0.0)


def measure_audio_encoder(modules: Mapping[str, nn.Module], encoder_path: str) -> MeasuredAudioEncoder | None:
    """The rows of an encoder in a model with these modules; None where its code does not run without values."""
    encoder_path = _WRAPPED.sub("", encoder_path)
    plain = {_WRAPPED.sub("", path): module for path, module in modules.items()}
    holders = [path for path in _parents(encoder_path) if hasattr(plain.get(path), METHOD)]
    if not holders:
        return None
    holder, inside = plain[holders[0]], encoder_path.removeprefix(holders[0]).removeprefix(".")
    found = find_once(holder, "measure_audio_encoder", lambda: _measure(holder, inside))
    if found is None:
        return None
    prefix = f"{holders[0]}." if holders[0] else ""
    return MeasuredAudioEncoder(**{**found, "by_path": {prefix + p: rows for p, rows in found["by_path"].items()}})


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _measure(holder: Any, encoder: str) -> dict[str, Any] | None:
    """The fields of a `MeasuredAudioEncoder`, with paths in `holder`."""
    try:
        model, inputs = meta_copy(holder), AudioInputs(holder)
        measured = [
            next(
                (features, *found)
                for features, given in inputs.of_length(model, *lengths)
                if (found := _run(model, given, encoder))
            )
            for lengths in zip(_FRAMES, _SAMPLES, strict=True)
        ]
    # A model's own code may raise anything, and may take no features of these lengths.
    except Exception:
        return None
    (_, _, shorter), (features, rows, longer) = measured
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
    }


def _run(model: Any, inputs: Inputs, encoder: str) -> tuple[dict[str, int], int] | None:
    """The rows of each module, and the FLOPs of everything else; None where the encoder raises."""
    rows: dict[str, int] = {}
    ends: list[bool] = []
    handles = [model.get_submodule(encoder).register_forward_hook(lambda *_: ends.append(True))]
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            handles.append(module.register_forward_hook(_counting(rows, path)))
    counter = FlopCounterMode(display=False)
    # Also what follows an encoder may raise, where it selects the features that are not padding.
    with contextlib.suppress(Exception), counter, torch.no_grad():
        getattr(model, METHOD)(**inputs)
    for handle in handles:
        handle.remove()
    rest = counter.get_total_flops() - sum(_flops(model, path, count) for path, count in rows.items())
    return (rows, rest) if ends else None


def _counting(rows: dict[str, int], path: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def count(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        sizes = output.shape[:-1] if isinstance(module, nn.Linear) else (len(output), *output.shape[2:])
        rows[path] = rows.get(path, 0) + torch.Size(sizes).numel()

    return count


def _flops(model: Any, path: str, rows: int) -> int:
    return 2 * rows * model.get_submodule(path).weight.numel()
