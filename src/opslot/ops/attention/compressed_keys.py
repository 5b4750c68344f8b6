"""The gradient of keys for `compressed.py`, deterministic: by blocks of keys, or by the queries that select them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opslot._base.kernel_launch import cdiv, sm_count
from opslot.ops.attention.compressed_call import LOG2E, CompressedCall, pointer
from opslot.ops.attention.compressed_reference import selected_mask
from opslot.ops.attention.kernels.compressed_backward import launch_dkv, launch_selected_dkv, launch_sum_parts
from opslot.ops.attention.kernels.compressed_forward import COUNTS, INDICES
from opslot.ops.attention.kernels.intervals import interval_strides

# Memory for what single queries add to the keys that they select.
_PARTS_BYTES = 1 << 30
_ROWS_OF_SUM = 16


class BackwardInputs(NamedTuple):
    """What the gradient of keys is computed from."""

    q: Tensor
    kv: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    scale: float


def keys_gradient(call: CompressedCall, inputs: BackwardInputs, compressed: bool) -> Tensor:
    """The gradient [B, W, D] of the keys of the window or [B, T, D] of the compressed keys, in float32."""
    # By blocks, every query reads all earlier compressed keys, half of all on average; by queries, those that it
    # selects, whose parts then pass through memory.
    if compressed and call.kind == INDICES and call.compressed > 3 * call.places:
        return _by_query(call, inputs)
    return _by_block(call, inputs, compressed)


def _by_query(call: CompressedCall, inputs: BackwardInputs) -> Tensor:
    q, kv, dout, lse, delta, scale = inputs
    selected = call.selected
    assert selected is not None
    (tile,), keys, places = call.plan.dk_dv, call.compressed, call.places
    found = torch.zeros(call.batch, keys, call.width, dtype=torch.float32, device=q.device)
    tokens = max(1, _PARTS_BYTES // (call.batch * places * call.width * q.element_size()))
    tokens = min(tokens, call.queries)
    parts = q.new_empty(call.batch, tokens * places, call.width)
    width, columns, _ = call.widths
    for first in range(0, call.queries, tokens):
        count = min(tokens, call.queries - first)
        launch_selected_dkv(
            (count * cdiv(places, tile.keys), call.batch, 1),
            (q, kv, selected, dout, lse, delta, parts),
            (*call.strides, *call.selected_strides(selected), parts.stride(0)),
            (call.heads, call.queries, first, call.window_keys, places, scale * LOG2E, scale),
            (*call.widths, tile.rows, tile.keys, tile.stages),
            tile.warps,
        )
        # Stable, so that the parts of a key are in the order of queries. Places without a key are last.
        entries = selected[:, first : first + count].flatten(1)
        entries = entries.where(entries >= 0, keys).to(torch.int16 if keys < 2**15 else torch.int32)
        ordered, order = entries.sort(dim=1, stable=True)
        bounds = torch.arange(keys + 1, dtype=ordered.dtype, device=q.device).expand(call.batch, -1).contiguous()
        starts = torch.searchsorted(ordered, bounds, out_int32=True)
        order = order.to(torch.int32)
        launch_sum_parts(
            (keys, call.batch, 1),
            (parts, order, starts, found),
            (parts.stride(0), order.stride(0), starts.stride(0)),
            (keys,),
            (width, columns, _ROWS_OF_SUM),
            4,
        )
    return found


def _by_block(call: CompressedCall, inputs: BackwardInputs, compressed: bool) -> Tensor:
    q, kv, dout, lse, delta, scale = inputs
    (tile,) = call.plan.dk_dv
    keys = call.compressed if compressed else call.window_keys
    blocks = cdiv(keys, tile.keys)
    selected = call.selected
    if compressed:
        if call.kind == INDICES:
            assert selected is not None
            mask = selected_mask(selected, keys)
            assert mask is not None
            selected = mask.view(torch.uint8)
        spans = _spans_of_selected(call, selected, blocks, tile.keys)
    else:
        spans = _spans_of_window(call, blocks, tile.keys)
    # As many programs as keep all SMs busy; the parts of the queries are summed in a fixed order.
    parts = max(1, min(cdiv(4 * sm_count(q.device), blocks * call.batch), cdiv(call.queries, 16)))
    found = torch.empty(parts, call.batch, keys, call.width, dtype=torch.float32, device=q.device)
    rows = tile.rows
    launch_dkv(
        (blocks, call.batch, parts),
        (
            q,
            kv,
            spans,
            call.intervals,
            pointer(selected, call.intervals),
            pointer(None if compressed else call.real, call.intervals),
            dout,
            lse,
            delta,
            found,
        ),
        (
            *call.strides,
            spans.stride(0),
            *interval_strides(call.intervals),
            *call.selected_strides(selected if compressed else None),
            call.real_stride(),
        ),
        (call.heads, call.queries, call.window_keys if compressed else 0, keys, scale * LOG2E, scale),
        (
            compressed,
            call.kind,
            call.heads % rows == 0,
            call.real is not None and not compressed,
            *call.widths,
            rows,
            tile.keys,
            tile.stages,
        ),
        tile.warps,
    )
    return found[0] if parts == 1 else found.sum(0)


def _spans_of_window(call: CompressedCall, blocks: int, size: int) -> Tensor:
    """int32 [B, blocks, 2]: the first query that sees a key of a block, and the one after the last."""
    first = torch.arange(0, blocks * size, size, device=call.intervals.device)
    last = (first + size).clamp(max=call.window_keys) - 1
    spans = torch.stack([call.intervals[2][:, first], call.intervals[3][:, last]], 2)
    return spans.expand(call.batch, -1, -1).contiguous()


def _spans_of_selected(call: CompressedCall, selected: Tensor | None, blocks: int, size: int) -> Tensor:
    device = call.intervals.device
    if selected is None:
        spans = torch.zeros(call.batch, blocks, 2, dtype=torch.int32, device=device)
        # Not a tensor of both numbers, whose copy to a GPU would wait for it.
        spans[..., 1] = call.queries
        return spans
    if call.kind == COUNTS:
        seen = selected[:, :, None] > torch.arange(0, blocks * size, size, device=device)
    else:
        padded = torch.nn.functional.pad(selected, (0, blocks * size - call.compressed))
        seen = padded.unflatten(2, (blocks, size)).amax(3) > 0
    token = torch.arange(call.queries, dtype=torch.int32, device=device)[:, None]
    first = torch.where(seen, token, call.queries).amin(1)
    return torch.stack([first, torch.where(seen, token + 1, 0).amax(1).maximum(first)], 2)
