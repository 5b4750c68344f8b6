"""torch's scaled_dot_product_attention: packed documents kept apart by cu_seqlens, the math backend never behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sdpa_mask

from opslot._base.errors import KernelError

# Math is left out: it makes the full score matrix, an order of magnitude slower at training lengths, without a word.
_FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Contract: see `op.reference`. Flash on CUDA where it serves the input, memory-efficient elsewhere."""
    return _attend("sdpa", _FAST, module, query, key, value, attention_mask, dropout, scaling, kwargs)


def cudnn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Contract: see `op.reference`. cuDNN's fused attention; packed documents take torch's varlen flash kernel."""
    return _attend(
        "cudnn",
        [SDPBackend.CUDNN_ATTENTION],
        module,
        query,
        key,
        value,
        attention_mask,
        dropout,
        scaling,
        kwargs,
    )


sdpa.mask_function = sdpa_mask  # type: ignore[attr-defined]
cudnn.mask_function = sdpa_mask  # type: ignore[attr-defined]


def _attend(
    name: str,
    backends: list[SDPBackend],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    if kwargs.get("softcap") is not None:
        raise KernelError(
            f"attn_implementation={name!r} has no softcap; use eager, flex_attention or flash_attention_2"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if (
        cu_seqlens is not None
        and kwargs.get("sliding_window") is None
        and not (query.is_cpu and torch.compiler.is_compiling())
    ):
        attend = (
            _documents_varlen if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else _documents_loop
        )
        out = attend(query, key, value, cu_seqlens, kwargs.get("max_length_q"), scaling, dropout, causal)
        return out, None
    causal = causal and attention_mask is None and query.shape[2] > 1

    def run(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
            enable_gqa=grouped,
        )

    groups = query.shape[1] // key.shape[1]
    # On CUDA only flash and cuDNN know grouped heads, and flash takes neither a mask nor fp32.
    grouped = groups > 1 and (query.is_cpu or (attention_mask is None and query.dtype != torch.float32))
    if groups > 1 and not grouped:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if not query.is_cuda:
        return run(query, key, value, grouped).transpose(1, 2).contiguous(), None
    return _on_cuda(name, backends, run, query, key, value, grouped).transpose(1, 2).contiguous(), None


def _on_cuda(
    name: str,
    backends: list[SDPBackend],
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grouped: bool,
) -> Tensor:
    with sdpa_kernel(backends):
        try:
            return run(q, k, v, grouped)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise KernelError(
                f"attn_implementation={name!r}: no fused backend of torch serves query {tuple(q.shape)} {q.dtype} "
                f"with key {tuple(k.shape)} here, and the math backend is never used silently; "
                "use eager or flex_attention"
            ) from error


def _documents_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """All documents in one launch of torch's variable-length flash kernel."""
    if dropout:
        raise KernelError(
            "packed documents with attention dropout are not served by sdpa on CUDA; use flash_attention_2"
        )
    batch, _, length, width = query.shape
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    q, k, v = (x.transpose(1, 2).reshape(batch * length, -1, width) for x in (query, key, value))
    longest = int(longest) if longest is not None else int(cu_seqlens.diff().max())
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False, scale=scaling
    )[0]
    return out.view(batch, length, -1, width)


def _documents_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """One call a document: the work is the sum of squared lengths, not the square of the sum."""
    batch, heads, length, width = query.shape
    q, k, v = (x.transpose(0, 1).reshape(1, -1, batch * length, width) for x in (query, key, value))
    bounds = cu_seqlens.tolist()
    parts = [
        scaled_dot_product_attention(
            q[:, :, a:b],
            k[:, :, a:b],
            v[:, :, a:b],
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
            enable_gqa=True,
        )
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    return torch.cat(parts, 2).transpose(1, 2).reshape(batch, length, heads, width)
