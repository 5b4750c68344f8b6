"""Attention to a sliding window and to compressed keys in Triton, as DeepSeek-V4 has it; deterministic.

All query heads share one key/value head, whose keys are the values too. Keys that a query does not see are not read in
forward and for the gradient of queries, so these cost what the window and the selected keys cost. The gradient of keys
costs causal attention to all compressed keys, since a block of them is selected by nearly all later queries.

Shapes: B batch, S tokens, N query heads, W keys of the window, T compressed keys, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot._base.kernel_launch import cdiv, compute_capability, sm_count
from opslot.ops._common.arguments import adjacent, copy_or_zero, in_autocast_dtype, reject
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.specs import FLOATS, H200, unsupported_dtype
from opslot.ops.attention.compressed_reference import selected_mask
from opslot.ops.attention.kernels.compressed_backward import launch_dkv, launch_dq
from opslot.ops.attention.kernels.compressed_forward import ALL, COUNTS, INDICES, launch_forward
from opslot.ops.attention.kernels.intervals import intervals
from opslot.ops.attention.masks import Layout, pattern_of
from opslot.ops.attention.reference import reject_options
from opslot.ops.attention.triton import Tile

_LOG2E = math.log2(math.e)
_KERNEL = "attn_implementation='triton'"
WIDEST = 512


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`compressed_reference.reference` without dropout; `attention_mask` may also be a `Layout`."""
    if isinstance(attention_mask, Layout):
        kwargs, attention_mask = attention_mask.arguments(query, kwargs), None
    _check(query, key, value, attention_mask, dropout, kwargs)
    query, key = in_autocast_dtype(query, key)
    compressed, selected = kwargs.get("compressed_keys", 0), kwargs.get("selected")
    window_keys = key.shape[2] - compressed
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    real = None if attention_mask is None else attention_mask[:, -window_keys:].to(torch.uint8)
    cu_seqlens, sinks, window = kwargs.get("cu_seq_lens_q"), kwargs.get("s_aux"), kwargs.get("sliding_window")
    q, kv = query.transpose(1, 2), key[:, 0]
    return _attention(q, kv, sinks, selected, real, cu_seqlens, compressed, scale, window), None


def padding_mask(
    kv_length: int, mask_function: Any, attention_mask: Tensor | None = None, **given: Any
) -> Tensor | None:
    """The mask function of the kernel: a [B, S_kv] mask of causal attention with padding, or None without padding."""
    pattern = None if torch.compiler.is_compiling() else pattern_of(mask_function)
    known = pattern is not None and pattern.causal and pattern.chunk is None and pattern.documents is None
    if not known and not torch.compiler.is_compiling():
        raise KernelError(
            f"{_KERNEL} cannot apply this mask ({getattr(mask_function, '__qualname__', mask_function)})",
            hint="use eager",
        )
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        found = f"it has {attention_mask.dim()} dimensions, supported is a [B, S] padding mask"
        reject(_KERNEL, "attention_mask", found, "use eager")
    return attention_mask[:, -kv_length:]


attention.mask_function = padding_mask  # type: ignore[attr-defined]
attention.reads_layout = True  # type: ignore[attr-defined]


def _check(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Any, dropout: float, kwargs: Mapping[str, Any]
) -> None:
    reject_options("triton", kwargs, served=("s_aux",))
    if dropout:
        raise KernelError(f"{_KERNEL} has no dropout", hint="set attention_dropout to 0, or use eager")
    for argument, x in (("query", query), ("key", key)):
        if x.dtype not in FLOATS:
            reject(_KERNEL, argument, unsupported_dtype(x.dtype), "load the model in one of these dtypes, or use eager")
    if query.shape[-1] > WIDEST:
        found = f"its head size is {query.shape[-1]}, supported are sizes up to {WIDEST}"
        reject(_KERNEL, "query", found, "use eager")
    batch, heads, length, width = query.shape
    if key.shape[:2] != (batch, 1) or key.shape[3] != width:
        found = f"its shape is {tuple(key.shape)} beside query's {tuple(query.shape)}, supported is one head"
        reject(_KERNEL, "key", found, "use eager")
    if value is not None and value is not key:
        reject(_KERNEL, "value", "it is not the tensor that is also the key", "pass key as value, or use eager")
    compressed, selected, cu_seqlens = (kwargs.get(name) for name in ("compressed_keys", "selected", "cu_seq_lens_q"))
    if compressed and cu_seqlens is not None:
        found = "documents would see each other's compressed keys"
        reject(_KERNEL, "cu_seq_lens_q", found, "call attention once for each document")
    if mask is not None and mask.dim() != 2:
        found = f"it has {mask.dim()} dimensions, supported is a [B, W] padding mask"
        reject(_KERNEL, "attention_mask", found, "use eager")
    if selected is not None and (selected.is_floating_point() or selected.shape[:2] != (batch, length)):
        found = f"it is {tuple(selected.shape)} {selected.dtype} for {batch} x {length} queries"
        reject(_KERNEL, "selected", found, "pass indices [B, S, K], or counts [B, S]")
    sinks = kwargs.get("s_aux")
    if sinks is not None and sinks.shape != (heads,):
        found = f"its shape is {tuple(sinks.shape)} beside {heads} query heads"
        reject(_KERNEL, "s_aux", found, "pass one number per query head")


@dataclass(frozen=True)
class Plan:
    """Tiles of the kernels. `rows` are query heads of one token; those of `dkv` are of several."""

    forward: Tile
    dq: Tile
    dkv: Tile


# By element size. These fit into 99 KiB of shared memory, that of the smallest supported GPUs, at the widest head.
PLANS = {
    2: Plan(Tile(16, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 32, 4, 1)),
    4: Plan(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
H200_PLANS = PLANS | {2: Plan(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))}


def plan(element_bytes: int, capability: tuple[int, int] | None) -> Plan:
    return (H200_PLANS if capability == H200 else PLANS)[element_bytes]


class _Call:
    """What the kernels' launches have in common."""

    def __init__(
        self,
        q: Tensor,
        kv: Tensor,
        selected: Tensor | None,
        real: Tensor | None,
        cu_seqlens: Tensor | None,
        compressed: int,
        window: int | None,
    ) -> None:
        self.batch, self.queries, self.heads, self.width = q.shape
        self.window_keys, self.compressed = kv.shape[1] - compressed, compressed
        self.empty = 0 in q.shape
        self.plan = plan(q.element_size(), compute_capability(q.device))
        self.selected = None if selected is None else selected.contiguous()
        self.kind = ALL if selected is None else COUNTS if selected.dim() == 2 else INDICES
        self.places = selected.shape[2] if selected is not None and selected.dim() == 3 else 1
        self.real = None if real is None else real.contiguous()
        self.strides = (*q.stride()[:3], *kv.stride()[:2])
        unit = 1 if functools.reduce(lambda a, b: a | b, self.strides) % 8 else 8
        self.widths = (self.width, max(16, triton.next_power_of_2(self.width)), unit)
        self.intervals = intervals(q, kv[:, : self.window_keys, None], cu_seqlens, None, True, window)

    def rows(self, tile: Tile) -> int:
        return min(tile.rows, max(16, triton.next_power_of_2(self.heads)))

    def interval_strides(self) -> tuple[int, int]:
        found = self.intervals
        return 0 if found.shape[1] == 1 else found.stride(1), found.stride(0)

    def selected_strides(self, selected: Tensor | None) -> tuple[int, int]:
        return (0, 0) if selected is None else (selected.stride(0), selected.stride(1))

    def real_stride(self) -> int:
        return 0 if self.real is None else self.real.stride(0)

    def by_token(self, tile: Tile) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...]]:
        """Grid, strides and constants of the kernels over queries."""
        rows = self.rows(tile)
        grid = (self.queries * cdiv(self.heads, rows), self.batch, 1)
        strides = (
            *self.strides,
            *self.interval_strides(),
            *self.selected_strides(self.selected),
            self.real_stride(),
        )
        places = triton.next_power_of_2(self.places)
        constants = (self.kind, places, self.real is not None, *self.widths, rows, tile.keys, tile.stages)
        return grid, strides, constants

    def sizes(self) -> tuple[int, int, int, int, int]:
        return self.heads, self.queries, self.window_keys, self.compressed, self.places


def _allocate(q: Tensor, kv: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, D], and the logsumexp in base 2, [B, S, N] in float32."""
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


def _run(
    outputs: tuple[Tensor, Tensor],
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    selected: Tensor | None,
    real: Tensor | None,
    cu_seqlens: Tensor | None,
    compressed: int,
    scale: float,
    window: int | None,
) -> None:
    q, kv = map(adjacent, (q, kv))
    call = _Call(q, kv, selected, real, cu_seqlens, compressed, window)
    if call.empty:
        return
    tile = call.plan.forward
    grid, strides, constants = call.by_token(tile)
    launch_forward(
        grid,
        (
            q,
            kv,
            None if sinks is None else sinks.contiguous(),
            call.intervals,
            _or(call.selected, call.intervals),
            _or(call.real, call.intervals),
            *outputs,
        ),
        strides,
        (*call.sizes(), scale * _LOG2E),
        (sinks is not None, *constants),
        tile.warps,
    )


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel does arithmetic with, but does not read, where there is no tensor."""
    return other if x is None else x


def _run_backward(
    gradients: tuple[Tensor | None, ...],
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    selected: Tensor | None,
    real: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    compressed: int,
    scale: float,
    window: int | None,
    *_: bool,
) -> None:
    """Write those of the `gradients` of q, kv and sinks that are not None."""
    dq, dkv, dsinks = gradients
    q, kv = map(adjacent, (q, kv))
    dout = dout.contiguous()
    call = _Call(q, kv, selected, real, cu_seqlens, compressed, window)
    if call.empty:
        for gradient in gradients:
            copy_or_zero(gradient, None)
        return
    delta = torch.empty_like(lse)
    tile = call.plan.dq
    grid, strides, constants = call.by_token(tile)
    launch_dq(
        grid,
        (
            q,
            kv,
            call.intervals,
            _or(call.selected, call.intervals),
            _or(call.real, call.intervals),
            out,
            dout,
            lse,
            delta,
            dq,
        ),
        strides,
        (*call.sizes(), scale * _LOG2E, scale),
        (dq is not None, *constants),
        tile.warps,
    )
    if dkv is not None:
        near, far = dkv.split([call.window_keys, call.compressed], 1)
        for gradient, is_compressed in ((near, False), (far, True)):
            if gradient.shape[1]:
                gradient.copy_(_keys_gradient(call, q, kv, dout, lse, delta, scale, is_compressed))
    if dsinks is not None:
        assert sinks is not None
        weight = torch.exp2(sinks.float() * _LOG2E - lse)
        dsinks.copy_(-(weight * delta).sum((0, 1)))


def _keys_gradient(
    call: _Call, q: Tensor, kv: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float, compressed: bool
) -> Tensor:
    """The gradient, in float32, of the keys of the window or of the compressed keys."""
    tile = call.plan.dkv
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
            _or(selected, call.intervals),
            _or(None if compressed else call.real, call.intervals),
            dout,
            lse,
            delta,
            found,
        ),
        (
            *call.strides,
            spans.stride(0),
            *call.interval_strides(),
            *call.selected_strides(selected if compressed else None),
            call.real_stride(),
        ),
        (call.heads, call.queries, call.window_keys if compressed else 0, keys, scale * _LOG2E, scale),
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


def _spans_of_window(call: _Call, blocks: int, size: int) -> Tensor:
    """int32 [B, blocks, 2]: the first query that sees a key of a block, and the one after the last."""
    first = torch.arange(0, blocks * size, size, device=call.intervals.device)
    last = (first + size).clamp(max=call.window_keys) - 1
    spans = torch.stack([call.intervals[2][:, first], call.intervals[3][:, last]], 2)
    return spans.expand(call.batch, -1, -1).contiguous()


def _spans_of_selected(call: _Call, selected: Tensor | None, blocks: int, size: int) -> Tensor:
    device = call.intervals.device
    if selected is None:
        return torch.tensor([0, call.queries], dtype=torch.int32, device=device).expand(call.batch, blocks, 2).clone()
    if call.kind == COUNTS:
        seen = selected[:, :, None] > torch.arange(0, blocks * size, size, device=device)
    else:
        padded = torch.nn.functional.pad(selected, (0, blocks * size - call.compressed))
        seen = padded.unflatten(2, (blocks, size)).amax(3) > 0
    token = torch.arange(call.queries, dtype=torch.int32, device=device)[:, None]
    first = torch.where(seen, token, call.queries).amin(1)
    return torch.stack([first, torch.where(seen, token + 1, 0).amax(1).maximum(first)], 2)


_attention = differentiable_op(
    "compressed_attention(Tensor q, Tensor kv, Tensor? sinks, Tensor? selected, Tensor? real, Tensor? cu_seqlens,"
    " SymInt compressed, float scale, SymInt? window) -> (Tensor out, Tensor lse)",
    allocate=_allocate,
    launch=_run,
    launch_backward=_run_backward,
    differentiable=3,
    kept=("q", "kv", "sinks", "selected", "real", "cu_seqlens", "out", "lse"),
    returned=1,
)
