"""RMSNorm (Zhang and Sennrich 2019, equation 4): contract, references, input cases and costs.

Shapes: `hidden_states` [..., H] with any strides, `weight` [H], `gate` and `residual` like `hidden_states`;
statistics in float32 (float64 for float64 input); `eps` is added to the mean of squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.sites import head_sizes, text_config
from opslot.ops.rms_norm.residual import can_serve
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant
from opslot.slots.random_inputs import randn


def _normalize(hidden_states: Tensor, eps: float) -> Tensor:
    x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's form: normalize in fp32, cast to the input's dtype, multiply by `weight`.

    Returns [..., H] in the dtype that torch promotes `weight` and `hidden_states` to.
    """
    return weight * _normalize(hidden_states, eps).to(hidden_states.dtype)


def offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's and Qwen3.5's form: multiply by (1 + weight) in fp32, cast last. Returns the input's dtype."""
    normalized = _normalize(hidden_states, eps)
    return (normalized * (1.0 + weight.to(normalized.dtype))).to(hidden_states.dtype)


def cast_last(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """T5's order, which gpt-oss and OLMo 2 keep: multiply by `weight` in fp32, cast last. Returns the input's dtype.

    The one rounding is that of the result; `standard` rounds the normalized values too, before the weight.
    """
    normalized = _normalize(hidden_states, eps)
    return (weight.to(normalized.dtype) * normalized).to(hidden_states.dtype)


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """The gated delta rule's output norm: standard, then times silu(gate) in fp32. Returns the input's dtype."""
    normalized = standard(hidden_states, weight, eps)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (normalized * nn.functional.silu(gate.to(wide))).to(hidden_states.dtype)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """No weight at all. Returns the input's dtype."""
    return _normalize(hidden_states, eps).to(hidden_states.dtype)


def residual(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A decoder's residual addition and the norm after it. Returns (normalized, sum), both [..., H].

    The sum is rounded to the dtype that torch promotes its terms to, and `standard` is applied to the rounded sum.
    """
    total = residual + hidden_states
    return standard(total, weight, eps), total


def residual_cast_last(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual` with `cast_last` in the place of `standard`; both results in the dtype of the sum."""
    total = residual + hidden_states
    return cast_last(total, weight, eps), total


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by adding halves, [..., H] -> [..., 1]: elementwise, so in one order everywhere."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        middle = x[..., half:-half] if x.shape[-1] % 2 else None
        x = x[..., :half] + x[..., -half:]
        if middle is not None:
            x = torch.cat((x, middle), dim=-1)
    return x


def _spread(x: Tensor, width: int) -> Tensor:
    """[..., 1] -> [..., width] by doubling, whose gradient is a sum in one order everywhere, unlike broadcasting's."""
    while x.shape[-1] < width:
        x = torch.cat((x, x), dim=-1)
    return x[..., :width]


def batch_invariant(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`standard`, where a row's bits, and its gradient's, depend on neither the other rows nor its place among them.

    Needed where numbers must not change with the batch, such as log-probabilities of one policy in training and in
    sampling. The weight's gradient sums over all rows and is deterministic, no more.
    """
    x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    rstd = torch.rsqrt(_tree_sum(x * x) / x.shape[-1] + eps)
    return weight * (x * _spread(rstd, x.shape[-1])).to(hidden_states.dtype)


def _silu_gate(module: Any) -> str | None:
    """Upstream's gated norms name their gate's activation; a class without the attribute is SiLU by definition."""
    activation = getattr(module, "activation", "silu")
    return None if activation in ("silu", "swish") else f"the gate's activation is {activation!r}, not silu"


def _case(
    name: str,
    shape: tuple[int, ...],
    roles: tuple[str, ...],
    *,
    role: str = "check",
    view: str = "",
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    heads: int = 1,
) -> InputCase:
    """One case.

    Args:
        roles: the tensors that the variant takes beside `hidden_states`.
        view: how those lie in memory.
        heads: rows that a token has; 1 but for norms of queries and keys.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        *lead, width = shape

        def activation(factor: float) -> Tensor:
            if view == "columns":
                return randn((*lead, 2 * width), dtype, device, generator, factor)[..., :width]
            if view == "transposed":
                return randn((lead[1], lead[0], *lead[2:], width), dtype, device, generator, factor).transpose(0, 1)
            return randn(shape, dtype, device, generator, factor)

        arguments: dict[str, Any] = {"hidden_states": activation(scale), "eps": 1e-6}
        if "weight" in roles:
            arguments["weight"] = randn((width,), weight_dtype or dtype, device, generator) * 0.2 + 1.0
        for name in ("gate", "residual"):
            if name in roles:
                arguments[name] = activation(scale if name == "residual" else 1.0)
        return arguments

    return InputCase(name, make, role, {"width": shape[-1], "heads": heads})


def _cases(*roles: str) -> list[InputCase]:
    cases = [
        _case("model width", (2, 33, 256), roles),
        _case("head width", (3, 5, 7, 128), roles),
        _case("odd width", (6, 42, 123), roles),
        _case("one row", (1, 64), roles),
        _case("narrow", (9, 3), roles),
        _case("no rows", (0, 64), roles),
        _case("column slice", (4, 9, 96), roles, view="columns"),
        _case("transposed rows", (4, 9, 96), roles, view="transposed"),
        _case("tiny values", (64, 160), roles, scale=1e-3),
        _case("large values", (64, 160), roles, scale=1e3),
        _case("16384x4096", (16384, 4096), roles, role="bench"),
        _case("16384x2048", (16384, 2048), roles, role="bench"),
        _case("524288x128", (524288, 128), roles, role="bench", heads=32),
    ]
    if "weight" in roles:
        cases.insert(6, _case("fp32 weight", (3, 11, 64), roles, weight_dtype=torch.float32))
    return cases


def _site_shape(request: KernelRequest) -> Mapping[str, int] | None:
    # A residual sum's slot is the decoder layer's.
    norm = getattr(request.module, "post_attention_layernorm", request.module)
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    width = weight.shape[-1]
    sizes = head_sizes(request)
    of_heads = sizes is not None and width == sizes["head_dim"] != text_config(request).hidden_size
    return {"width": width, "heads": sizes["heads"] if sizes and of_heads else 1}


def _case_at(*roles: str) -> Callable[[Mapping[str, int], int], InputCase]:
    def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
        width, heads = shape["width"], shape["heads"]
        return _case(f"{tokens * heads}x{width}", (tokens * heads, width), roles, role="bench", heads=heads)

    return benchmark_case


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads x and writes y, backward reads both x and dy and writes dx.

    A gate adds two reads and a write; a residual is read, the sum written, and the sum's gradient read.
    """
    x = arguments["hidden_states"]
    passes = 5 + (3 if "gate" in arguments or "residual" in arguments else 0)
    return Cost(bytes=passes * x.numel() * x.element_size())


_VARIANTS = (
    OpVariant(
        "standard",
        standard,
        _cases("weight"),
        ("hidden_states", "weight"),
        _cost,
        static_shape=_site_shape,
        benchmark_case=_case_at("weight"),
        description="cast, then times weight",
    ),
    OpVariant(
        "offset",
        offset,
        _cases("weight"),
        ("hidden_states", "weight"),
        _cost,
        static_shape=_site_shape,
        benchmark_case=_case_at("weight"),
        description="times (1 + weight) in fp32",
    ),
    OpVariant(
        "cast_last",
        cast_last,
        _cases("weight"),
        ("hidden_states", "weight"),
        _cost,
        static_shape=_site_shape,
        benchmark_case=_case_at("weight"),
        description="times weight in fp32, then cast",
    ),
    OpVariant(
        "gated",
        gated,
        _cases("weight", "gate"),
        ("hidden_states", "weight", "gate"),
        _cost,
        check_module=_silu_gate,
        config_field="rms_norm_gated_implementation",
        static_shape=_site_shape,
        benchmark_case=_case_at("weight", "gate"),
        description="standard, then times silu(gate)",
    ),
    OpVariant(
        "residual",
        residual,
        _cases("weight", "residual"),
        ("hidden_states", "residual", "weight"),
        _cost,
        extends="standard",
        static_shape=_site_shape,
        benchmark_case=_case_at("weight", "residual"),
        description="standard of a residual sum, and the sum",
    ),
    OpVariant(
        "residual_cast_last",
        residual_cast_last,
        _cases("weight", "residual"),
        ("hidden_states", "residual", "weight"),
        _cost,
        extends="cast_last",
        static_shape=_site_shape,
        benchmark_case=_case_at("weight", "residual"),
        description="cast_last of a residual sum, and the sum",
    ),
    OpVariant(
        "batch_invariant",
        batch_invariant,
        _cases("weight"),
        ("hidden_states", "weight"),
        _cost,
        static_shape=_site_shape,
        benchmark_case=_case_at("weight"),
        description="standard, a row's bits free of its batch",
    ),
    OpVariant(
        "unweighted",
        unweighted,
        _cases(),
        ("hidden_states",),
        _cost,
        benchmark_case=_case_at(),
        description="no weight",
    ),
)

OP = OpSpec(
    name="rms_norm",
    description="root mean square layer norm",
    can_serve=can_serve,
    variants={variant.name: variant for variant in _VARIANTS},
)
