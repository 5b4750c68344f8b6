"""Experts of a mixture of experts: contract, reference, input cases, cost and what a model must be for it.

Shapes: T tokens, K experts a token, E experts held here, H hidden and I intermediate width. `hidden_states` [T, H];
`gate_up_proj` [E, 2I, H], the first I rows of an expert being its gate; `down_proj` [E, H, I]; `top_k_index` [T, K]
integer; `top_k_weights` [T, K] in the activations' dtype or in float32. An index equal to E marks an expert of another
rank. Every variant takes the parameters as a module holds them; those of `biased` and `split` lie otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from opslot.ops._common.sites import text_config
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant, walk_slots
from opslot.slots.protocol import bound_kernel
from opslot.slots.random_inputs import randn

_IMPLEMENTATION = "_experts_implementation"
# From a dtype and the standard variant's arguments to another variant's.
Form = Callable[[torch.dtype, dict[str, Any]], dict[str, Any]]


def standard(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """SwiGLU experts (Shazeer 2020, section 2): sum over a token's experts of weight * down(silu(gate x) * up x).

    Returns [T, H] in the dtype of `hidden_states`.
    """
    return _sum_over_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        lambda x, e: linear(_gated_halves(linear(x, gate_up_proj[e])), down_proj[e]),
        gate_up_proj.shape[0],
    )


def clamped(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    limit: float,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """`standard` with a bounded gating: (u + up_offset) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within
    -limit..limit; no gradient passes a bound.

    DeepSeek-V4's experts with the defaults, MiniMax-M3's with alpha 1.702 and up_offset 1.
    """
    return _sum_over_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        lambda x, e: linear(_gated_halves(linear(x, gate_up_proj[e]), limit, alpha, up_offset), down_proj[e]),
        gate_up_proj.shape[0],
    )


def biased(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj_bias: Tensor,
    down_proj_bias: Tensor,
    limit: float,
    alpha: float,
) -> Tensor:
    """gpt-oss's experts: `clamped` with up_offset 1, biases on both products, and weights that lie transposed.

    `gate_up_proj` [E, H, 2I] and `gate_up_proj_bias` [E, 2I] with gate and up columns in turn; `down_proj` [E, I, H];
    `down_proj_bias` [E, H].
    """

    def expert(x: Tensor, e: int) -> Tensor:
        gate_up = x @ gate_up_proj[e] + gate_up_proj_bias[e]
        gated = _gated(gate_up[..., ::2], gate_up[..., 1::2], limit, alpha, 1.0)
        return gated @ down_proj[e] + down_proj_bias[e]

    return _sum_over_experts(hidden_states, top_k_index, top_k_weights, expert, gate_up_proj.shape[0])


def split(
    hidden_states: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """`standard` with gate and up in tensors of their own, `gate_proj` and `up_proj` [E, I, H]."""
    return _sum_over_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        lambda x, e: linear(_gated(linear(x, gate_proj[e]), linear(x, up_proj[e])), down_proj[e]),
        gate_proj.shape[0],
    )


def _gated_halves(gate_up: Tensor, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _gated(gate, up, limit, alpha, up_offset)


def _gated(gate: Tensor, up: Tensor, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated = nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return activated * (up + up_offset if up_offset else up)


def _sum_over_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    run: Callable[[Tensor, int], Tensor],
    experts: int,
) -> Tensor:
    """[T, H]: each token's sum of weight * run(token, expert), in order of the experts."""
    output = torch.zeros_like(hidden_states)
    for expert in range(experts):
        choice, token = torch.where(top_k_index.t() == expert)
        if token.numel() == 0:
            continue
        weighted = run(hidden_states[token], expert) * top_k_weights[token, choice].unsqueeze(-1)
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
    form: Form | None = None,
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
        arguments = {
            "hidden_states": x,
            "gate_up_proj": randn((experts, 2 * intermediate, hidden), dtype, device, generator, hidden**-0.5),
            "down_proj": randn((experts, hidden, intermediate), dtype, device, generator, intermediate**-0.5),
            "top_k_index": index.to(device),
            "top_k_weights": weights.to(device, torch.float32 if float32_weights else dtype),
        }
        return form(dtype, arguments) if form is not None else arguments

    return InputCase(
        name, make, role, {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    )


def _limit(dtype: torch.dtype) -> float:
    """A bound that a third of the cases' values pass, halfway between two numbers of `dtype`.

    So rounding puts no value on the other side of it, where the gradient is another.
    """
    return 1.0 + torch.finfo(dtype).eps / 2


def _bounded(dtype: torch.dtype, arguments: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
    return {**arguments, "limit": limit or _limit(dtype)}


def _bounded_with_offset(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    return {**_bounded(dtype, arguments), "alpha": 1.702, "up_offset": 1.0}


def _biased(dtype: torch.dtype, arguments: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
    gate_up, down = arguments["gate_up_proj"], arguments["down_proj"]
    _, double, hidden = gate_up.shape
    # Biases as large as what they are added to, made of the weights: a form draws no numbers of its own.
    return {
        **arguments,
        "gate_up_proj": gate_up.mT.contiguous(),
        "down_proj": down.mT.contiguous(),
        "gate_up_proj_bias": gate_up[:, :, 0] * hidden**0.5,
        "down_proj_bias": down[:, :, 0] * (double // 2) ** 0.5,
        "limit": limit or _limit(dtype),
        "alpha": 1.702,
    }


def _split(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arguments)
    gate, up = (half.contiguous() for half in rest.pop("gate_up_proj").chunk(2, dim=1))
    return {"hidden_states": rest.pop("hidden_states"), "gate_proj": gate, "up_proj": up, **rest}


# With the limits of DeepSeek-V4 and gpt-oss, for shapes whose results are compared with eager code's in the same dtype:
# biases added to rounded products put many values on the other side of a near bound.
_DEEPSEEK_V4 = partial(_bounded, limit=10.0)
_GPT_OSS = partial(_biased, limit=7.0)


def _cases_of(form: Form, timed: Form) -> list[InputCase]:
    return [
        _case("plain", 97, 4, 2, 64, 32, form=form),
        _case("float32 routing weights", 97, 4, 2, 64, 32, float32_weights=True, form=form),
        _case("empty experts", 21, 8, 2, 32, 48, hit=3, form=form),
        _case("one expert gets all", 50, 6, 1, 32, 16, hit=1, form=form),
        _case("experts of other ranks", 99, 4, 3, 64, 32, sentinels=0.6, float32_weights=True, form=form),
        _case("all on other ranks", 9, 4, 2, 32, 16, sentinels=1.1, form=form),
        _case("odd sizes", 19, 5, 3, 45, 27, form=form),
        _case("one token", 1, 8, 8, 32, 48, form=form),
        _case("no tokens", 0, 4, 2, 32, 16, form=form),
        _case("several tiles", 130, 2, 1, 136, 72, form=form),
        _case("gpt-oss-20b layer, T=8192", 8192, 32, 4, 2880, 2880, form=timed, role="bench"),
        _case("gpt-oss-20b layer, T=1024", 1024, 32, 4, 2880, 2880, form=timed, role="bench"),
    ]


def _unbounded_checks(form: Form | None = None) -> list[InputCase]:
    return [
        _case("plain", 97, 4, 2, 64, 32, form=form),
        _case("float32 routing weights", 97, 4, 2, 64, 32, float32_weights=True, form=form),
        _case("empty experts", 21, 8, 2, 32, 48, hit=3, form=form),
        _case("one expert gets all", 50, 6, 1, 32, 16, hit=1, form=form),
        _case("experts of other ranks", 99, 4, 3, 64, 32, sentinels=0.6, float32_weights=True, form=form),
        _case("all on other ranks", 9, 4, 2, 32, 16, sentinels=1.1, form=form),
        _case("odd sizes", 19, 5, 3, 45, 27, form=form),
        _case("one token", 1, 8, 4, 32, 16, form=form),
        _case("every expert", 33, 3, 3, 40, 24, form=form),
        _case("strided tokens", 93, 4, 2, 32, 16, strided=True, form=form),
        _case("no tokens", 0, 4, 2, 32, 16, form=form),
        _case("several tiles", 130, 2, 1, 136, 72, form=form),
    ]


def _qwen3(tokens: int, form: Form | None = None) -> InputCase:
    name = f"Qwen3-30B-A3B layer, T={tokens}"
    return _case(name, tokens, 128, 8, 2048, 768, float32_weights=True, form=form, role="bench")


_CASES = [
    *_unbounded_checks(),
    _qwen3(16384),
    _case("DeepSeek-V3 slice E=32, T=8192", 8192, 32, 8, 7168, 2048, float32_weights=True, role="bench"),
    _qwen3(256),
    _qwen3(2048),
    _case("Mixtral layer, T=8192", 8192, 8, 2, 4096, 14336, float32_weights=True, role="bench"),
]


def _site_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    top_k = getattr(text_config(request), "num_experts_per_tok", None)
    if down is None or down.ndim != 3 or top_k is None:
        return None
    experts, hidden, intermediate = down.shape
    if request.variant == "biased":
        hidden, intermediate = intermediate, hidden
    return {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}


def _case_at(shape: Mapping[str, int], tokens: int, form: Form | None = None) -> InputCase:
    sizes = shape["experts"], shape["top_k"], shape["hidden"], shape["intermediate"]
    name = "T={} E={} K={} H={} I={}".format(tokens, *sizes)
    return _case(name, tokens, *sizes, float32_weights=True, form=form, role="bench")


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Three products of 2*I*H a chosen expert, each once forward and twice backward.

    Tokens, their output and both their gradients pass once; weights are read twice and their gradients written.
    """
    x, down = arguments["hidden_states"], arguments["down_proj"]
    chosen = int((arguments["top_k_index"] < down.shape[0]).sum())
    return Cost(
        bytes=(4 * x.numel() + 9 * down.numel()) * x.element_size(),
        flops=18 * chosen * down.shape[1] * down.shape[2],
    )


def check_standard(module: Any) -> str | None:
    """Why `module` does not compute the standard variant, or None."""
    if module is None:
        return None
    problem = _activation_problem(module) or _layout_problem(module)
    return problem or _gating_problem(module)


def check_split(module: Any) -> str | None:
    """Why `module` does not compute the split variant, or None."""
    if module is None:
        return None
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = [_shape_of(module, name) for name in names]
    down = shapes[2]
    if down is None or len(down) != 3:
        return f"down_proj must be a 3-D tensor, found shape {down}"
    experts, hidden, intermediate = down
    wanted = (experts, intermediate, hidden)
    if shapes[:2] != [wanted, wanted] or getattr(module, "is_transposed", False):
        found = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        return f"weights must be [E, I, H], [E, I, H] and [E, H, I], found {found}"
    return _activation_problem(module) or _extras_problem(module, names) or _gating_problem(module)


def check_clamped(module: Any) -> str | None:
    """Why `module` does not hold what the clamped variant takes, or None; that it gates so is its patch's to know."""
    if module is None:
        return None
    if getattr(module, "act_fn", None) is not None and (problem := _activation_problem(module)):
        return problem
    if not any(_is_number(module, name) for name in ("limit", "swiglu_limit")):
        return f"{type(module).__name__} has no limit of its gating"
    return _layout_problem(module)


def check_biased(module: Any) -> str | None:
    """Why `module` does not hold what the biased variant takes, or None; that it gates so is its patch's to know."""
    if module is None:
        return None
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    shapes = [_shape_of(module, name) for name in names]
    down = shapes[1]
    if down is None or len(down) != 3:
        return f"down_proj must be a 3-D tensor, found shape {down}"
    experts, intermediate, hidden = down
    wanted = [(experts, hidden, 2 * intermediate), down, (experts, 2 * intermediate), (experts, hidden)]
    if shapes != wanted or not getattr(module, "is_transposed", True):
        found = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        return f"parameters must be [E, H, 2I], [E, I, H], [E, 2I] and [E, H], found {found}"
    if getattr(module, "is_concatenated", False):
        return "gate columns come first, the kernels expect gate and up columns in turn"
    missing = [name for name in ("limit", "alpha") if not _is_number(module, name)]
    return f"{type(module).__name__} has no {' and no '.join(missing)} of its gating" if missing else None


def _shape_of(module: Any, name: str) -> tuple[int, ...] | None:
    tensor = getattr(module, name, None)
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def _activation_problem(module: Any) -> str | None:
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation in ("SiLU", "SiLUActivation"):
        return None
    return f"the experts' activation is {activation}, the kernels compute SiLU"


def _gating_problem(module: Any) -> str | None:
    gating = getattr(type(module), "_apply_gate", None)
    if gating is not None and gating.__name__ != "_default_apply_gate":
        return f"{type(module).__name__} has a gating of its own (_apply_gate)"
    return None


def _extras_problem(module: Any, weights: tuple[str, ...]) -> str | None:
    """Why the experts compute more than products and a gating, or None."""
    if getattr(module, "has_bias", False) or any(getattr(module, f"{n}_bias", None) is not None for n in weights):
        return "the experts have biases"
    if getattr(module, "has_post_expert_norm", False):
        return "the experts' outputs are normalized before they are summed"
    return None


def _layout_problem(module: Any) -> str | None:
    """Why the parameters are not gate_up [E, 2I, H], gate first, and down [E, H, I] without biases, or None."""
    shapes = [_shape_of(module, name) for name in ("gate_up_proj", "down_proj")]
    if any(s is None or len(s) != 3 for s in shapes):
        return f"gate_up_proj and down_proj must be 3-D tensors, found shapes {shapes[0]} and {shapes[1]}"
    experts, double, hidden = shapes[0]  # type: ignore[misc]
    if getattr(module, "is_transposed", False) or shapes[1] != (experts, hidden, double // 2):
        return f"weights must be [E, 2I, H] and [E, H, I], found shapes {shapes[0]} and {shapes[1]}"
    if not getattr(module, "is_concatenated", True):
        return "gate and up rows are interleaved, the kernels expect all gate rows first"
    return _extras_problem(module, ("gate_up_proj", "down_proj"))


def _is_number(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), int | float)


def attach(model: Any, slot: Any, kernel: Any) -> list[tuple[Any, str | None]]:
    """Make "eager" mean Transformers' own loop.

    Transformers dispatches around that loop, by default to its grouped_mm. Experts that no kernel can serve keep that
    dispatch: nobody asked them to be slow.
    """
    eager = [
        at.module
        for at in walk_slots(model)
        if at.op_name == OP.name and bound_kernel(at.module, at.name) is None and _served(at.variant, at.module)
    ]
    configs = {id(c): c for c in (getattr(m, "config", None) for m in eager) if hasattr(c, _IMPLEMENTATION)}
    previous = [(config, getattr(config, _IMPLEMENTATION)) for config in configs.values()]
    for config, _ in previous:
        setattr(config, _IMPLEMENTATION, "eager")
    return previous


def _served(variant: str, module: Any) -> bool:
    check = OP.variant(variant).check_module
    return check is None or check(module) is None


def detach(model: Any, state: list[tuple[Any, str | None]]) -> None:
    """Undo `attach`, unless another implementation was set on the model since."""
    for config, previous in state:
        if getattr(config, _IMPLEMENTATION) == "eager":
            setattr(config, _IMPLEMENTATION, previous)


def runs(module: Any) -> str | None:
    """What Transformers dispatches to where no kernel is in the slot of `module`."""
    return getattr(getattr(module, "config", None), _IMPLEMENTATION, None)


_GRADIENTS = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights")
# A fused kernel takes the gradient of a routing weight as a dot over I of (dout @ down_proj) with h, where eager code
# takes it over H of dout with (h @ down_proj.T): as right, but each term carries a product's rounding, which only shows
# where the inputs are as precise as the accumulation.
_ROUNDINGS = {"float32": 3}

_VARIANTS = (
    OpVariant(
        "standard",
        standard,
        _CASES,
        _GRADIENTS,
        _cost,
        check_standard,
        tolerance_ulps=_ROUNDINGS,
        compiles=False,
        static_shape=_site_shape,
        benchmark_case=_case_at,
        description="merged gate_up [E, 2I, H], SiLU, no bias",
    ),
    OpVariant(
        "clamped",
        clamped,
        [_case("bounded and offset", 61, 4, 2, 40, 24, form=_bounded_with_offset), *_cases_of(_bounded, _DEEPSEEK_V4)],
        _GRADIENTS,
        _cost,
        check_clamped,
        tolerance_ulps=_ROUNDINGS,
        compiles=False,
        static_shape=_site_shape,
        benchmark_case=partial(_case_at, form=_DEEPSEEK_V4),
        description="merged gate_up [E, 2I, H], gate and up within a limit, no bias",
    ),
    OpVariant(
        "biased",
        biased,
        _cases_of(_biased, _GPT_OSS),
        (*_GRADIENTS, "gate_up_proj_bias", "down_proj_bias"),
        _cost,
        check_biased,
        tolerance_ulps=_ROUNDINGS,
        compiles=False,
        static_shape=_site_shape,
        benchmark_case=partial(_case_at, form=_GPT_OSS),
        description="transposed and interleaved gate_up [E, H, 2I], biases, gate and up within a limit (gpt-oss)",
    ),
    OpVariant(
        "split",
        split,
        [*_unbounded_checks(_split), _qwen3(16384, _split), _qwen3(256, _split)],
        ("hidden_states", "gate_proj", "up_proj", "down_proj", "top_k_weights"),
        _cost,
        check_split,
        tolerance_ulps=_ROUNDINGS,
        compiles=False,
        static_shape=_site_shape,
        benchmark_case=partial(_case_at, form=_split),
        description="gate and up apart, [E, I, H] each, SiLU, no bias",
    ),
)

OP = OpSpec(
    name="moe_experts",
    description="the experts of a mixture of experts: routed SwiGLU MLPs and their weighted sum",
    config_field="moe_implementation",
    aliases=("moe_experts_implementation",),
    attach=attach,
    detach=detach,
    runs=runs,
    variants={variant.name: variant for variant in _VARIANTS},
)
