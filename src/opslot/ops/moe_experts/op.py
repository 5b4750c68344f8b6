"""Experts of a mixture of experts: contract, reference, input cases, cost and what a model must be for it.

Shapes: T tokens, K experts a token, E experts held here, H hidden and I intermediate width. `hidden_states` [T, H];
`gate_up_proj` [E, 2I, H], the first I rows of an expert being its gate; `down_proj` [E, H, I]; `top_k_index` [T, K]
integer; `top_k_weights` [T, K] in the activations' dtype or in float32. An index equal to E marks an expert of another
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.cases import randn
from opslot.ops._common.sites import text_config
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant, own_config, walk_slots

_IMPLEMENTATION = "_experts_implementation"


def standard(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """SwiGLU experts (Shazeer 2020, section 2): sum over a token's experts of weight * down(silu(gate x) * up x).

    Returns [T, H] in the dtype of `hidden_states`.
    """
    output = torch.zeros_like(hidden_states)
    for expert in range(gate_up_proj.shape[0]):
        choice, token = torch.where(top_k_index.t() == expert)
        if token.numel() == 0:
            continue
        gate, up = nn.functional.linear(hidden_states[token], gate_up_proj[expert]).chunk(2, dim=-1)
        expert_output = nn.functional.linear(nn.functional.silu(gate) * up, down_proj[expert])
        weighted = expert_output * top_k_weights[token, choice].unsqueeze(-1)
        output = output.index_add(0, token, weighted.to(output.dtype))
    return output


def _case(
    name: str,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    *,
    hit: int | None = None,
    sentinels: float = 0.0,
    strided: bool = False,
    float32_weights: bool = False,
    role: str = "check",
) -> InputCase:
    """`hit`: experts that the router can choose; `sentinels`: share of the choices that belong to another rank."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        where = generator.device
        x = randn((tokens, hidden * (2 if strided else 1)), dtype, device, generator)[:, :hidden]
        scores = torch.rand((tokens, experts), generator=generator, device=where)
        scores[:, hit or experts :] = 0.0
        weights, index = scores.topk(top_k, dim=-1)
        if sentinels:
            elsewhere = torch.rand((tokens, top_k), generator=generator, device=where) < sentinels
            index = index.masked_fill(elsewhere, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        return {
            "hidden_states": x,
            "gate_up_proj": randn((experts, 2 * intermediate, hidden), dtype, device, generator, hidden**-0.5),
            "down_proj": randn((experts, hidden, intermediate), dtype, device, generator, intermediate**-0.5),
            "top_k_index": index.to(device),
            "top_k_weights": weights.to(device, torch.float32 if float32_weights else dtype),
        }

    return InputCase(
        name, make, role, {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    )


_CASES = [
    _case("plain", 97, 4, 2, 64, 32),
    _case("float32 routing weights", 97, 4, 2, 64, 32, float32_weights=True),
    _case("empty experts", 21, 8, 2, 32, 48, hit=3),
    _case("one expert gets all", 50, 6, 1, 32, 16, hit=1),
    _case("experts of other ranks", 99, 4, 3, 64, 32, sentinels=0.6, float32_weights=True),
    _case("all on other ranks", 9, 4, 2, 32, 16, sentinels=1.1),
    _case("odd sizes", 19, 5, 3, 45, 27),
    _case("one token", 1, 8, 4, 32, 16),
    _case("every expert", 33, 3, 3, 40, 24),
    _case("strided tokens", 93, 4, 2, 32, 16, strided=True),
    _case("no tokens", 0, 4, 2, 32, 16),
    _case("several tiles", 130, 2, 1, 136, 72),
    _case("Qwen3-30B-A3B layer, T=16384", 16384, 128, 8, 2048, 768, float32_weights=True, role="bench"),
    _case("DeepSeek-V3 slice E=32, T=8192", 8192, 32, 8, 7168, 2048, float32_weights=True, role="bench"),
    _case("Qwen3-30B-A3B layer, T=2048", 2048, 128, 8, 2048, 768, float32_weights=True, role="bench"),
    _case("Mixtral layer, T=8192", 8192, 8, 2, 4096, 14336, float32_weights=True, role="bench"),
]


def _site_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    top_k = getattr(text_config(request), "num_experts_per_tok", None)
    if down is None or down.ndim != 3 or top_k is None:
        return None
    experts, hidden, intermediate = down.shape
    return {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}


def _case_at(shape: Mapping[str, int], tokens: int) -> InputCase:
    sizes = shape["experts"], shape["top_k"], shape["hidden"], shape["intermediate"]
    name = "T={} E={} K={} H={} I={}".format(tokens, *sizes)
    return _case(name, tokens, *sizes, float32_weights=True, role="bench")


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Three products of 2*I*H a chosen expert, each once forward and twice backward.

    Tokens, their output and both their gradients pass once; weights are read twice and their gradients written.
    """
    x, gate_up, down = arguments["hidden_states"], arguments["gate_up_proj"], arguments["down_proj"]
    chosen = int((arguments["top_k_index"] < gate_up.shape[0]).sum())
    parameters = gate_up.numel() + down.numel()
    return Cost(
        bytes=(4 * x.numel() + 3 * parameters) * x.element_size(),
        flops=18 * chosen * down.shape[1] * down.shape[2],
    )


def check_site(module: Any) -> str | None:
    """Why `module` does not compute the standard variant, or None."""
    if module is None:
        return None
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        return f"the experts' activation is {activation}, the kernels compute SiLU"
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    shapes = [tuple(w.shape) if isinstance(w, Tensor) else None for w in (gate_up, down)]
    if any(s is None or len(s) != 3 for s in shapes):
        return f"gate_up_proj and down_proj must be 3-D tensors, found shapes {shapes[0]} and {shapes[1]}"
    experts, double, hidden = shapes[0]  # type: ignore[misc]
    if getattr(module, "is_transposed", False) or shapes[1] != (experts, hidden, double // 2):
        return f"weights must be [E, 2I, H] and [E, H, I], found shapes {shapes[0]} and {shapes[1]}"
    if getattr(module, "has_bias", False) or getattr(module, "gate_up_proj_bias", None) is not None:
        return "the experts have biases"
    if not getattr(module, "is_concatenated", True):
        return "gate and up rows are interleaved, the kernels expect all gate rows first"
    if getattr(module, "has_post_expert_norm", False):
        return "the experts' outputs are normalized before they are summed"
    gating = getattr(type(module), "_apply_gate", None)
    if gating is not None and gating.__name__ != "_default_apply_gate":
        return f"{type(module).__name__} has a gating of its own (_apply_gate)"
    return None


def attach(model: Any, chosen: str, kernel: Any) -> list[tuple[Any, str | None]] | None:
    """Make "eager" mean upstream's own loop.

    Upstream dispatches around that loop, by default to its grouped_mm. A model whose experts no kernel can serve keeps
    upstream's dispatch: it was not told to be slow.
    """
    eager = [
        module
        for _, module, slot, op_name, _ in walk_slots(model)
        if op_name == OP.name and module.__dict__.get(f"_opslot_{slot}") is None and check_site(module) is None
    ]
    if not eager:
        return None
    own_config(model)
    configs = {id(c): c for c in (getattr(m, "config", None) for m in eager) if hasattr(c, _IMPLEMENTATION)}
    previous = [(config, getattr(config, _IMPLEMENTATION)) for config in configs.values()]
    for config, _ in previous:
        setattr(config, _IMPLEMENTATION, "eager")
    return previous


def detach(model: Any, state: list[tuple[Any, str | None]] | None) -> None:
    """Undo `attach`."""
    for config, previous in state or ():
        setattr(config, _IMPLEMENTATION, previous)


OP = OpSpec(
    name="moe_experts",
    description="the experts of a mixture of experts: routed SwiGLU MLPs and their weighted sum",
    config_field="moe_implementation",
    aliases=("moe_experts_implementation",),
    attach=attach,
    detach=detach,
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            _CASES,
            ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights"),
            _cost,
            check_site,
            # A fused kernel takes the gradient of a routing weight as a dot over I of (dout @ down_proj) with h, where
            # eager code takes it over H of dout with (h @ down_proj.T): as right, but each term carries a product's
            # rounding, which only shows where the inputs are as precise as the accumulation.
            roundings={"float32": 3},
            site_shape=_site_shape,
            case_at=_case_at,
            description="merged gate_up [E, 2I, H], SiLU, no bias",
        ),
    },
)
