"""torch's scaled_dot_product_attention: packed documents by cu_seqlens, without the math backend.

Only on the CPU a bias that is trained takes the math backend.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.masking_utils import sdpa_mask

from opslot._base.errors import KernelError
from opslot._base.host_values import host_values
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.head_sizes import resize_heads
from opslot.ops.attention.reference import causal_of, document_bounds, reject_options, visible, window_of

# Without math, which computes the full score matrix and is an order of magnitude slower at training lengths.
_FUSED = {
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "cpu": [SDPBackend.FLASH_ATTENTION],
}
_HALF = (torch.float16, torch.bfloat16)
# The head size up to which torch has a variable-length flash kernel.
_WIDEST = 256
# torch's error messages if no allowed backend supports a call.
_NO_BACKEND = ("No available kernel", "No viable backend")


class _Call(NamedTuple):
    """What all calls of torch's function have in common; `backends` are those allowed, None for all."""

    name: str
    backends: list[SDPBackend] | None
    dropout: float
    scaling: float | None


def _packs_keys(query: Tensor, value: Tensor) -> bool:
    """Whether attention to keys without padding runs in the variable-length flash kernel, without a mask."""
    return query.is_cuda and query.dtype in _HALF and max(query.shape[-1], value.shape[-1]) <= _WIDEST


def _kernel(name: str, backends_on: Callable[[str], list[SDPBackend] | None]) -> Callable[..., tuple[Tensor, None]]:
    """`op.reference` without softcap and sinks, through the backends of torch for a type of device; raises without one.

    Args:
        backends_on: None for those that torch selects.
    """

    @takes_call
    def attention(call: AttentionCall) -> tuple[Tensor, None]:
        sdpa_call = _Call(name, backends_on(call.query.device.type), call.dropout, call.scaling)
        return _attend(sdpa_call, call), None

    attention.mask_function = sdpa_mask  # type: ignore[attr-defined]
    attention.packs_keys = _packs_keys  # type: ignore[attr-defined]
    return attention


# On CUDA flash if it supports the input, else memory-efficient; the CPU's fused attention has no dropout.
sdpa = _kernel("sdpa", lambda device: _FUSED.get(device))
# Packed documents and sliding windows take torch's variable-length flash kernel: cuDNN's in torch 2.11
# (`aten::_cudnn_attention_forward` with cumulative lengths) gives wrong gradients and takes 90 ms on an H200.
cudnn = _kernel("cudnn", lambda device: [SDPBackend.CUDNN_ATTENTION])


def _attend(call: _Call, given: AttentionCall) -> Tensor:
    module, query, key, value, attention_mask, *_, kwargs = given
    reject_options(call.name, kwargs)
    causal = causal_of(module, kwargs)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None or attention_mask is None:
        window = window_of(key, kwargs)
        if (cu_seqlens is not None or window is not None) and _packs_keys(query, value):
            return _varlen(call, given, causal, window)
        if cu_seqlens is not None and window is None and not torch.compiler.is_compiling():
            return _documents_loop(call, query, key, value, cu_seqlens, causal)
        # torch's `is_causal` aligns the mask to the top left.
        square = query.shape[2] == key.shape[2]
        attention_mask = visible(module, query, key, kwargs) if cu_seqlens is not None or window or not square else None
    causal = query.shape[2] > 1 and attention_mask is None and causal
    groups = query.shape[1] // key.shape[1]
    # On CUDA only flash and cuDNN support grouped heads, and flash supports neither a mask nor fp32 nor wide heads.
    if groups > 1 and query.is_cuda and (attention_mask is not None or not _packs_keys(query, value)):
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _fused(call, query, key, value, attention_mask, causal).transpose(1, 2).contiguous()


def _fused(call: _Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """One call of torch's function [B, heads, S, D], restricted to the call's backends."""
    name, backends, dropout, scaling = call
    width = value.shape[-1]
    # Fused backends require adjacent channels.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    mask = mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()
    if query.is_cpu and width != query.shape[-1]:
        # The CPU's fused attention requires equal head sizes of queries and values (DeepSeek's differ).
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        widest = max(width, query.shape[-1])
        query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    # Branches, here and for `causal`: torch.compile specializes on them, but passes on a comparison as a symbol.
    grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210

    def run() -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        )

    if backends is None:
        return run()
    if query.is_cpu and mask is not None and mask.requires_grad:
        # The CPU's fused attention gives no gradient to a bias, which is as large as the scores.
        backends = [SDPBackend.MATH]
    with sdpa_kernel(backends):
        try:
            return run()[..., :width]
        except RuntimeError as error:
            if not any(message in str(error) for message in _NO_BACKEND):
                raise
            reasons = _reasons(run)
            raise KernelError(
                f"attn_implementation={name!r}: no fused backend of torch supports query "
                f"{tuple(query.shape)} {query.dtype} with key {tuple(key.shape)} on "
                f"{query.device.type}, and the math backend is never used silently",
                found=reasons,
                hint=f"use {'triton, flex_attention or ' if query.is_cuda else ''}eager"
                + (", or set attention_dropout to 0" if dropout else ""),
            ) from error


def _reasons(run: Callable[[], Tensor]) -> str:
    """torch's reasons against each backend, which it gives as warnings, by default once per process."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(RuntimeError):
                run()
    finally:
        torch.set_warn_always(always)
    reasons = (str(w.message).partition(" (Triggered internally")[0] for w in caught)
    return " ".join(dict.fromkeys(s for s in reasons if not s.endswith("because:"))) or "torch gives no reason"


def _varlen(call: _Call, given: AttentionCall, causal: bool, window: int | None) -> Tensor:
    """All documents (without `cu_seq_lens_q`: all rows) in one launch of torch's variable-length flash kernel."""
    _, query, key, value, *_, kwargs = given
    width, value_width = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    batch, _, length, _ = query.shape
    bounds = _bounds(call.name, query, key, kwargs)
    heads = resize_heads([x.transpose(1, 2) for x in (query, key, value)], [width] * 3)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in heads)
    out = torch.ops.aten._flash_attention_forward(
        *(q, k, v),
        *bounds,
        call.dropout,
        causal,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0 if causal else window - 1,
    )[0]
    return resize_heads([out.view(batch, length, -1, width)], [value_width])[0]


def _bounds(name: str, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int, int]:
    if kwargs.get("cu_seq_lens_q") is None:
        rows = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        return rows * query.shape[2], rows * key.shape[2], query.shape[2], key.shape[2]
    cu_q, cu_k, longest_q, longest_k = document_bounds(name, query.shape[::2], key.shape[::2], kwargs)
    return cu_q.to(torch.int32), cu_k.to(torch.int32), longest_q, longest_k


def _documents_loop(call: _Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
    """One call per document: the cost is the sum of squared lengths, not the square of the sum."""
    batch, heads, length, _ = query.shape
    if key.shape[2] != length:
        raise KernelError(
            f"attn_implementation={call.name!r}: packed documents of {length} queries and {key.shape[2]} keys in a row",
            hint="give every document as many keys as queries",
        )
    groups = heads // key.shape[1]
    if query.is_cuda and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    q, k, v = (x.transpose(0, 1).reshape(1, x.shape[1], batch * length, -1) for x in (query, key, value))
    # No document crosses rows; any tokens after the last boundary are also a document.
    bounds = sorted({*host_values(cu_seqlens).tolist(), *range(length, batch * length + 1, length or 1)})
    parts = [
        _fused(call, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None, causal)
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    return torch.cat(parts, 2).transpose(1, 2).reshape(batch, length, heads, -1).contiguous()
