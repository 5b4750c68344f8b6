"""Moments of an 8-bit optimizer (torchao) in checkpoints: codes, and the scale of each, so that they can be resharded.

torchao scales blocks of a rank's shard. Where blocks of the ranks that resume are not those that were saved, a block
with several scales is quantized again; otherwise a resumed run has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from opslot.distributed.dtensors import local_tensor

_CODES, _SCALES = "codes", "scales"


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of an optimizer with {codes, scales} instead of each quantized tensor."""
    return {key: _plain(value) for key, value in state.items()}


def quantized_state(held: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """`loaded`, a plain state dict, where what is quantized in `held` is written to those tensors."""
    result = dict(loaded)
    for key, live in held.items():
        if isinstance(live, Mapping):
            result[key] = quantized_state(live, loaded[key])
        elif _is_quantized(live):
            _write(local_tensor(live), *(local_tensor(loaded[key][name]) for name in (_CODES, _SCALES)))
            result[key] = live
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_state(value)
    if not _is_quantized(value):
        return value
    local: Any = local_tensor(value)
    scales = local.scale.repeat_interleave(local.codes.numel() // local.scale.numel()).view(local.codes.shape)
    parts = {_CODES: local.codes.clone(), _SCALES: scales}
    if not isinstance(value, DTensor):
        return parts
    where: dict[str, Any] = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return {n: DTensor.from_local(t, value.device_mesh, value.placements, **where) for n, t in parts.items()}


@torch.no_grad()
def _write(live: Any, codes: Tensor, scales: Tensor) -> None:
    blocks = scales.reshape(len(live.scale), -1)
    if torch.equal(blocks[:, :1].expand_as(blocks), blocks):
        live.codes.copy_(codes)
        live.scale.copy_(blocks[:, 0])
    else:
        live.copy_(live.qmap[codes.int()] * scales)


def _is_quantized(value: Any) -> bool:
    """Whether a tensor stores 8-bit codes and scales of blocks."""
    local = local_tensor(value) if isinstance(value, Tensor) else None
    return all(hasattr(local, name) for name in ("codes", "scale", "qmap"))
