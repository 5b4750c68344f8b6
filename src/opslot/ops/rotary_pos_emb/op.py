"""Rotary position embedding (Su et al. 2021, section 3.4.2): contract, references and costs.

Rotates pairs of channels (a, b) of each head to (a cos - b sin, b cos + a sin). In NeoX layout (half) channel i is
paired with channel i + R/2, in GPT-J layout (interleaved) 2i with 2i + 1. Variants use NeoX layout unless noted.

Shapes: `q` [B, heads, S, D] and `k` [B, kv_heads, S, D] for `unsqueeze_dim` 1, [B, S, heads, D] for 2, with any
strides; `cos` and `sin` [B or 1, S, R], R = D unless partial, without gradients; Pixtral has `q` and `k` as for 1,
`cos` and `sin` [S, R] and `unsqueeze_dim` 0. Returns new (q, k), in the
promoted dtypes of each and `cos`; variants named `cast_after_weight` compute in fp32 and return the dtypes of q and k.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.model_config import head_sizes, latent_head_sizes, partly_rotated_head_sizes
from opslot.ops.rms_norm import op as rms_norm
from opslot.ops.rotary_pos_emb.cases import (
    MULTIMODAL_CASES,
    VISION_CASES,
    as_single,
    benchmark_case,
    cases,
    gptj_cases,
    latent_benchmark_case,
    latent_cases,
    norm_benchmark_case,
    norm_cases,
)
from opslot.slots import Cost, InputCase, OpSpec, OpVariant


def with_batch(cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor, int]:
    """`cos` and `sin` [S, R] for `unsqueeze_dim` 0 as [1, S, R] for 1; others as they are."""
    if unsqueeze_dim == 0 and cos.ndim == sin.ndim == 2:
        return cos[None], sin[None], 1
    return cos, sin, unsqueeze_dim


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _compute_dtype(x: Tensor, cos: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def _in_fp32(
    rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(q, cos)
    q_out, k_out = rotate(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype), unsqueeze_dim)
    return q_out.to(q.dtype), k_out.to(k.dtype)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates all channels, NeoX layout. Used by Llama, Qwen3 and most others."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def full_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`full` in fp32, cast to the dtypes of q and k at the end. Used by OLMo and ModernBERT."""
    return _in_fp32(full, q, k, cos, sin, unsqueeze_dim)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`full` of one tensor. Gemma-3n and Gemma-4 rotate only the queries in layers that share keys."""
    return _rotate(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def half_cos_sin(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`full` with `cos` and `sin` [B or 1, S, D/2], not repeated for the second half. Used by gpt-oss."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return one(q), one(k)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The first R = `cos.shape[-1]` channels are rotated, the others are copied. Used by Qwen3.5 and GLM-4-MoE."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)

    return one(q), one(k)


def gptj_to_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """GPT-J layout in, NeoX layout out. DeepSeek-V3's `rope_interleave`.

    Queries and keys are permuted in the same way, which does not change attention scores. Only the first half of `cos`
    and `sin` is used; the second half repeats it.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)

    def one(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)

    return one(q), one(k)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., width:]), dim=-1)


def gptj(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """GPT-J layout, with `cos` and `sin` [B or 1, S, R/2], one element per pair.

    The first R channels are rotated, the others are copied. Used by GLM-4 and Helium, with half of their `cos` and
    `sin`, which have each element twice.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate_interleaved(q, cos, sin), _rotate_interleaved(k, cos, sin)


def gptj_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`gptj` in fp32, cast to the dtypes of q and k at the end. Used by Cohere, ERNIE 4.5 and Llama 4."""
    return _in_fp32(gptj, q, k, cos, sin, unsqueeze_dim)


def _of_last_channels(rotate: Callable[..., Any], name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotate` of the last channels, as many as it rotates by `cos`; the others are copied."""

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """`q` and `k` may have different head sizes: the keys of latent attention are the rotated channels alone."""
        rotary = cos.shape[-1] * (2 if rotate is gptj_fp32 else 1)
        q_pass, q_rot = q.tensor_split((q.shape[-1] - rotary,), -1)
        k_pass, k_rot = k.tensor_split((k.shape[-1] - rotary,), -1)
        q_rot, k_rot = rotate(q_rot, k_rot, cos, sin, unsqueeze_dim)
        return torch.cat((q_pass, q_rot), -1), torch.cat((k_pass, k_rot), -1)

    reference.__name__ = reference.__qualname__ = name
    return reference


# Used by the latent attention of MiniCPM3, DeepSeek-V3 and DeepSeek-V2.
partial_last = _of_last_channels(full, "partial_last")
gptj_to_neox_last = _of_last_channels(gptj_to_neox, "gptj_to_neox_last")
gptj_fp32_last = _of_last_channels(gptj_fp32, "gptj_fp32_last")


def single_gptj_fp32_last(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`gptj_fp32_last` of one tensor. DeepSeek-V4 rotates queries, keys and, with -sin, the output of attention."""
    dtype = _compute_dtype(x, cos)
    cos, sin = cos.unsqueeze(unsqueeze_dim).to(dtype), sin.unsqueeze(unsqueeze_dim).to(dtype)
    x_pass, x_rot = x.tensor_split((x.shape[-1] - 2 * cos.shape[-1],), -1)
    return torch.cat((x_pass, _rotate_interleaved(x_rot.to(dtype), cos, sin).to(x.dtype)), -1)


def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """For vision towers: `q`, `k` [S, heads, D] or [B, S, heads, D], `cos`, `sin` [S, D] or [B or 1, S, D]; fp32, cast
    to the dtypes of q and k. With fewer channels R in `cos` and `sin`, the first R are rotated."""
    dtype = _compute_dtype(q, cos)
    cos, sin = cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)
    width = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        rotated = _rotate(x[..., :width].to(dtype), cos, sin).to(x.dtype)
        return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)

    return one(q), one(k)


def merge_sections(x: Tensor, mrope_section: Sequence[int]) -> Tensor:
    """[3, B, S, D] cos or sin of time, height and width -> [B, S, D]; section i of the channels is from axis i mod 3.

    Args:
        mrope_section: sizes of the sections of one half; the same for both halves.
    """
    widths = [*mrope_section, *mrope_section]
    return torch.cat([part[i % 3] for i, part in enumerate(x.split(widths, dim=-1))], dim=-1)


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Used by Qwen2-VL: `cos` and `sin` [3, B, S, D] are merged by `merge_sections`; then as `full`."""
    return full(q, k, merge_sections(cos, mrope_section), merge_sections(sin, mrope_section), unsqueeze_dim)


def _with_norm(rotate: Callable[..., Any], description: str, *, norm_last: bool = False) -> OpVariant:
    """The variant of `rotate` that also computes the RMSNorms of the heads of q and k, before or after it."""

    def reference(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_eps: float,
        k_eps: float,
        weight_offset: bool = False,
        cast_after_weight: bool = False,
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of each head with weights [D], and the rotation.

        Args:
            weight_offset: multiply by (1 + weight) in fp32, cast last, as Gemma and Qwen3.5.
            cast_after_weight: multiply by the weight in fp32, cast last.
        """

        norm = rms_norm.standard
        if weight_offset or cast_after_weight:
            norm = rms_norm.weight_offset if weight_offset else rms_norm.cast_after_weight
        if norm_last:
            q, k = rotate(q, k, cos, sin, unsqueeze_dim)
            return norm(q, q_weight, q_eps), norm(k, k_weight, k_eps)
        return rotate(norm(q, q_weight, q_eps), norm(k, k_weight, k_eps), cos, sin, unsqueeze_dim)

    name = f"{rotate.__name__}_norm" if norm_last else f"norm_{rotate.__name__}"
    ratio = 4 if rotate is partial else 1
    return OpVariant(
        name,
        reference,
        norm_cases(ratio, every_norm=rotate is not full_fp32 and not norm_last),
        ("q", "k", "q_weight", "k_weight"),
        _norm_cost,
        static_shape=head_sizes,
        benchmark_case=functools.partial(norm_benchmark_case, ratio),
        extends=rotate.__name__,
        description=description,
    )


def _norm_cost(arguments: Mapping[str, Any]) -> Cost:
    """As `_cost`, and backward also reads q and k."""
    return Cost(bytes=_cost(arguments).bytes + sum(arguments[n].numel() * arguments[n].element_size() for n in "qk"))


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward and backward each read and write q and k, or x, and read cos and sin."""

    def size(*names: str) -> int:
        return sum(arguments[name].numel() * arguments[name].element_size() for name in names if name in arguments)

    return Cost(bytes=4 * size("q", "k", "x") + 2 * size("cos", "sin"))


def _variant(
    reference: Callable[..., Any],
    cases: list[InputCase],
    description: str,
    config_field: str | None = None,
    ratio: int | None = 1,
    cos_layout: str = "twice",
) -> OpVariant:
    """A variant of q and k.

    Args:
        ratio: head size / rotary size, if the sizes are known from a language model's config; else None.
        cos_layout: of the benchmark cases, see `cases.py`.
    """
    return OpVariant(
        reference.__name__,
        reference,
        cases,
        ("q", "k"),
        _cost,
        config_field=config_field,
        static_shape=None if ratio is None else head_sizes,
        benchmark_case=None if ratio is None else functools.partial(benchmark_case, ratio, cos_layout),
        description=description,
    )


def _of_one_tensor(variant: OpVariant) -> OpVariant:
    """The variant with the cases of another whose `q` is its `x`."""
    make = variant.benchmark_case
    return replace(
        variant,
        cases=[as_single(case) for case in variant.cases],
        differentiable=("x",),
        benchmark_case=None if make is None else lambda shape, tokens: as_single(make(shape, tokens)),
    )


def _latent_variant(
    reference: Callable[..., Any], rotates: Callable[..., Any], description: str, cos_layout: str = "twice"
) -> OpVariant:
    """A variant of whole queries; `rotates` is what the same module computes of their last channels without it."""
    return replace(
        _variant(reference, latent_cases(cos_layout), description),
        extends=rotates.__name__,
        static_shape=latent_head_sizes,
        benchmark_case=functools.partial(latent_benchmark_case, cos_layout),
    )


_VARIANTS = (
    _variant(full, cases(), "all channels, NeoX layout"),
    _variant(full_fp32, cases(), "full in fp32, cast to the dtype of q"),
    _of_one_tensor(_variant(single, cases(), "all channels of one tensor, NeoX layout")),
    _variant(half_cos_sin, cases(cos_layout="once"), "full, with one cos and sin per pair", cos_layout="once"),
    _variant(
        partial,
        [*cases(ratio=4), replace(cases()[0], name="every channel")],
        "the first channels, NeoX layout",
        ratio=4,
    ),
    _variant(gptj_to_neox, cases(), "GPT-J layout in, NeoX layout out"),
    _latent_variant(partial_last, full, "the last channels, NeoX layout; k may have fewer channels than q"),
    _latent_variant(gptj_to_neox_last, gptj_to_neox, "partial_last with GPT-J layout in, NeoX layout out"),
    _latent_variant(
        gptj_fp32_last, gptj_fp32, "gptj_fp32 of the last channels; k may have fewer channels than q", "once"
    ),
    _of_one_tensor(
        replace(
            _variant(single_gptj_fp32_last, latent_cases("once"), "gptj_fp32_last of one tensor", ratio=None),
            static_shape=partly_rotated_head_sizes,
            benchmark_case=functools.partial(latent_benchmark_case, "once"),
        )
    ),
    _variant(gptj, gptj_cases(), "the first channels, GPT-J layout", ratio=2, cos_layout="first half"),
    _variant(gptj_fp32, gptj_cases(), "gptj in fp32, cast to the dtype of q", cos_layout="every second"),
    _with_norm(full, "RMSNorm of the heads, then full"),
    _with_norm(full_fp32, "RMSNorm of the heads, then full_fp32"),
    _with_norm(partial, "RMSNorm of the heads, then partial"),
    _with_norm(full, "full, then RMSNorm of the heads", norm_last=True),
    _with_norm(full_fp32, "full_fp32, then RMSNorm of the heads", norm_last=True),
    _variant(vision, VISION_CASES, "[S, heads, D] in fp32", "rotary_pos_emb_vision_implementation", ratio=None),
    _variant(multimodal, MULTIMODAL_CASES, "cos and sin of three axes merged by sections", ratio=None),
)

OP = OpSpec(
    name="rotary_pos_emb",
    description="rotary position embedding of queries and keys",
    can_serve=rms_norm.can_serve,
    variants={variant.name: variant for variant in _VARIANTS},
)
