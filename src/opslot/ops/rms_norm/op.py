"""RMSNorm (Zhang and Sennrich 2019, equation 4): contract, references and costs.

Shapes: `hidden_states` [..., H] with any strides, `weight` [H], `gate` and `residual` like `hidden_states`;
statistics in float32 (float64 for float64 input); `eps` is added to the mean of squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.arguments import upcast
from opslot.ops._common.hooks import has_hooks
from opslot.ops._common.model_config import head_sizes, text_config
from opslot.ops.rms_norm.cases import (
    benchmark_case,
    cases,
    group_benchmark_case,
    group_cases,
    offset_group_cases,
)
from opslot.slots import BoundKernel, Cost, KernelRequest, OpSpec, OpVariant
from opslot.slots.protocol import bound_kernel, declared_slots


def _normalize(hidden_states: Tensor, eps: float) -> Tensor:
    x = upcast(hidden_states)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Used by Llama: normalize in fp32, cast to the input's dtype, multiply by `weight`.

    Returns [..., H] in the dtype that torch promotes `weight` and `hidden_states` to.
    """
    return weight * _normalize(hidden_states, eps).to(hidden_states.dtype)


def weight_offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Used by Gemma and Qwen3.5: multiply by (1 + weight) in fp32, cast last. Returns the input's dtype."""
    normalized = _normalize(hidden_states, eps)
    return (normalized * (1.0 + weight.to(normalized.dtype))).to(hidden_states.dtype)


def cast_after_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Used by T5, gpt-oss and OLMo 2: multiply by `weight` in fp32, cast after the weight. Returns the input's dtype.

    Only the result is rounded; `standard` also rounds the normalized values before the weight.
    """
    normalized = _normalize(hidden_states, eps)
    return (weight.to(normalized.dtype) * normalized).to(hidden_states.dtype)


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """The gated delta rule's output norm: standard, then times silu(gate) in fp32. Returns the input's dtype."""
    normalized = standard(hidden_states, weight, eps)
    return (normalized * nn.functional.silu(upcast(gate))).to(hidden_states.dtype)


# Activations of the gate of `gated_groups`.
GATES: dict[str, Callable[..., Tensor]] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def gated_groups(
    hidden_states: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    group_size: int,
    gate_after: bool = False,
    cast_after_weight: bool = False,
    activation: str = "silu",
) -> Tensor:
    """A Mamba-2 mixer's output norm: x * silu(gate) in fp32, normalized in groups of `group_size`, cast, times weight.

    Kimi delta attention's is that of one group, with `gate_after`, `cast_after_weight` and sigmoid.

    Args:
        gate_after: multiply the result by silu(gate) instead.
        cast_after_weight: cast to the input's dtype last; else before the weight, and the result has the dtype that
            torch promotes `weight` and `hidden_states` to.
        activation: of the gate, in `GATES`.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    x, activated = hidden_states.to(dtype), GATES[activation](gate.to(dtype))
    normalized = _normalize((x if gate_after else x * activated).unflatten(-1, (-1, group_size)), eps).flatten(-2)
    out = weight * (normalized if cast_after_weight else normalized.to(hidden_states.dtype))
    if gate_after:
        out = out * activated
    return out.to(hidden_states.dtype) if cast_after_weight or gate_after else out


def weight_offset_groups(hidden_states: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """`weight_offset` in groups of `group_size` elements, which divide a row; whole rows if None. Used by Qwen4."""
    if group_size is None:
        return weight_offset(hidden_states, weight, eps)
    x, of_groups = (each.unflatten(-1, (-1, group_size)) for each in (hidden_states, weight))
    return weight_offset(x, of_groups, eps).flatten(-2)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """Without weight. Returns the input's dtype."""
    return _normalize(hidden_states, eps).to(hidden_states.dtype)


def _with_residual(norm: Callable[..., Tensor], name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fused_add(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """A decoder's residual addition and the norm after it. Returns (normalized, sum), both [..., H].

        The sum is rounded to the dtype that torch promotes its terms to, and the norm is applied to the rounded sum.
        """
        total = residual + hidden_states
        return norm(total, weight, eps), total

    fused_add.__name__ = fused_add.__qualname__ = name
    return fused_add


fused_add = _with_residual(standard, "fused_add")
fused_add_cast_after_weight = _with_residual(cast_after_weight, "fused_add_cast_after_weight")
fused_add_weight_offset = _with_residual(weight_offset, "fused_add_weight_offset")


def _gate_of(*activations: str) -> Callable[[Any], str | None]:
    """Why the gate of a module has another activation: an attribute of the class, or SiLU without it."""

    def problem(module: Any) -> str | None:
        activation = getattr(module, "activation", "silu")
        supported = " or ".join(activations)
        return None if activation in activations else f"the gate's activation is {activation!r}, not {supported}"

    return problem


def can_serve(kernel: BoundKernel, *norms: Any) -> bool:
    """Whether `kernel` can replace what it fuses and calls of `norms`.

    True if each norm is bound to the kernel of rms_norm of the same name, or `auto` selected both, and a call of the
    norm only runs its forward, with a weight of its own.
    """
    for norm in norms:
        bound = bound_kernel(norm, "rms_norm")
        if bound is None or (bound.name != kernel.name and (bound.explicit or kernel.explicit)):
            return False
        if "forward" in norm.__dict__ or norm._parameters.get("weight") is None or has_hooks(norm):
            return False
    return True


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    module = request.module
    if request.variant.startswith("fused_add") and module is not None:
        # The slot of a residual sum is on the decoder layer, whose norms have one width.
        module = next((child for child in module.children() if OP.name in declared_slots(child)), None)
    weight = getattr(module, "weight", None)
    if weight is None:
        return None
    width = weight.shape[-1]
    sizes = head_sizes(request)
    of_heads = sizes is not None and width == sizes["head_dim"] != text_config(request).hidden_size
    return {"width": width, "heads": sizes["heads"] if sizes and of_heads else 1}


def _shape_of_one_group(request: KernelRequest) -> Mapping[str, int] | None:
    """Norms of several groups are not tuned."""
    of_groups = any(hasattr(request.module, name) for name in ("group_size", "n_groups"))
    return None if of_groups else _static_shape(request)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads x and writes y, backward reads both x and dy and writes dx.

    A gate adds two reads and a write; a residual is read, the sum written, and the sum's gradient read.
    """
    x = arguments["hidden_states"]
    passes = 5 + (3 if "gate" in arguments or "residual" in arguments else 0)
    return Cost(bytes=passes * x.numel() * x.element_size())


def _variant(reference: Callable[..., Any], description: str, *others: str, **options: Any) -> OpVariant:
    """A variant named after its reference; `others` are its tensors beside `hidden_states`."""
    return OpVariant(
        reference.__name__,
        reference,
        cases(*others),
        ("hidden_states", *others),
        _cost,
        static_shape=_static_shape,
        benchmark_case=partial(benchmark_case, others),
        description=description,
        **options,
    )


def _gated(reference: Callable[..., Any], description: str, **options: Any) -> OpVariant:
    return _variant(reference, description, "weight", "gate", config_field="rms_norm_gated_implementation", **options)


def _fused_add(reference: Callable[..., Any], extends: str) -> OpVariant:
    return _variant(reference, f"{extends} of a residual sum, and the sum", "residual", "weight", extends=extends)


_VARIANTS = (
    _variant(standard, "cast, then times weight", "weight"),
    _variant(weight_offset, "times (1 + weight) in fp32", "weight"),
    _variant(cast_after_weight, "times weight in fp32, then cast", "weight"),
    replace(
        _variant(weight_offset_groups, "weight_offset in groups", "weight"),
        cases=offset_group_cases(),
        static_shape=None,
        benchmark_case=None,
    ),
    _gated(gated, "standard, then times silu(gate)", check_module=_gate_of("silu", "swish")),
    replace(
        _gated(gated_groups, "in groups, with a gate before or after it", check_module=_gate_of(*GATES)),
        cases=group_cases(),
        static_shape=_shape_of_one_group,
        benchmark_case=group_benchmark_case,
    ),
    _fused_add(fused_add, "standard"),
    _fused_add(fused_add_cast_after_weight, "cast_after_weight"),
    _fused_add(fused_add_weight_offset, "weight_offset"),
    replace(_variant(unweighted, "no weight"), static_shape=None),
)

OP = OpSpec(
    name="rms_norm",
    description="root mean square layer norm",
    can_serve=can_serve,
    variants={variant.name: variant for variant in _VARIANTS},
)
