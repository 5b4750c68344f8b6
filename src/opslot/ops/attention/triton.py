"""Attention in Triton: windows, sinks, softcap, documents, selected keys and unequal head sizes, deterministic.

Visible keys are intervals (see kernels/intervals.py), so a program loops only over the keys that its queries see, and
packed documents cost the sum of their squared lengths. Keys that an indexer selects are bits (see
kernels/selected_tiles.py), and tiles without any are skipped. Forward saves its output and the logsumexp.

Shapes: B batch, S tokens, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from transformers.masking_utils import flash_attention_mask

from opslot._base.errors import KernelError
from opslot._base.kernel_launch import cdiv, compute_capability
from opslot.ops._common.arguments import adjacent, are_given, reject, zero
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.specs import FLOATS, H200, unsupported_dtype
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.kernels.backward import launch_dk_dv, launch_dq
from opslot.ops.attention.kernels.forward import launch_forward
from opslot.ops.attention.kernels.intervals import interval_strides, intervals
from opslot.ops.attention.kernels.selected_tiles import lists_of, tiles_with_bits, transpose_bits
from opslot.ops.attention.reference import causal_of, reject_options
from opslot.ops.attention.widths import widest_head

_LOG2E = math.log2(math.e)


def make_attention(
    name: str, attend: Callable[..., Tensor], served: tuple[str, ...] = ("softcap", "s_aux")
) -> Callable[..., tuple[Tensor, None]]:
    """The kernel `name`: checks its arguments and calls `attend`, which takes those of the function of that name.

    Args:
        served: the options that it supports.
    """

    @takes_call
    def attention(call: AttentionCall) -> tuple[Tensor, None]:
        """`op.reference` without dropout; `attention_mask` is a [B, S_kv] padding mask or None.

        A window without causality is that of FlashAttention: it ends `sliding_window - 1` tokens to either side. With
        `selected_bits`, these alone state which keys a query sees.
        """
        _check(name, call)
        _check_options(name, call, served)
        module, query, key, value, attention_mask, _, scaling, kwargs = call
        causal = causal_of(module, kwargs)
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        options = (kwargs.get("s_aux"), scale, causal, kwargs.get("sliding_window"), kwargs.get("softcap"))
        if kwargs.get("selected_bits") is not None:
            bits, group = kwargs["selected_bits"], q.shape[2] // k.shape[2]
            repeats = group // (group & -group)
            if repeats > 1:
                # The kernels read the bits of groups whose size is a power of two.
                k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
                bits = bits.repeat_interleave(repeats, 1) if bits.dim() == 4 else bits
            return attend(q, k, v, None, None, *options, bits), None
        if cu_q is None and attention_mask is not None:
            return _padded(attend, q, k, v, attention_mask, options), None
        return attend(q, k, v, cu_q, cu_k, *options), None

    attention.mask_function = flash_attention_mask  # type: ignore[attr-defined]
    return attention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    selected_bits: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, S, N, D] over k [B, S_kv, K, D] and v [B, S_kv, K, D_v]: [B, S, N, D_v].

    Args:
        cu_seqlens_q, cu_seqlens_k: document boundaries over B * S and B * S_kv tokens; the second is by default the
            first. Documents end at the ends of rows, and tokens after the last boundary are another document.
        sinks: [N], logits without a value in the softmax of every query.
        window: number of keys that a query sees, its own included.
        selected_bits: int32 [B, S, ceil(S_kv / 32)], all keys that each query sees, whatever the documents, causality
            and window, or [B, K, S, ceil(S_kv / 32)] for each key/value head. N / K is a power of two.
    """
    if cu_seqlens_k is cu_seqlens_q:
        # Dynamo rejects a tensor that is passed twice.
        cu_seqlens_k = None
    return _attention(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, selected_bits, scale, causal, window, softcap)


attention = make_attention("triton", attend, ("softcap", "s_aux", "selected_bits"))


def _check(name: str, call: AttentionCall) -> None:
    _, query, key, value, mask, dropout, scaling, _ = call
    kernel = f"attn_implementation={name!r}"
    if dropout:
        raise KernelError(
            f"{kernel} has no dropout", hint="set attention_dropout to 0, or use sdpa or flash_attention_2"
        )
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in FLOATS or x.dtype != query.dtype:
            found = unsupported_dtype(x.dtype) if x.dtype == query.dtype else f"it is {x.dtype}, query {query.dtype}"
            reject(kernel, argument, found, "load the model in one of these dtypes, or use eager")
    widest = widest_head(query.dtype)
    for argument, width in (("query", query.shape[-1]), ("value", value.shape[-1])):
        if width > widest:
            found = f"its head size is {width}, supported in {query.dtype} are sizes up to {widest}"
            reject(kernel, argument, found, "use sdpa or eager")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        found = f"its shape is {tuple(key.shape)} beside query's {tuple(query.shape)}"
        reject(kernel, "key", found, "expand it, or use eager")
    if value.shape[:3] != key.shape[:3]:
        found = f"its shape is {tuple(value.shape)} beside key's {tuple(key.shape)}"
        reject(kernel, "value", found, "expand it, or use eager")
    if query.shape[1] % key.shape[1]:
        reject(
            kernel, "key", f"{query.shape[1]} query heads are not a multiple of its {key.shape[1]}", "repeat its heads"
        )
    if mask is not None and mask.dim() != 2:
        found = f"it has {mask.dim()} dimensions, supported is a [B, S] padding mask"
        reject(kernel, "attention_mask", found, "pass cu_seq_lens_q or sliding_window instead, or use sdpa")
    if scaling is not None and scaling <= 0:
        reject(kernel, "scaling", f"it is {scaling}", "pass a positive factor")


def _check_options(name: str, call: AttentionCall, served: tuple[str, ...]) -> None:
    query, key, kwargs = call.query, call.key, call.kwargs
    kernel = f"attn_implementation={name!r}"
    reject_options(name, kwargs, served)
    bits = kwargs.get("selected_bits")
    if bits is not None:
        shape = (query.shape[0], query.shape[2], cdiv(key.shape[2], 32))
        of_heads = (shape[0], key.shape[1], *shape[1:])
        if bits.dtype != torch.int32 or bits.shape not in (shape, of_heads):
            found = f"it is {bits.dtype} {tuple(bits.shape)} for {key.shape[2]} keys"
            reject(kernel, "selected_bits", found, f"pass int32 {shape}, or {of_heads} for each key/value head")
    sinks, cu_q, cu_k = (kwargs.get(option) for option in ("s_aux", "cu_seq_lens_q", "cu_seq_lens_k"))
    if sinks is not None and sinks.shape != query.shape[1:2]:
        found = f"its shape is {tuple(sinks.shape)} beside {query.shape[1]} query heads"
        reject(kernel, "s_aux", found, "pass one number per query head")
    if cu_q is not None and cu_k is not None and cu_q.shape != cu_k.shape:
        found = f"it has {cu_k.shape[0]} boundaries beside {cu_q.shape[0]} of cu_seq_lens_q"
        reject(kernel, "cu_seq_lens_k", found, "give every document a boundary in both")


def _padded(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: tuple[Any, ...]
) -> Tensor:
    """Move padding to the end of each row, where it is a separate document; its outputs are zero."""
    k_mask = mask[:, -k.shape[1] :].bool()
    q_mask = k_mask[:, -q.shape[1] :]
    q_order, cu_q = _order(q_mask)
    k_order, cu_k = _order(k_mask)
    q, k, v = (x.take_along_dim(order, 1) for x, order in ((q, q_order), (k, k_order), (v, k_order)))
    out = attend(q, k, v, cu_q, cu_k, *options)
    return out.take_along_dim(q_order.argsort(dim=1), 1) * q_mask[..., None, None]


def _order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Order [B, S, 1, 1] that puts the tokens of a mask before the others, and boundaries between them."""
    batch, length = mask.shape
    starts = torch.arange(batch, device=mask.device) * length
    cu_seqlens = torch.stack([starts, starts + mask.sum(1)], 1).flatten().to(torch.int32)
    return mask.int().argsort(dim=1, descending=True, stable=True)[..., None, None], cu_seqlens


@dataclass(frozen=True)
class Tile:
    """Rows (query heads of a group times tokens) and keys of one step of a kernel."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def constants(self) -> tuple[int, int, int]:
        return self.rows, self.keys, self.stages


@dataclass(frozen=True)
class TilePlan:
    """Tiles of the kernels; two for dk and dv compute them in two launches, which needs fewer registers."""

    forward: Tile
    dq: Tile
    dk_dv: tuple[Tile, ...]


# By element size and padded head size. These fit into 99 KiB of shared memory, that of the smallest supported GPUs.
_PLANS = {
    (2, 64): TilePlan(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), (Tile(64, 64, 4, 2),)),
    (2, 128): TilePlan(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), (Tile(32, 64, 4, 2),)),
    (2, 192): TilePlan(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), (Tile(32, 64, 4, 1),)),
    (2, 256): TilePlan(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), (Tile(32, 64, 8, 1),) * 2),
    (2, 512): TilePlan(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), (Tile(16, 16, 4, 1),) * 2),
    (4, 64): TilePlan(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), (Tile(32, 32, 4, 2),)),
    (4, 128): TilePlan(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), (Tile(32, 32, 4, 1),)),
    (4, 192): TilePlan(Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), (Tile(16, 16, 4, 1),)),
    (4, 256): TilePlan(Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), (Tile(16, 16, 4, 1),)),
}
# The fastest of about 20 tiles for each kernel on an H200; for head size 128 those for packed documents, which take 2%
# more in full sequences.
_H200_PLANS = _PLANS | {
    (2, 64): TilePlan(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), (Tile(128, 64, 4, 2),)),
    (2, 128): TilePlan(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), (Tile(32, 64, 4, 3),)),
    (2, 192): TilePlan(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), (Tile(32, 128, 8, 3),)),
    (2, 256): TilePlan(Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), (Tile(32, 128, 8, 3), Tile(64, 128, 8, 2))),
    (2, 512): TilePlan(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), (Tile(64, 32, 8, 1), Tile(32, 64, 8, 2))),
}
# Windows shorter than a few tiles.
_NARROW = 256
_H200_NARROW_PLANS = {(2, 64): TilePlan(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), (Tile(128, 64, 4, 2),))}


# The fastest of five tiles for each kernel, with 2048 of 8192 keys in 128 heads.
_H200_SELECTED_PLANS = {(2, 192): TilePlan(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), (Tile(32, 64, 4, 3),))}


@functools.cache
def plan(
    element_bytes: int, width: int, narrow: bool, capability: tuple[int, int] | None, selected: bool = False
) -> TilePlan:
    """The tiles for padded heads of `width`.

    Args:
        narrow: for a window of few keys.
        selected: for keys that are given as bits.
    """
    key = element_bytes, next(size for size in (64, 128, 192, 256, 512) if width <= size)
    if capability != H200:
        return _PLANS[key]
    if selected:
        return _H200_SELECTED_PLANS.get(key, _H200_PLANS[key])
    return _H200_NARROW_PLANS.get(key, _H200_PLANS[key]) if narrow else _H200_PLANS[key]


@functools.cache
def head_tiles(width: int) -> tuple[int, int]:
    """Columns of the two tiles of a head: a power of two, and one for the rest, 0 if that saves nothing."""
    padded = max(16, triton.next_power_of_2(width))
    if padded == width or padded <= 32:
        return padded, 0
    tail = max(16, triton.next_power_of_2(width - padded // 2))
    return (padded, 0) if tail == padded // 2 else (padded // 2, tail)


class _Given(NamedTuple):
    """The arguments of the op; see `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    selected_bits: Tensor | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None

    def adjacent(self) -> _Given:
        """With adjacent channels of q, k and v."""
        return self._replace(q=adjacent(self.q), k=adjacent(self.k), v=adjacent(self.v))


class _Call:
    """What the kernels' launches have in common."""

    def __init__(self, given: _Given, *strided: Tensor) -> None:
        q, k, v, *_, selected_bits, scale, _, window, softcap = given
        self.batch, self.queries, self.heads, width = q.shape
        self.keys, self.kv_heads, v_width = k.shape[1], k.shape[2], v.shape[-1]
        self.group = self.heads // self.kv_heads
        self.empty = 0 in (self.batch, self.queries, self.heads)
        strides = [stride for x in (q, k, v, *strided) for stride in x.stride()[:3]]
        self.strides = tuple(strides)
        self.sizes = (self.batch, self.kv_heads, self.queries, self.keys)
        # With a softcap c, a score s is c * tanh(s * scale / c).
        self.factors = (scale * _LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E)
        unit = 1 if functools.reduce(lambda a, b: a | b, strides) % 8 else 8
        columns, tail = head_tiles(width)
        v_columns = max(16, triton.next_power_of_2(v_width))
        self.widths = (width, v_width, columns, tail, v_columns, unit)
        narrow = window is not None and window <= _NARROW
        widest = max(columns + tail, v_columns)
        self.plan = plan(q.element_size(), widest, narrow, compute_capability(q.device), selected_bits is not None)

    def blocks(self, size: int) -> tuple[int, int, int]:
        return size * self.batch * self.kv_heads, 1, 1


# Of a kernel: intervals of keys or queries, bits, the lists of tiles with bits; and three of its constants: whether
# there are bits, whether key/value heads have bits of their own, and whether all tiles that it reads are whole.
_Seen = tuple[tuple[Tensor | None, Tensor | None, Tensor | None], tuple[int, bool, bool]]


@dataclass(frozen=True)
class _Visible:
    """The keys that each query sees: intervals, or bits [B, S, words], or with `heads_apart` [B * K, S, words]."""

    call: _Call
    intervals: Tensor | None
    bits: Tensor | None
    heads_apart: bool = False

    def of_rows(self, tile: Tile) -> _Seen:
        """For a kernel over tiles of rows."""
        if self.bits is None:
            return (self.intervals, None, None), (0, False, False)
        found = tiles_with_bits(self.bits, self.call.keys, tile.rows, tile.keys, self.call.group)
        whole = self.call.keys % tile.keys == 0
        return (None, self.bits, lists_of(found)), (1, self.heads_apart, whole)

    def of_keys(self, tile: Tile, transposed: Tensor | None) -> _Seen:
        """For a kernel over tiles of keys; `transposed` bits."""
        if self.bits is None:
            return (self.intervals, None, None), (0, False, False)
        found = tiles_with_bits(self.bits, self.call.keys, tile.rows, tile.keys, self.call.group).transpose(1, 2)
        whole = self.call.queries * self.call.group % tile.rows == 0
        return (None, transposed, lists_of(found)), (1, self.heads_apart, whole)


def _visible(call: _Call, given: _Given) -> _Visible:
    bits = given.selected_bits
    if bits is not None:
        assert call.group & (call.group - 1) == 0, "a group whose size is not a power of two"
        heads_apart = bits.dim() == 4
        bits = bits.contiguous()
        return _Visible(call, None, bits.flatten(0, 1) if heads_apart else bits, heads_apart)
    boundaries = given.cu_seqlens_q, given.cu_seqlens_k
    return _Visible(call, intervals(given.q, given.k, *boundaries, given.causal, given.window), None)


def _allocate(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, D_v], and the logsumexp in base 2, [B, K, S * N / K] in float32."""
    batch, queries, heads, _ = q.shape
    lse = (batch, k.shape[2], queries * (heads // k.shape[2]))
    return q.new_empty(batch, queries, heads, v.shape[-1]), q.new_empty(lse, dtype=torch.float32)


def _run(outputs: tuple[Tensor, Tensor], *arguments: Any) -> None:
    given = _Given(*arguments).adjacent()
    q, k, v, sinks, *_, softcap = given
    call = _Call(given)
    if call.empty:
        return
    tile = call.plan.forward
    visible = _visible(call, given)
    seen, constants = visible.of_rows(tile)
    launch_forward(
        call.blocks(cdiv(call.queries * call.group, tile.rows)),
        (q, k, v, None if sinks is None else sinks.contiguous(), *seen, *outputs),
        (*call.strides, *interval_strides(visible.intervals)),
        (*call.sizes, *call.factors),
        (call.group, *constants, sinks is not None, softcap is not None, *call.widths, *tile.constants),
        tile.warps,
    )


def _run_backward(gradients: tuple[Tensor | None, ...], dout: Tensor, *arguments: Any) -> None:
    """Write those of the `gradients` of q, k, v and sinks that are not None."""
    dq, dk, dv, dsinks = gradients
    tensors, (out, lse), options = arguments[:7], arguments[7:9], arguments[9:-4]
    given = _Given(*tensors, *options).adjacent()
    q, k, v, sinks, *_, scale, _, _, softcap = given
    dout = adjacent(dout)
    call = _Call(given, dout)
    if call.empty:
        zero(*gradients)
        return
    visible = _visible(call, given)
    strides = (*call.strides, *interval_strides(visible.intervals))
    scalars = (*call.sizes, *call.factors, scale)
    delta = torch.empty_like(lse)
    tile = call.plan.dq
    seen, constants = visible.of_rows(tile)
    launch_dq(
        call.blocks(cdiv(call.queries * call.group, tile.rows)),
        (q, k, v, out, dout, *seen, lse, delta, dq),
        strides,
        scalars,
        (call.group, *constants, dq is not None, softcap is not None, *call.widths, *tile.constants),
        tile.warps,
    )
    tiles = call.plan.dk_dv
    transposed = None if visible.bits is None else transpose_bits(visible.bits, call.keys)
    launches = [(dk, dv)] if len(tiles) == 1 else [(dk, None), (None, dv)]
    for tile, (dk_out, dv_out) in zip(tiles, launches, strict=True):
        wanted = are_given(dk_out, dv_out)
        if call.keys == 0 or not any(wanted):
            continue
        seen, constants = visible.of_keys(tile, transposed)
        launch_dk_dv(
            call.blocks(cdiv(call.keys, tile.keys)),
            (q, k, v, dout, *seen, lse, delta, dk_out, dv_out),
            strides,
            scalars,
            (call.group, *constants, *wanted, softcap is not None, *call.widths, *tile.constants),
            tile.warps,
        )
    if dsinks is not None:
        assert sinks is not None
        dsinks.copy_(_sinks_gradient(sinks, lse, delta, call))


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, call: _Call) -> Tensor:
    """A sink's weight times -delta, summed over rows and tokens in a fixed order."""
    shape = (call.batch, call.kv_heads, call.queries, call.group)
    weight = torch.exp2(sinks.float().view(1, call.kv_heads, 1, call.group) * _LOG2E - lse.view(shape))
    return -(weight * delta.view(shape)).sum((0, 2)).flatten()


_attention = differentiable_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? selected_bits, float scale, bool causal, SymInt? window, float? softcap) -> (Tensor out, Tensor lse)",
    allocate=_allocate,
    launch=_run,
    launch_backward=_run_backward,
    differentiable=4,
    kept=("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k", "selected_bits", "out", "lse"),
    returned=1,
)
