"""Attention to a sliding window and to compressed keys in Triton, as DeepSeek-V4 has it; deterministic.

All query heads share one key/value head, whose keys are the values too. Keys that a query does not see are not read in
forward and for the gradient of queries, so these cost what the window and the selected keys cost. The gradient of
keys costs causal attention to all compressed keys, since a block of them is selected by nearly all later queries; where
few of many keys are selected, it costs as much as that of queries, and memory for what each query adds.

Shapes: B batch, S tokens, N query heads, W keys of the window, T compressed keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot._base.errors import KernelError
from opslot.ops._common.arguments import in_autocast_dtype, reject, zero
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops.attention.compressed_call import LOG2E, CompressedCall, CompressedInputs
from opslot.ops.attention.compressed_keys import BackwardInputs, keys_gradient
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.kernels.compressed_backward import launch_dq
from opslot.ops.attention.kernels.compressed_forward import launch_forward
from opslot.ops.attention.layout import Layout
from opslot.ops.attention.mask_patterns import pattern_of
from opslot.ops.attention.reference import reject_options

_KERNEL = "attn_implementation='triton'"
WIDEST = 512


@takes_call
def attention(call: AttentionCall) -> tuple[Tensor, None]:
    """`compressed_reference.reference` without dropout; `attention_mask` may also be a `Layout`."""
    _, query, key, value, attention_mask, dropout, scaling, kwargs = call
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


def _allocate(q: Tensor, kv: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, D], and the logsumexp in base 2, [B, S, N] in float32."""
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


def _run(outputs: tuple[Tensor, Tensor], *arguments: Any) -> None:
    inputs = CompressedInputs(*arguments).adjacent()
    q, kv, sinks, *_, scale, _ = inputs
    call = CompressedCall(inputs)
    if call.empty:
        return
    tile = call.plan.forward
    grid, strides, constants = call.by_token(tile)
    launch_forward(
        grid,
        (q, kv, None if sinks is None else sinks.contiguous(), *call.seen, *outputs),
        strides,
        (*call.sizes(), scale * LOG2E),
        (sinks is not None, *constants),
        tile.warps,
    )


def _run_backward(gradients: tuple[Tensor | None, ...], dout: Tensor, *arguments: Any) -> None:
    """Write those of the `gradients` of q, kv and sinks that are not None."""
    dq, dkv, dsinks = gradients
    tensors, (out, lse), options = arguments[:6], arguments[6:8], arguments[8:-3]
    inputs = CompressedInputs(*tensors, *options).adjacent()
    q, kv, sinks, *_, scale, _ = inputs
    dout = dout.contiguous()
    call = CompressedCall(inputs)
    if call.empty:
        zero(*gradients)
        return
    delta = torch.empty_like(lse)
    tile = call.plan.dq
    grid, strides, constants = call.by_token(tile)
    launch_dq(
        grid,
        (q, kv, *call.seen, out, dout, lse, delta, dq),
        strides,
        (*call.sizes(), scale * LOG2E, scale),
        (dq is not None, *constants),
        tile.warps,
    )
    if dkv is not None:
        given = BackwardInputs(q, kv, dout, lse, delta, scale)
        near, far = dkv.split([call.window_keys, call.compressed], 1)
        for gradient, is_compressed in ((near, False), (far, True)):
            if gradient.shape[1]:
                gradient.copy_(keys_gradient(call, given, is_compressed))
    if dsinks is not None:
        assert sinks is not None
        weight = torch.exp2(sinks.float() * LOG2E - lse)
        dsinks.copy_(-(weight * delta).sum((0, 1)))


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
