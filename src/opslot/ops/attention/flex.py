"""FlexAttention, through Transformers' own adapter (block masks come from its mask function)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask

from opslot._base.errors import KernelError
from opslot._base.tensor_cache import TensorCache
from opslot.ops._common.documents import document_of_tokens
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.reference import causal_of, reject_options, window_of

# Each takes seconds to compile.
_SHAPES = 64
# For 512, the tiles of torch 2.11 exceed the shared memory of an H200; sizes in between were not tried.
_WIDEST = 256
# Below this, torch selects its decoding kernel, which fails for several rows of queries (torch 2.11: "No choices
# exist for backend"), but supports one query, as in generation.
_DECODING = 128


@takes_call
def flex_attention(call: AttentionCall) -> tuple[Tensor, None]:
    """`op.reference` without dropout and sinks.

    `attention_mask` is Transformers' block mask, which includes packed documents; if None, it is created here.
    """
    module, query, key, value, attention_mask, dropout, scaling, kwargs = call
    # Transformers' adapter applies sinks with a logsumexp rounded to the dtype of the activations.
    reject_options("flex_attention", kwargs, served=("softcap",))
    if dropout:
        raise KernelError(
            "attn_implementation='flex_attention' has no dropout",
            hint="set attention_dropout to 0, or use sdpa or flash_attention_2",
        )
    if query.is_cuda and max(query.shape[-1], value.shape[-1]) > _WIDEST:
        raise KernelError(
            f"attn_implementation='flex_attention' supports head sizes up to {_WIDEST}",
            found=f"query has {query.shape[-1]} and value {value.shape[-1]}",
            hint="use triton or sdpa",
        )
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = _shared_mask(query, key, causal_of(module, kwargs), kwargs)
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
        # Transformers' adapter adds a mask that is not a block mask to the scores.
        hidden = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
        attention_mask = hidden.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    if query.is_cuda and 1 < query.shape[2] < _DECODING:
        kwargs = {
            **kwargs,
            "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True, **(kwargs.get("kernel_options") or {})},
        }
    # Transformers' adapter also accepts None, unlike its annotation.
    mask: Any = attention_mask
    if torch.compiler.is_compiling():
        return flex_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)[0], None
    # Above its recompile limit Dynamo would silently run FlexAttention unfused, 50 times slower.
    with torch._dynamo.config.patch(recompile_limit=_SHAPES, fail_on_recompile_limit_hit=True):
        try:
            out = flex_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise KernelError(
                f"attn_implementation='flex_attention': compiled for {_SHAPES} shapes already, "
                f"now called with query {tuple(query.shape)}",
                hint="pad to fewer lengths, or use sdpa",
            ) from error
    return out[0], None


flex_attention.mask_function = flex_attention_mask  # type: ignore[attr-defined]


def _block_mask(query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any]) -> BlockMask | None:
    """Mask function: same document, and at most window - 1 tokens earlier, or with `causal` False to either side; None
    if nothing is masked."""
    batch, _, length, _ = query.shape
    keys = key.shape[2]
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    window = window_of(key, kwargs)
    if cu_seqlens is None and window is None and not causal:
        return None
    if cu_seqlens is not None and keys != length:
        raise KernelError(
            f"attn_implementation='flex_attention': packed documents of {length} queries and {keys} keys in a row",
            hint="give every document as many keys as queries, or use flash_attention_2, 3 or 4",
        )
    document = torch.zeros(1, keys, dtype=torch.int64, device=query.device)
    if cu_seqlens is not None:
        document = document_of_tokens(cu_seqlens, batch, length, query.device)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q + (keys - length) - k
        # Without causality true of all keys: the last one is length - 1 tokens after the first query.
        seen = distance >= (0 if causal else 1 - length)
        if window is not None:
            seen = seen & (distance < window) & (distance > -window)
        return seen if cu_seqlens is None else seen & (document[b, q] == document[b, k])

    return create_block_mask(visible, None if cu_seqlens is None else batch, None, length, keys, device=query.device)


# Of full and sliding attention, of several sub-models.
_masks: TensorCache[BlockMask | None] = TensorCache(8)


def _shared_mask(query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any]) -> BlockMask | None:
    """`_block_mask`, computed once for the layers of a step."""
    sizes = query.shape[0], query.shape[2], key.shape[2]
    form = sizes, causal, window_of(key, kwargs), query.device
    return _masks.get(kwargs.get("cu_seq_lens_q"), lambda: _block_mask(query, key, causal, kwargs), *form)
