"""Quantized tensors of a checkpoint, dequantized part by part as they are read.

- FP8: `<name>` in float8, and a scale, `<name>_scale_inv` or another of `_SCALES`, that multiplies it: one value per
  tensor, expert, row or block.
- FP4: two e2m1 values per byte, the first in the low bits; a scale per row and block of 32 columns.
- MXFP4 as in gpt-oss: `<name>_blocks` [E, rows, columns / 32, 16] in FP4 and `<name>_scales` [E, rows, columns / 32]
  make `<name>` [E, columns, rows].

Scales in uint8 or float8_e8m0fnu are powers of two, 2 ** (byte - 127). Products are computed in float32, as
Transformers does, so that dequantized values in any dtype equal those that `from_pretrained` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError, list_problems
from opslot.checkpoint.safetensors_file import MappedFile, TensorEntry
from opslot.checkpoint.tensor_slice import Region, full_region

METHODS = ("fp8", "mxfp4")
"""Values of `quant_method` in a `quantization_config` that can be read."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.int8, torch.uint8)
# Where the scale of tensor `name` of a module is; the first is that of FP4.
_FP4_SCALE = "{module}.scale"
_SCALES = ("{name}_scale_inv", "{name}_scale", _FP4_SCALE, "{module}.qscale_weight")
# Scales of activations and of the key-value cache, for kernels that compute in float8.
_UNUSED = (
    "{name}_activation_scale",
    "{name}_input_scale",
    *(f"{{module}}.{name}" for name in ("activation_scale", "input_scale", "qscale_act", "k_scale", "v_scale")),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class QuantizedEntry(TensorEntry):
    """A quantized tensor, described as what it is once dequantized. Its bytes are those of `values`.

    Attributes:
        values: the quantized tensor in the file.
        scale: its scales, with as many dims.
        blocks: elements that share a scale, along each dim.
        packed: whether a byte holds two FP4 values.
        transposed: whether the last two dims are swapped after dequantization; `blocks` are those before it.
    """

    values: TensorEntry
    scale: TensorEntry
    blocks: tuple[int, ...]
    packed: bool = False
    transposed: bool = False


class QuantizedTensor:
    """A quantized tensor of mapped files, of which any region can be read.

    Args:
        entry: describes it.
        values, scale: views of the files.
    """

    def __init__(self, entry: QuantizedEntry, values: Tensor, scale: Tensor) -> None:
        self._entry, self._values, self._scale = entry, values, scale
        self.shape = entry.shape

    def __getitem__(self, region: Region) -> Tensor:
        """The dequantized values of a region, in the dtype of the entry."""
        if self._entry.transposed:
            region = (*region[:-2], region[-1], region[-2])
        values = self._unpacked(region) if self._entry.packed else self._values[region].float()
        values *= self._factor(region)
        return (values.mT if self._entry.transposed else values).to(self._entry.dtype)

    def _unpacked(self, region: Region) -> Tensor:
        *lead, columns = region
        packed = self._values[(*lead, slice(columns.start // 2, -(-columns.stop // 2)))].view(torch.uint8)
        table = torch.tensor(_E2M1)
        values = table[torch.stack((packed & 0xF, packed >> 4), -1).int()].flatten(-2)
        return values.narrow(-1, columns.start % 2, columns.stop - columns.start)

    def _factor(self, region: Region) -> Tensor:
        """The scale of each element of a region, or of a dim of size 1 where it is the same along the dim."""
        blocks = self._entry.blocks
        first = [r.start // block for r, block in zip(region, blocks)]
        factor = self._scale[tuple(slice(f, -(-r.stop // b)) for f, r, b in zip(first, region, blocks))]
        factor = (factor.float() - 127.0).exp2() if factor.dtype == torch.uint8 else factor.float()
        for dim, (r, block, start) in enumerate(zip(region, blocks, first)):
            if factor.shape[dim] > 1 and block > 1:
                factor = factor.repeat_interleave(block, dim).narrow(dim, r.start - start * block, r.stop - r.start)
        return factor


def open_tensor(mapped: MappedFile, entry: TensorEntry) -> Tensor | QuantizedTensor:
    """The tensor of `entry` in its mapped file: a view, or what dequantizes the regions that are read."""
    if not isinstance(entry, QuantizedEntry):
        return mapped.view(entry)
    scales = mapped if entry.scale.file == entry.file else MappedFile(entry.scale.file)
    return QuantizedTensor(entry, mapped.view(entry.values), scales.view(entry.scale))


def whole_tensor(mapped: MappedFile, entry: TensorEntry) -> Tensor:
    """The whole tensor of `entry`."""
    stored = open_tensor(mapped, entry)
    return stored if isinstance(stored, Tensor) else stored[full_region(entry.shape)]


def quantization_of(config: Any) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint's config.json, or of its text model; empty if there is none."""
    for part in (config, config.get("text_config")) if isinstance(config, Mapping) else ():
        given = part.get("quantization_config") if isinstance(part, Mapping) else None
        if given:
            return dict(given) if isinstance(given, Mapping) else {"quant_method": given}
    return {}


def remove_quantization_config(config: Any) -> None:
    """Delete `quantization_config` from a Transformers config and its text config; None has none."""
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def dequantized_entries(
    entries: Mapping[str, TensorEntry], config: Any, folder: Path, dtype: torch.dtype = torch.float32
) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint, with a quantized tensor and its scales as one that is dequantized when it is read.

    Args:
        entries: as `read_folder` returns them.
        config: config.json of the checkpoint.
        folder: of the checkpoint, for errors.
        dtype: of dequantized values.

    Raises:
        CheckpointError: the `quant_method` is not one of `METHODS`; scales are missing or do not fit (all are named,
            with their files).
    """
    quantization = quantization_of(config)
    method = quantization.get("quant_method", "fp8")
    if method not in METHODS:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is quantized in a format that opslot does not read",
            found=f"quantization_config in config.json: {str(method)[:60]}",
            hint=f"opslot reads {' and '.join(METHODS)}; load the original checkpoint, or dequantize this one with "
            "Transformers and save it",
        )
    return _Quantized(entries, method, quantization.get("weight_block_size"), dtype).result(folder)


class _Quantized:
    """Pairs quantized tensors with their scales."""

    def __init__(self, entries: Mapping[str, TensorEntry], method: str, block_size: Any, dtype: torch.dtype) -> None:
        self._entries, self._is_fp8, self._dtype = entries, method == "fp8", dtype
        self._block_size = tuple(block_size) if isinstance(block_size, Sequence) and len(block_size) == 2 else None
        self._used: set[str] = set()
        self._problems: list[str] = []

    def result(self, folder: Path) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for name, entry in self._entries.items():
            quantized = self._quantized(entry)
            found[name if quantized is None else quantized.name] = quantized or entry
        for name in sorted(found.keys() - self._used):
            self._check_alone(found[name])
        if self._problems:
            raise CheckpointError(
                list_problems(f"checkpoint {str(folder)!r} has quantized tensors that cannot be read", self._problems),
                hint="add the missing shards, or download the checkpoint again",
            )
        return {name: entry for name, entry in found.items() if name not in self._used}

    def _quantized(self, entry: TensorEntry) -> QuantizedEntry | None:
        """The dequantized form of `entry`; None if it is not quantized, or if that is a problem."""
        name = entry.name
        if name.endswith("_blocks") and entry.dtype in _BYTES and len(entry.shape) == 4:
            return self._mxfp4(entry)
        packed = entry.dtype in _BYTES and len(entry.shape) > 1
        if not packed and entry.dtype not in _FLOAT8:
            return None
        names = {"name": name, "module": name.removesuffix(".weight")}
        scale = next((s for form in _SCALES if (s := self._entries.get(form.format(**names))) is not None), None)
        if packed and scale is None and entry.dtype == torch.int8 and self._is_fp8:
            self._missing(entry, _FP4_SCALE.format(**names))
            return None
        if packed and (scale is None or scale.dtype != torch.float8_e8m0fnu):
            return None  # some other integers
        if scale is None:
            self._missing(entry, " or ".join(form.format(**names) for form in _SCALES[:2]))
            return None
        self._used |= {scale.name, *(form.format(**names) for form in _UNUSED)}
        return self._entry(name, entry, scale, packed=packed)

    def _mxfp4(self, entry: TensorEntry) -> QuantizedEntry | None:
        name = entry.name.removesuffix("_blocks")
        scale = self._entries.get(f"{name}_scales")
        if scale is None:
            self._missing(entry, f"{name}_scales")
            return None
        self._used |= {scale.name, entry.name}
        *lead, groups, size = entry.shape
        if scale.shape != (*lead, groups):
            self._problems.append(f"{_where(scale)}: found {list(scale.shape)}, expected {[*lead, groups]}")
            return None
        return self._entry(name, replace(entry, shape=(*lead, groups * size)), scale, packed=True, transposed=True)

    def _entry(
        self, name: str, values: TensorEntry, scale: TensorEntry, *, packed: bool, transposed: bool = False
    ) -> QuantizedEntry | None:
        *lead, columns = values.shape
        shape = (*lead, columns * 2) if packed else values.shape
        grid = (*scale.shape, *(1,) * (len(shape) - len(scale.shape)))
        blocks = None if len(grid) > len(shape) else self._blocks(shape, grid, packed)
        if blocks is None:
            sizes = f" in blocks of {list(self._block_size)}" if self._block_size else ""
            self._problems.append(
                f"{_where(scale)}: found {list(scale.shape)}, which does not fit {list(shape)}{sizes}"
            )
            return None
        final = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        scale = replace(scale, shape=grid)
        place = values.file, self._dtype, final, values.start, values.nbytes
        return QuantizedEntry(name, *place, values, scale, blocks, packed, transposed)

    def _blocks(self, shape: tuple[int, ...], grid: tuple[int, ...], packed: bool) -> tuple[int, ...] | None:
        """Elements per scale along each dim: the configured block size if it fits the grid, else equal parts."""
        size = None if packed else self._block_size
        sizes = [self._equal(n, parts) for n, parts in zip(shape, grid)]
        if size and len(shape) > 1 and grid[-2:] == tuple(-(-n // block) for n, block in zip(shape[-2:], size)):
            sizes[-2:] = size
        return None if None in sizes else tuple(s for s in sizes if s is not None)

    @staticmethod
    def _equal(size: int, parts: int) -> int | None:
        return max(size // parts, 1) if parts and size % parts == 0 else None

    def _check_alone(self, entry: TensorEntry) -> None:
        """Report a scale without its tensor. Names that only end in "scale" may be those of parameters."""
        name = entry.name
        is_scale = name.endswith(".weight_scale") or entry.dtype == torch.float8_e8m0fnu
        if name.endswith("_scale_inv"):
            self._missing(entry, f"{name.removesuffix('_scale_inv')} in float8")
        elif self._is_fp8 and is_scale and name.endswith("_scale"):
            self._missing(entry, f"{name.removesuffix('_scale')} in float8 or FP4")
        elif self._is_fp8 and is_scale and name.endswith(".scale"):
            self._missing(entry, f"{name.removesuffix('.scale')}.weight in float8 or FP4")
        elif entry.name.endswith("_scales") and entry.dtype == torch.uint8:
            self._missing(entry, f"{entry.name.removesuffix('_scales')}_blocks")

    def _missing(self, entry: TensorEntry, expected: str) -> None:
        kind = str(entry.dtype).removeprefix("torch.")
        self._problems.append(f"{_where(entry)} is {kind}, and the checkpoint lacks {expected}")


def _where(entry: TensorEntry) -> str:
    return f"{entry.name} ({entry.file.name})"
