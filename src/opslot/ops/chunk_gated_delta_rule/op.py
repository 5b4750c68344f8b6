"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", equation 10): contract, reference, cases, cost.

Shapes: `query`, `key` [B, S, K_heads, K]; `value` [B, S, V_heads, V] with V_heads a multiple of K_heads; `g` (log
    decay, <= 0) and `beta`
[B, S, V_heads]; state [B, V_heads, K, V]. `cu_seqlens` (int32 or int64, [documents + 1], B = 1) starts every document
from an empty state, so packed documents never see each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from opslot.ops._common.cases import randn
from opslot.slots import Cost, InputCase, OpSpec, OpVariant


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Token by token: S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T q / sqrt(K).

    Computes in fp32 (fp64 for fp64 input). Returns the output [B, S, V_heads, V] in `query`'s dtype and, if asked for,
    the last state of each row (with `cu_seqlens`: of each document).
    """
    groups = value.shape[2] // key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, decay, rate = (x.to(wide) for x in (query, key, value, g.exp(), beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(groups, 2) for x in (q * query.shape[-1] ** -0.5, k))
    spans = [(0, q.shape[1])] if cu_seqlens is None else _spans(cu_seqlens)
    outputs, states = [], []
    for i, (start, stop) in enumerate(spans):
        if initial_state is None:
            state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
        else:
            state = initial_state.to(wide) if cu_seqlens is None else initial_state[i : i + 1].to(wide)
        for t in range(start, stop):
            state = state * decay[:, t, :, None, None]
            predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            correction = (v[:, t] - predicted) * rate[:, t, :, None]
            state = state + k[:, t, :, :, None] * correction[:, :, None, :]
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        states.append(state)
    out = torch.stack(outputs, 1).to(query.dtype) if outputs else torch.empty_like(value)
    return out, torch.cat(states) if output_final_state else None


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cu_seqlens.tolist()))


def _case(name: str, shape: tuple[int, ...], documents: list[int] | None = None, role: str = "check") -> InputCase:
    batch, length, k_heads, v_heads, width, v_width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw(*size: int) -> Tensor:
            return randn(size, dtype, device, generator)

        arguments: dict[str, Any] = {
            "query": draw(batch, length, k_heads, width),
            "key": draw(batch, length, k_heads, width),
            "value": draw(batch, length, v_heads, v_width),
            "g": logsigmoid(draw(batch, length, v_heads) + 2.0),
            "beta": draw(batch, length, v_heads).sigmoid(),
            "use_qk_l2norm_in_kernel": True,
        }
        if documents is not None:
            arguments["cu_seqlens"] = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
        return arguments

    return InputCase(name, make, role)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    q, v = arguments["query"], arguments["value"]
    return Cost(bytes=5 * (2 * q.numel() + 2 * v.numel()) * q.element_size() // 2)


OP = OpSpec(
    name="chunk_gated_delta_rule",
    description="linear attention with a gated delta rule",
    variants={
        "standard": OpVariant(
            "standard",
            reference,
            [
                _case("two rows", (2, 70, 2, 4, 32, 32)),
                _case("packed documents", (1, 90, 2, 2, 32, 64), documents=[17, 1, 64, 8]),
                _case("8192x32x128", (1, 8192, 16, 32, 128, 128), role="bench"),
            ],
            ("query", "key", "value", "g", "beta"),
            _cost,
            # A chunked kernel reads keys and values rounded to the input's dtype into every product of a chunk, where
            # the recurrence above rounds once at the end.
            roundings={"bfloat16": 4, "float16": 4, "float32": 64},
        )
    },
)
