"""Input cases of rotary_pos_emb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _cos_sin(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles [..., R/2], repeated to [..., R] as Transformers' rotary embeddings do."""
    half = randn((*shape[:-1], shape[-1] // 2), torch.float32, device, generator, scale=3.0)
    both = torch.cat((half, half), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda both: both,
    "once": lambda both: both[..., : both.shape[-1] // 2].contiguous(),
    "first half": lambda both: both[..., : both.shape[-1] // 2],
    "every second": lambda both: both[..., : both.shape[-1] // 2].repeat_interleave(2, dim=-1)[..., ::2],
    "twice, strided": lambda both: both.repeat_interleave(2, dim=-1)[..., ::2],
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
    cos_layout: str = "twice",
    role: str = "check",
) -> InputCase:
    """One case of sizes (B, S, heads, kv_heads, D).

    Args:
        memory: "tokens" for transposed views of [B, S, heads, D], as projections return; "heads" for contiguous
            [B, heads, S, D]; "fused" for slices of one [B, S, heads + kv_heads, D + 16].
        cos_layout: of cos and sin. "twice" is [.., R] with equal halves, "once" is [.., R/2], "first half" and
            "every second" are [.., R/2] views of tensors that have each element twice, in NeoX or GPT-J layout;
            "twice, strided" is "twice" as a view of a tensor of twice the width.
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
        cos, sin = _cos_sin((*lead, rotary or width), cos_dtype or dtype, device, generator)
        cos, sin = _VIEWS[cos_layout](cos), _VIEWS[cos_layout](sin)
        arguments: dict[str, Any] = {"q": q, "k": k, "cos": cos, "sin": sin}
        if unsqueeze_dim == 2:
            arguments |= {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "unsqueeze_dim": 2}
        elif unsqueeze_dim == 0:
            arguments |= {"cos": cos[0], "sin": sin[0], "unsqueeze_dim": 0}
        if sections is not None:
            arguments["mrope_section"] = list(sections)
        return arguments

    heads, kv_heads, width = sizes[2:]
    return InputCase(name, make, role, {"heads": heads, "kv_heads": kv_heads, "head_dim": width})


def benchmark_case(ratio: int, cos_layout: str, shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
    batch = 2 if tokens % 2 == 0 else 1
    name = f"{tokens} tokens, {heads} and {kv_heads} heads of {width}"
    sizes = (batch, tokens // batch, heads, kv_heads, width)
    return _case(name, sizes, rotary=width // ratio, cos_batch=1, cos_layout=cos_layout, role="bench")


def cases(ratio: int = 1, cos_layout: str = "twice") -> list[InputCase]:
    """The cases of the variants that take [B, heads, S, D]; the rotary size is D / `ratio`."""

    def case(name: str, sizes: tuple[int, int, int, int, int], layout: str = cos_layout, **options: Any) -> InputCase:
        return _case(name, sizes, rotary=sizes[-1] // ratio, cos_layout=layout, **options)

    strided = [case("strided angles", (1, 6, 4, 2, 32), "twice, strided")] if cos_layout == "twice" else []
    return [
        case("grouped heads", (2, 9, 8, 2, 64)),
        case("odd heads", (2, 5, 7, 3, 80), cos_batch=1),
        case("halves of 44", (1, 5, 3, 2, 88)),
        case("one key head", (1, 6, 5, 1, 32)),
        case("contiguous heads", (2, 7, 4, 4, 32), memory="heads"),
        case("fused projection", (2, 4, 4, 2, 32), memory="fused"),
        case("tokens before heads", (2, 6, 4, 2, 48), unsqueeze_dim=2),
        case("angles of all rows", (2, 6, 4, 2, 32), unsqueeze_dim=0),
        case("fp32 angles", (1, 6, 4, 2, 32), cos_dtype=torch.float32),
        *strided,
        case("no tokens", (1, 0, 4, 2, 32)),
        case("16384 tokens, 32 and 8 heads of 128", (2, 8192, 32, 8, 128), cos_batch=1, role="bench"),
    ]


def gptj_cases() -> list[InputCase]:
    return [
        *cases(ratio=2, cos_layout="first half"),
        replace(cases(cos_layout="once")[0], name="every channel"),
        _case("every second angle", (2, 5, 4, 2, 48), cos_layout="every second"),
    ]


def _changed(case: InputCase, change: Callable[[dict[str, Any]], dict[str, Any]], **fields: Any) -> InputCase:
    """The case with other arguments, made of its own."""
    return replace(case, make=lambda *inputs: change(case.make(*inputs)), **fields)


def _latent_case(name: str, sizes: tuple[int, int, int, int, int], rotary: int, **options: Any) -> InputCase:
    """A `_case` whose keys have the last `rotary` channels of a head alone, behind others of the same projection."""
    heads, _, width = sizes[2:]
    shape = {"heads": heads, "nope": width - rotary, "rope": rotary, "v": width - rotary}
    case = _case(name, sizes, rotary=rotary, **options)
    return _changed(case, lambda made: {**made, "k": made["k"][..., -rotary:]}, shape=shape)


def latent_cases(cos_layout: str = "twice") -> list[InputCase]:
    """The cases of the variants that rotate the last channels."""

    def case(name: str, sizes: tuple[int, int, int, int, int], rotary: int, **options: Any) -> InputCase:
        return _latent_case(name, sizes, rotary, cos_layout=cos_layout, **options)

    return [
        case("latent", (2, 9, 4, 1, 48), 16),
        case("odd sizes", (1, 5, 3, 1, 29), 10, cos_batch=1),
        case("many heads", (1, 2, 70, 1, 192), 64),
        case("one head", (1, 6, 1, 1, 48), 16),
        case("contiguous heads", (2, 4, 4, 2, 32), 8, memory="heads"),
        case("tokens before heads", (2, 6, 4, 1, 48), 16, unsqueeze_dim=2),
        case("fp32 angles", (1, 6, 4, 1, 24), 8, cos_dtype=torch.float32),
        case("no tokens", (1, 0, 4, 1, 24), 8),
        replace(cases(cos_layout=cos_layout)[0], name="every channel"),
        case("16384 tokens of Moonlight", (2, 8192, 16, 1, 192), 64, cos_batch=1, role="bench"),
    ]


def latent_benchmark_case(cos_layout: str, shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, nope, rope = (shape[name] for name in ("heads", "nope", "rope"))
    name = f"{tokens} tokens, {heads} heads of {nope} + {rope}"
    return _latent_case(name, (1, tokens, heads, 1, nope + rope), rope, cos_layout=cos_layout, role="bench")


def _with_weights(
    case: InputCase, *, weight_dtype: torch.dtype | None = None, scale: float = 1.0, **options: bool
) -> InputCase:
    """The case with weights of the RMSNorms of q and k."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        made = case.make(dtype, device, generator)
        width = made["q"].shape[-1]
        for name in ("q_weight", "k_weight"):
            weight = randn((width,), weight_dtype or dtype, device, generator) * 0.2
            made[name] = weight if options.get("weight_offset") else weight + 1.0
        scaled = {name: made[name] * scale for name in ("q", "k")} if scale != 1.0 else {}
        return {**made, **scaled, "q_eps": 1e-6, "k_eps": 1e-5, **options}

    return replace(case, make=make)


def norm_cases(ratio: int = 1, every_norm: bool = True) -> list[InputCase]:
    """The cases of the variants with RMSNorm; the rotary size is D / `ratio`.

    Args:
        every_norm: also with inputs that matter to the norm alone.
    """
    rotations = [case for case in cases(ratio) if case.name != "angles of all rows"]
    first = rotations[0]
    found = [
        *(_with_weights(case) for case in rotations),
        _with_weights(replace(first, name="cast after weight"), cast_after_weight=True),
        _with_weights(replace(first, name="fp32 weights"), weight_dtype=torch.float32),
    ]
    if every_norm:
        found += [
            _with_weights(replace(first, name="weight offset"), weight_offset=True),
            _with_weights(replace(first, name="fp32 weights, offset"), weight_dtype=torch.float32, weight_offset=True),
            _with_weights(replace(first, name="tiny values"), scale=1e-3),
            _with_weights(replace(first, name="large values"), scale=1e3),
            _with_weights(_case("heads of 256", (1, 3, 5, 2, 256), rotary=256 // ratio)),
            _with_weights(_case("many heads", (1, 1, 70, 3, 64), rotary=64 // ratio)),
        ]
    return found + ([_with_weights(replace(cases()[0], name="every channel"))] if ratio > 1 else [])


def norm_benchmark_case(ratio: int, shape: Mapping[str, int], tokens: int) -> InputCase:
    return _with_weights(benchmark_case(ratio, "twice", shape, tokens))


def as_single(case: InputCase) -> InputCase:
    """The case with `x` instead of q and k."""
    return _changed(case, lambda made: {"x" if name == "q" else name: x for name, x in made.items() if name != "k"})


def _as_vision(case: InputCase) -> InputCase:
    """A [1, heads, S, D] case without its batch and in [S, heads, D] order."""

    def change(made: dict[str, Any]) -> dict[str, Any]:
        return {name: x.squeeze(0).transpose(0, 1) if name in ("q", "k") else x.squeeze(0) for name, x in made.items()}

    return _changed(case, change, shape=None)


def _with_rows(case: InputCase) -> InputCase:
    """A [B, heads, S, D] case in [B, S, heads, D] order, with `cos` and `sin` [S, D]."""

    def change(made: dict[str, Any]) -> dict[str, Any]:
        return {name: x.transpose(1, 2) if name in ("q", "k") else x[0] for name, x in made.items()}

    return _changed(case, change, shape=None)


VISION_CASES = [
    _with_rows(_case("rows", (2, 6, 3, 3, 32), cos_batch=1)),
    _with_rows(_case("one row", (1, 6, 4, 4, 32))),
    *(
        _as_vision(case)
        for case in (
            _case("even heads", (1, 9, 4, 4, 64)),
            _case("heads of 80", (1, 7, 3, 3, 80), cos_dtype=torch.float32),
            _case("heads of 72", (1, 5, 5, 5, 72)),
            _case("part of a head", (1, 7, 3, 3, 40), rotary=26),
            _case("fused projection", (1, 5, 4, 4, 32), memory="fused"),
            _case("no patches", (1, 0, 2, 2, 32)),
            _case("16384 patches, 16 heads of 72", (1, 16384, 16, 16, 72), cos_dtype=torch.float32, role="bench"),
        )
    ),
]

MULTIMODAL_CASES = [
    _case("grouped heads", (2, 9, 8, 2, 64), sections=(8, 12, 12)),
    _case("fused projection", (1, 6, 3, 1, 32), sections=(4, 6, 6), memory="fused"),
    _case("tokens before heads", (2, 5, 4, 2, 32), sections=(4, 6, 6), unsqueeze_dim=2),
    _case("16384 tokens, 28 and 4 heads of 128", (2, 8192, 28, 4, 128), sections=(16, 24, 24), role="bench"),
]
