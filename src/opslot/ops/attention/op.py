"""Attention: chosen once per model, through Transformers' attention interface under opslot's own names.

The contract is that interface's: `query` [B, heads, S, D], `key` and `value` [B, kv_heads, S_kv, D], `attention_mask`
as the implementation's mask function makes it, `scaling` the factor before softmax; returns ([B, S, heads, D], None).
Packed documents come as `cu_seq_lens_q` / `cu_seq_lens_k` (int32, [documents + 1], over B * S tokens) with
`max_length_q` / `max_length_k`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.cases import randn
from opslot.ops._common.sites import head_sizes
from opslot.slots import Cost, InputCase, OpSpec, OpVariant, own_config

PREFIX = "opslot_"


def reference(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T + mask) v with grouped key/value heads; causal where the module says so and no mask is
    given.

    The softmax runs in fp32 (fp64 for fp64 input), as upstream's eager attention does.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]))
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        allowed = _document_mask(cu_seqlens, query.shape[0], query.shape[2], getattr(module, "is_causal", True))
        scores = scores.masked_fill(~allowed, float("-inf"))
    elif attention_mask is not None:
        scores = (
            scores + attention_mask
            if attention_mask.is_floating_point()
            else scores.masked_fill(~attention_mask, float("-inf"))
        )
    elif getattr(module, "is_causal", True) and query.shape[2] > 1:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (scores.softmax(-1, dtype=wide).to(query.dtype) @ value).transpose(1, 2).contiguous(), None


def _document_mask(cu_seqlens: Tensor, batch: int, length: int, causal: bool) -> Tensor:
    token = torch.arange(batch * length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).view(batch, 1, length)
    allowed = document[..., :, None] == document[..., None, :]
    return allowed.tril() if causal else allowed


class _Causal(nn.Module):
    """Stands for an attention module in input cases."""

    is_causal = True


def _case(
    name: str, shape: tuple[int, int, int, int, int], documents: list[int] | None = None, role: str = "check"
) -> InputCase:
    batch, heads, kv_heads, length, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        # [B, S, heads, D] in memory, as projections leave it.
        def projected(count: int) -> Tensor:
            return randn((batch, length, count, width), dtype, device, generator).transpose(1, 2)

        arguments: dict[str, Any] = {
            "module": _Causal(),
            "query": projected(heads),
            "key": projected(kv_heads),
            "value": projected(kv_heads),
            "attention_mask": None,
            "scaling": width**-0.5,
        }
        if documents is not None:
            cu_seqlens = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
            longest = max(documents)
            arguments |= {
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return arguments

    return InputCase(name, make, role, {"heads": heads, "kv_heads": kv_heads, "head_dim": width})


_CASES = [
    _case("grouped heads", (2, 4, 2, 33, 32)),
    _case("one group", (1, 2, 2, 17, 64)),
    _case("two tokens", (2, 4, 1, 2, 32)),
    _case("packed documents", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12]),
    _case("packed documents, two rows", (2, 4, 2, 20, 32), documents=[12, 8, 5, 15]),
    _case("S=8192 32/8 heads D=128", (1, 32, 8, 8192, 128), role="bench"),
]


def _case_at(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
    # One row up to the length that training packs to.
    length = min(tokens, 8192)
    name = f"B={tokens // length} S={length} {heads}/{kv_heads} heads D={width}"
    return _case(name, (tokens // length, heads, kv_heads, length, width), role="bench")


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Causal: two products forward and five backward over half the square."""
    q, k = arguments["query"], arguments["key"]
    batch, heads, length, width = q.shape
    flops = 7 * batch * heads * length * length * width
    return Cost(bytes=(4 * q.numel() + 6 * k.numel()) * q.element_size(), flops=flops)


def _applies_to(model: Any) -> bool:
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    return can_set is not None and hasattr(model, "config") and bool(can_set())


def _attach(model: Any, chosen: str, kernel: Callable[..., Any] | None) -> str | None:
    """Point the model's own config at the chosen implementation; returns the previous one."""
    from transformers import AttentionInterface, AttentionMaskInterface

    own_config(model)
    previous = model.config._attn_implementation
    if kernel is None:
        model.config._attn_implementation = "eager"
        return previous
    name = PREFIX + chosen
    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, kernel.mask_function)
    model.config._attn_implementation = name
    return previous


def _detach(model: Any, previous: str | None) -> None:
    model.config._attn_implementation = previous


OP = OpSpec(
    name="attention",
    config_field="attn_implementation",
    description="scaled dot-product attention, one choice per model",
    variants={
        "causal": OpVariant(
            "causal",
            reference,
            _CASES,
            ("query", "key", "value"),
            _cost,
            # torch's fused CPU attention takes exp from a 20-ulp approximation.
            roundings={"float32": 8},
            site_shape=head_sizes,
            case_at=_case_at,
            description="causal, grouped heads, packed documents",
        )
    },
    applies_to=_applies_to,
    attach=_attach,
    detach=_detach,
)
