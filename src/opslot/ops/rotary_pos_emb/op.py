"""Rotary position embedding (Su et al. 2021, section 3.4.2): contract, references, input cases and costs.

A head's rotary channels form pairs (a, b) that turn by the token's angles: (a cos - b sin, b cos + a sin). Upstream
pairs channel i with channel i + R/2 ("halves"), except where the variant says otherwise.

Shapes: `q` [B, heads, S, D] and `k` [B, kv_heads, S, D] for `unsqueeze_dim` 1, [B, S, heads, D] for 2, with any
strides; `cos` and `sin` [B or 1, S, R], R = D unless partial, constants of the graph. Returns new (q, k), in the
dtypes that torch promotes them and `cos` to; a variant named `cast_last` computes in fp32 and returns q's and k's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.sites import head_sizes
from opslot.slots import Cost, InputCase, OpSpec, OpVariant
from opslot.slots.random_inputs import randn


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _wide(x: Tensor, cos: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Every channel of a head turns, in halves. The form of Llama, Qwen3 and most others."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def full_cast_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`full` in fp32, rounded to q's and k's dtypes at the end. The form of OLMo and ModernBERT."""
    wide = _wide(q, cos)
    cos, sin = cos.unsqueeze(unsqueeze_dim).to(wide), sin.unsqueeze(unsqueeze_dim).to(wide)
    return _rotate(q.to(wide), cos, sin).to(q.dtype), _rotate(k.to(wide), cos, sin).to(k.dtype)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`full` of one tensor, like `q`. Gemma-3n and Gemma-4 turn queries alone where layers share their keys."""
    return _rotate(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def half_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`full` with an angle a pair: `cos`, `sin` [B or 1, S, D/2]. The form of gpt-oss."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return one(q), one(k)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The first R = `cos.shape[-1]` channels turn, in halves; the others pass. The form of Qwen3.5 and GLM-4-MoE."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)

    return one(q), one(k)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Channels 2i and 2i + 1 are pair i on the way in; halves on the way out. DeepSeek-V3's `rope_interleave`.

    Queries and keys are permuted alike, so their products are those of the pairs left in place. Pair i turns by angle
    i of the first halves of `cos` and `sin`, whose second halves repeat them.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)

    def one(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)

    return one(q), one(k)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., width:]), dim=-1)


def paired(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Channels 2i and 2i + 1 are pair i, and stay in their places; an angle a pair: `cos`, `sin` [B or 1, S, R/2].

    The first R channels turn, the others pass. The form of GLM-4 and Helium, whose angles come twice: one half of them
    is what this takes.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turn_pairs(q, cos, sin), _turn_pairs(k, cos, sin)


def paired_cast_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`paired` in fp32, rounded to q's and k's dtypes at the end. The form of Cohere and ERNIE 4.5."""
    wide = _wide(q, cos)
    cos, sin = cos.unsqueeze(unsqueeze_dim).to(wide), sin.unsqueeze(unsqueeze_dim).to(wide)
    return _turn_pairs(q.to(wide), cos, sin).to(q.dtype), _turn_pairs(k.to(wide), cos, sin).to(k.dtype)


def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Vision towers' form: `q`, `k` [S, heads, D], `cos`, `sin` [S, D]; fp32 inside, q's and k's dtype outside."""
    wide = _wide(q, cos)
    cos, sin = cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide)
    return _rotate(q.to(wide), cos, sin).to(q.dtype), _rotate(k.to(wide), cos, sin).to(k.dtype)


def merge_sections(x: Tensor, mrope_section: Sequence[int]) -> Tensor:
    """[3, B, S, D] angles of time, height and width -> [B, S, D], section i of channels from axis i mod 3.

    Args:
        mrope_section: widths of the sections of one half; both halves use the same.
    """
    widths = [*mrope_section, *mrope_section]
    return torch.cat([part[i % 3] for i, part in enumerate(x.split(widths, dim=-1))], dim=-1)


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Qwen2-VL's form: `cos`, `sin` [3, B, S, D] merge by sections (`merge_sections`), then every channel turns."""
    return full(q, k, merge_sections(cos, mrope_section), merge_sections(sin, mrope_section), unsqueeze_dim)


def _angles(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles [..., R/2], repeated to [..., R] as upstream's rotary embeddings do."""
    half = randn((*shape[:-1], shape[-1] // 2), torch.float32, device, generator, scale=3.0)
    both = torch.cat((half, half), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda both: both,
    "once": lambda both: both[..., : both.shape[-1] // 2].contiguous(),
    "first half": lambda both: both[..., : both.shape[-1] // 2],
    "every second": lambda both: both[..., : both.shape[-1] // 2].repeat_interleave(2, dim=-1)[..., ::2],
}


def _case(
    name: str,
    sizes: tuple[int, int, int, int, int],
    *,
    rotary: int | None = None,
    cos_batch: int | None = None,
    memory: str = "tokens",
    unsqueeze_dim: int | None = None,
    cos_dtype: torch.dtype | None = None,
    sections: tuple[int, ...] | None = None,
    angles: str = "twice",
    role: str = "check",
) -> InputCase:
    """One case of sizes (B, S, heads, kv_heads, D).

    Args:
        memory: "tokens" for transposed views of [B, S, heads, D], what projections give; "heads" for contiguous
            [B, heads, S, D]; "fused" for slices of one [B, S, heads + kv_heads, D + 16].
        angles: "twice" for [.., R], whose halves are alike; "once" for [.., R/2]; "first half" and "every second" for
            such views of angles that come twice, in halves or in pairs.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        batch, tokens, heads, kv_heads, width = sizes
        if memory == "heads":
            q = randn((batch, heads, tokens, width), dtype, device, generator)
            k = randn((batch, kv_heads, tokens, width), dtype, device, generator)
        elif memory == "fused":
            both = randn((batch, tokens, heads + kv_heads, width + 16), dtype, device, generator)[..., 16:]
            q, k = (x.transpose(1, 2) for x in both.split((heads, kv_heads), dim=2))
        else:
            q = randn((batch, tokens, heads, width), dtype, device, generator).transpose(1, 2)
            k = randn((batch, tokens, kv_heads, width), dtype, device, generator).transpose(1, 2)
        lead = (cos_batch or batch, tokens) if sections is None else (3, batch, tokens)
        cos, sin = _angles((*lead, rotary or width), cos_dtype or dtype, device, generator)
        cos, sin = _VIEWS[angles](cos), _VIEWS[angles](sin)
        arguments: dict[str, Any] = {"q": q, "k": k, "cos": cos, "sin": sin}
        if unsqueeze_dim == 2:
            arguments |= {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "unsqueeze_dim": 2}
        if sections is not None:
            arguments["mrope_section"] = list(sections)
        return arguments

    heads, kv_heads, width = sizes[2:]
    return InputCase(name, make, role, {"heads": heads, "kv_heads": kv_heads, "head_dim": width})


def _case_at(ratio: int, angles: str) -> Callable[[Mapping[str, int], int], InputCase]:
    def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
        heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
        batch = 2 if tokens % 2 == 0 else 1
        name = f"{tokens} tokens, {heads} and {kv_heads} heads of {width}"
        sizes = (batch, tokens // batch, heads, kv_heads, width)
        return _case(name, sizes, rotary=width // ratio, cos_batch=1, angles=angles, role="bench")

    return benchmark_case


def _cases(ratio: int = 1, angles: str = "twice") -> list[InputCase]:
    """The cases of the variants that take [B, heads, S, D]; the rotary width is D / `ratio`."""

    def case(name: str, sizes: tuple[int, int, int, int, int], **options: Any) -> InputCase:
        return _case(name, sizes, rotary=sizes[-1] // ratio, angles=angles, **options)

    return [
        case("grouped heads", (2, 9, 8, 2, 64)),
        case("odd heads", (2, 5, 7, 3, 80), cos_batch=1),
        case("halves of 44", (1, 5, 3, 2, 88)),
        case("one key head", (1, 6, 5, 1, 32)),
        case("contiguous heads", (2, 7, 4, 4, 32), memory="heads"),
        case("fused projection", (2, 4, 4, 2, 32), memory="fused"),
        case("tokens before heads", (2, 6, 4, 2, 48), unsqueeze_dim=2),
        case("fp32 angles", (1, 6, 4, 2, 32), cos_dtype=torch.float32),
        case("no tokens", (1, 0, 4, 2, 32)),
        case("16384 tokens, 32 and 8 heads of 128", (2, 8192, 32, 8, 128), cos_batch=1, role="bench"),
    ]


def _paired_cases() -> list[InputCase]:
    return [
        *_cases(ratio=2, angles="first half"),
        replace(_cases(angles="once")[0], name="every channel"),
        _case("every second angle", (2, 5, 4, 2, 48), angles="every second"),
    ]


def _as_single(case: InputCase) -> InputCase:
    """A case of q and k as one of q alone."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        made = case.make(dtype, device, generator)
        return {"x" if name == "q" else name: value for name, value in made.items() if name != "k"}

    return replace(case, make=make)


def _as_vision(case: InputCase) -> InputCase:
    """A [1, heads, S, D] case without its batch and in [S, heads, D] order."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        made = case.make(dtype, device, generator)
        return {name: x.squeeze(0).transpose(0, 1) if name in ("q", "k") else x.squeeze(0) for name, x in made.items()}

    return InputCase(case.name, make, case.role)


_VISION_CASES = [
    _as_vision(case)
    for case in (
        _case("even heads", (1, 9, 4, 4, 64)),
        _case("heads of 80", (1, 7, 3, 3, 80), cos_dtype=torch.float32),
        _case("heads of 72", (1, 5, 5, 5, 72)),
        _case("fused projection", (1, 5, 4, 4, 32), memory="fused"),
        _case("no patches", (1, 0, 2, 2, 32)),
        _case("16384 patches, 16 heads of 72", (1, 16384, 16, 16, 72), cos_dtype=torch.float32, role="bench"),
    )
]

_MULTIMODAL_CASES = [
    _case("grouped heads", (2, 9, 8, 2, 64), sections=(8, 12, 12)),
    _case("fused projection", (1, 6, 3, 1, 32), sections=(4, 6, 6), memory="fused"),
    _case("tokens before heads", (2, 5, 4, 2, 32), sections=(4, 6, 6), unsqueeze_dim=2),
    _case("16384 tokens, 28 and 4 heads of 128", (2, 8192, 28, 4, 128), sections=(16, 24, 24), role="bench"),
]


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
    angles: str = "twice",
) -> OpVariant:
    """A variant of q and k.

    Args:
        ratio: a head's width over its rotary width where a language model's config gives the sizes of a site.
        angles: of those sizes' cases, as `_case` has it.
    """
    return OpVariant(
        reference.__name__,
        reference,
        cases,
        ("q", "k"),
        _cost,
        config_field=config_field,
        static_shape=None if ratio is None else head_sizes,
        benchmark_case=None if ratio is None else _case_at(ratio, angles),
        description=description,
    )


def _single_variant() -> OpVariant:
    benchmark_case = _case_at(1, "twice")
    return replace(
        _variant(single, [_as_single(case) for case in _cases()], "every channel of one tensor, in halves"),
        differentiable=("x",),
        benchmark_case=lambda shape, tokens: _as_single(benchmark_case(shape, tokens)),
    )


_VARIANTS = (
    _variant(full, _cases(), "every channel, in halves"),
    _variant(full_cast_last, _cases(), "full in fp32, rounded to q's dtype"),
    _single_variant(),
    _variant(half_angles, _cases(angles="once"), "full, with an angle a pair", angles="once"),
    _variant(
        partial,
        [*_cases(ratio=4), replace(_cases()[0], name="every channel")],
        "the first channels, in halves",
        ratio=4,
    ),
    _variant(interleaved, _cases(), "pairs in, halves out"),
    _variant(paired, _paired_cases(), "pairs in their places", ratio=2, angles="first half"),
    _variant(paired_cast_last, _paired_cases(), "paired in fp32, rounded to q's dtype", angles="every second"),
    _variant(vision, _VISION_CASES, "[S, heads, D] in fp32", "rotary_pos_emb_vision_implementation", ratio=None),
    _variant(multimodal, _MULTIMODAL_CASES, "angles of three axes merged by sections", ratio=None),
)

OP = OpSpec(
    name="rotary_pos_emb",
    description="rotary position embedding of queries and keys",
    variants={variant.name: variant for variant in _VARIANTS},
)
