"""How many rows the modules of a Whisper-like audio encoder compute for each frame of mel features."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

# Frames whose rows are counted where the encoder has no chunks.
_LONG = 1 << 12


@dataclass(frozen=True)
class AudioEncoder:
    """The rows of an encoder of convolutions over time, then layers, then a projection.

    Attributes:
        rows: of the layers, for each frame.
        window: rows that attend to each other; None where all of an audio do.
        positions: of the convolutions and what joins their channels, by path in the encoder, for each frame.
        pool: rows that are averaged after the layers.
        width: channels of a row.
        frames_dim: of the features that the encoder takes.
    """

    rows: float
    window: int | None
    positions: dict[str, float]
    pool: int
    width: int
    frames_dim: int = -1

    def rows_inside(self, path: str) -> float:
        """Rows of a module at `path` in the encoder for each frame."""
        # Adapters are below the module that they wrap.
        before = next((own for own in self.positions if f"{path}.".startswith(f"{own}.")), None)
        if before is not None:
            return self.positions[before]
        return self.rows if _is_in_layer(path) else self.rows / self.pool

    def rows_after(self, features: int) -> float:
        """Rows of a projector that takes so many `features`, those of one row or of several, for each frame."""
        return self.rows / self.pool / max(features / self.width, 1)


def read_audio_encoder(encoder: nn.Module) -> AudioEncoder | None:
    """The rows of an audio encoder; None for one of another form, such as a Conformer."""
    config: Any = getattr(encoder, "config", None)
    outside = {
        path.removesuffix(".base_layer"): module for path, module in encoder.named_modules() if not _is_in_layer(path)
    }
    kinds = (nn.Conv1d, nn.Conv2d)
    convs = {path: module for path, module in outside.items() if isinstance(module, kinds)}
    chain = [*convs.values()]
    mels, width = getattr(config, "num_mel_bins", None), _width(encoder)
    if not chain or not isinstance(mels, int) or not width or any(_is_strided(m) for m in _in_layers(encoder)):
        return None
    takes_image = isinstance(chain[0], nn.Conv2d)
    if chain[0].in_channels != (1 if takes_image else mels) or len({type(conv) for conv in chain}) > 1:
        return None
    if any(a.out_channels != b.in_channels for a, b in pairwise(chain)):
        return None
    # Encoders of chunks pad each of them.
    half = getattr(config, "n_window", None)
    frames = 2 * half if isinstance(half, int) and half > 0 else _LONG
    sizes = [*_sizes(chain, frames, -1)]
    heights = [*_sizes(chain, mels, 0)] if takes_image else [1] * len(chain)
    positions = {path: size * height / frames for path, size, height in zip(convs, sizes, heights, strict=True)}
    channels = chain[-1].out_channels * heights[-1]
    if takes_image:
        joins = (p for p, m in outside.items() if isinstance(m, nn.Linear) and m.in_features == channels)
        joined = next(joins, None)
        if joined is None:
            return None
        positions[joined] = sizes[-1] / frames
    elif channels != width:
        return None
    pools = [m for m in outside.values() if isinstance(m, nn.AvgPool1d)]
    pool = _along(pools[0].stride, 0) if pools and _averages(encoder) else 1
    infer = getattr(config, "n_window_infer", None)
    chunks = max(1, infer // frames) if isinstance(infer, int) else 1
    window = sizes[-1] * chunks if frames != _LONG else None
    return AudioEncoder(sizes[-1] / frames, window, positions, pool, width)


def _sizes(convs: Sequence[Any], size: int, dim: int) -> Iterator[int]:
    """Output sizes of convolutions, one after the other, along a dim."""
    for conv in convs:
        if conv.padding != "same":
            padding = 0 if conv.padding == "valid" else _along(conv.padding, dim)
            reach = _along(conv.dilation, dim) * (_along(conv.kernel_size, dim) - 1)
            size = (size + 2 * padding - reach - 1) // _along(conv.stride, dim) + 1
        yield size


def _averages(encoder: nn.Module) -> bool:
    """Whether the code averages rows: some encoders have the module and do not use it."""
    names = inspect.unwrap(type(encoder).forward).__code__.co_names
    return any("pool" in name and name != "pooler_output" for name in names)


def _along(value: Any, dim: int) -> int:
    return value if isinstance(value, int) else value[dim]


def _is_in_layer(path: str) -> bool:
    return any(name.isdigit() for name in path.split("."))


def _in_layers(encoder: nn.Module) -> Iterator[nn.Module]:
    return (module for path, module in encoder.named_modules() if _is_in_layer(path))


def _is_strided(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and any(step != 1 for step in module.stride)


def _width(encoder: nn.Module) -> int:
    """Channels of a row: what the first projection of the layers takes."""
    return next((m.in_features for m in _in_layers(encoder) if isinstance(m, nn.Linear)), 0)
