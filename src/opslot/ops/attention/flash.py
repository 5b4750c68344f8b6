"""FlashAttention 2, 3 and 4: one adapter over the three libraries' dense and variable-length functions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import flash_attention_mask

from opslot._base.errors import KernelError
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.head_sizes import resize_heads
from opslot.ops.attention.layout import Keys
from opslot.ops.attention.reference import causal_of, document_bounds, reject_options
from opslot.ops.attention.widths import padded_widths

# version -> module with flash_attn_func and flash_attn_varlen_func
_LIBRARIES = {2: "flash_attn", 3: "flash_attn_interface", 4: "opslot.ops.attention.flash4"}


def make_flash(version: int) -> Callable[..., Any]:
    """Attention through FlashAttention `version`; imports that library."""
    library = importlib.import_module(_LIBRARIES[version])
    dense, varlen = library.flash_attn_func, library.flash_attn_varlen_func

    @takes_call
    def flash(call: AttentionCall) -> tuple[Tensor, None]:
        """`op.reference`, but `attention_mask` is a [B, S] padding mask or None; only version 4 supports sinks."""
        options = _options(version, call)
        _, query, key, value, attention_mask, *_, kwargs = call
        packed = kwargs.get("cu_seq_lens_q") is not None
        if version == 4 and (packed or attention_mask is not None):
            _reject_softcap(query, kwargs)
        q, k, v = _pad_heads(version, *(x.transpose(1, 2) for x in (query, key, value)))

        def run(function: Callable[..., Any], *args: Any, **bounds: Any) -> Tensor:
            out = function(*args, **bounds, **options)
            return out[0] if isinstance(out, tuple) else out

        if packed:
            out = _packed(f"flash_attention_{version}", functools.partial(run, varlen), q, k, v, kwargs)
        elif attention_mask is not None:
            out = _padded(functools.partial(run, varlen), q, k, v, attention_mask)
        else:
            out = run(dense, q, k, v)
        return resize_heads([out], [value.shape[-1]])[0], None

    flash.mask_function = flash_attention_mask  # type: ignore[attr-defined]
    return flash


def _reject_softcap(query: Tensor, kwargs: Mapping[str, Any]) -> None:
    """Raise for what the library's backward asserts."""
    if kwargs.get("softcap") is not None and torch.is_grad_enabled() and query.requires_grad:
        raise KernelError(
            "attn_implementation='flash_attention_4' has no softcap in the backward pass of packed or padded samples",
            found=f"softcap {kwargs['softcap']}",
            hint="use triton or flex_attention",
        )


def _options(version: int, call: AttentionCall) -> dict[str, Any]:
    module, query, *_, dropout, scaling, kwargs = call
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise KernelError(
            f"attn_implementation='flash_attention_{version}' requires float16 or bfloat16",
            found=f"query is {query.dtype}",
            hint="load the model in bfloat16, use autocast, or use sdpa",
        )
    served = ("softcap", "s_aux") if version == 4 else ("softcap",)
    reject_options(f"flash_attention_{version}", kwargs, served)
    causal = causal_of(module, kwargs)
    # The libraries' default would be that of the padded head size.
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": query.shape[2] > 1 and causal}
    window = kwargs.get("sliding_window")
    if window is not None:
        options["window_size"] = (window - 1, 0 if causal else window - 1)
    if kwargs.get("softcap") is not None:
        options["softcap"] = kwargs["softcap"]
    if kwargs.get("s_aux") is not None:
        if query.dtype != torch.bfloat16:
            raise KernelError(
                "attn_implementation='flash_attention_4' has sinks in bfloat16 only",
                found=f"query is {query.dtype}",
                hint="use triton",
            )
        options["sinks"] = kwargs["s_aux"].to(query.dtype)
    if kwargs.get("deterministic"):
        if version == 4:
            raise KernelError(
                "attn_implementation='flash_attention_4' has no option deterministic",
                hint="use triton, whose gradients are deterministic, or flash_attention_2 or 3",
            )
        options["deterministic"] = True
    if dropout:
        if version != 2:
            raise KernelError(
                f"attn_implementation='flash_attention_{version}' has no dropout",
                hint="set attention_dropout to 0, or use flash_attention_2",
            )
        options["dropout_p"] = dropout
    return options


def _pad_heads(version: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Pad the head sizes with zeros to those that the library computes; the output is cut afterwards."""
    padded = padded_widths(version, q.shape[-1], v.shape[-1], grouped=q.shape[-2] != k.shape[-2])
    if padded is None:
        raise KernelError(
            f"attn_implementation='flash_attention_{version}' supports head sizes up to 256, query has "
            f"{q.shape[-1]} and value {v.shape[-1]}",
            hint="use sdpa or eager",
        )
    return resize_heads([q, k, v], [padded[0], padded[0], padded[1]])


def _packed(name: str, run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Tensor:
    cu_q, cu_k, longest_q, longest_k = document_bounds(name, q.shape[:2], k.shape[:2], kwargs)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = run(*flat, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k)
    return out.view(*q.shape[:2], *out.shape[1:])


def _padded(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Remove padding, compute attention over the rest as documents, and pad the output with zeros."""
    k_mask = mask[:, -k.shape[1] :].bool()
    queries, keys = Keys.of(k_mask[:, -q.shape[1] :]), Keys.of(k_mask)
    assert queries.places is not None
    assert keys.places is not None
    packed = (
        x.flatten(0, 1).index_select(0, places)
        for x, places in ((q, queries.places), (k, keys.places), (v, keys.places))
    )
    out = run(
        *packed,
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=keys.cu_seqlens,
        max_seqlen_q=queries.longest,
        max_seqlen_k=keys.longest,
    )
    full = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:])
    return full.index_copy(0, queries.places, out).view(*q.shape[:2], *out.shape[1:])
