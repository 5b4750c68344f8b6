"""Experts of a mixture of experts: references, costs and checks of modules. Shapes are those of contract.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from opslot.ops._common.activations import activate, activation_name, activation_problem
from opslot.ops._common.contract import variants_of
from opslot.ops._common.model_config import text_config
from opslot.ops.moe_experts._gating import bounded, halves_of
from opslot.ops.moe_experts.cases import BENCHMARK_FORMS, CASES, benchmark_case
from opslot.ops.moe_experts.contract import VARIANTS, Experts, ExpertsInputs
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant, SlotBinding
from opslot.slots.protocol import SLOTS, bound_kernel

_IMPLEMENTATION = "_experts_implementation"


def _reference(given: ExpertsInputs) -> Tensor:
    """The sum over each token's experts of weight * expert(token), in order of the experts."""
    hidden_states, experts, top_k_index, top_k_weights = given
    output = torch.zeros_like(hidden_states)
    for expert in range(len(experts.down_proj)):
        choice, token = torch.where(top_k_index.t() == expert)
        if token.numel() == 0:
            continue
        weighted = _expert(hidden_states[token], experts, expert) * top_k_weights[token, choice].unsqueeze(-1)
        output = output.index_add(0, token, weighted.to(output.dtype))
    return output


def _expert(x: Tensor, experts: Experts, expert: int) -> Tensor:
    def project(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        out = x @ weight[expert] if transposed else linear(x, weight[expert])
        return out if bias is None else out + bias[expert]

    parts = tuple([project(x, w, experts.gate_up_bias, experts.transposed) for w in experts.gate_up_weights])
    act = _activated(*bounded(*halves_of(parts, experts), experts), experts)
    return project(act, experts.down_proj, experts.down_bias, experts.down_transposed)


def _activated(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    alpha, limit = experts.alpha, experts.limit
    activated = activate(experts.activation, gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    if not experts.gated:
        return activated
    if experts.clamps_activation:
        activated = activated.clamp(max=limit)
    return activated * (up + experts.up_offset if experts.up_offset else up)


standard, clamped, biased, split, transposed, ungated = variants_of(_reference, VARIANTS)


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    top_k = getattr(text_config(request), "num_experts_per_tok", None)
    if down is None or down.ndim != 3 or top_k is None:
        return None
    experts, hidden, intermediate = down.shape
    if request.variant in ("biased", "transposed"):
        hidden, intermediate = intermediate, hidden
    return {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Three GEMMs of 2*I*H FLOPs per token-expert pair, two without a gate, each once in forward and twice in backward.

    Tokens, outputs and both gradients are read or written once; weights are read twice and their gradients written.
    """
    x, down = arguments["hidden_states"], arguments["down_proj"]
    chosen = int((arguments["top_k_index"] < down.shape[0]).sum())
    gemms = 3 if "up_proj" not in arguments or "gate_proj" in arguments else 2
    return Cost(
        bytes=(4 * x.numel() + 3 * gemms * down.numel()) * x.element_size(),
        flops=6 * gemms * chosen * down.shape[1] * down.shape[2],
    )


def check_standard(module: Any) -> str | None:
    """Why `module` does not compute the standard variant, or None."""
    problem = activation_problem(getattr(module, "act_fn", None)) or _layout_problem(module)
    return problem or _gating_problem(module)


def check_split(module: Any) -> str | None:
    """Why `module` does not compute the split variant, or None."""
    names = ("w1", "v1", "w2")
    shapes = [_shape_of(module, name) for name in names]
    width = getattr(module, "ffn_hidden_size", 0)
    if shapes[0] is None or len(set(shapes)) > 1 or len(shapes[0]) != 2 or not width or shapes[0][0] % width:
        found = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        return f"w1, v1 and w2 must be [E * I, H] with I = {width}, found {found}"
    return (
        activation_problem(getattr(module, "activation_fn", None))
        or _extras_problem(module, names)
        or _gating_problem(module)
    )


def check_transposed(module: Any) -> str | None:
    """Why `module` does not compute the transposed variant, or None."""
    gate_up, down = shapes = [_shape_of(module, name) for name in ("gate_up_proj", "down_proj")]
    if gate_up is None or down is None or len(down) != 3 or gate_up != (down[0], down[2], 2 * down[1]):
        return f"weights must be [E, H, 2I] and [E, I, H], found shapes {shapes[0]} and {shapes[1]}"
    return (
        activation_problem(getattr(module, "act_fn", None))
        or _extras_problem(module, ("gate_up_proj", "down_proj"))
        or _gating_problem(module)
    )


def check_ungated(module: Any) -> str | None:
    """Why `module` does not compute the ungated variant, or None."""
    up, down = shapes = [_shape_of(module, name) for name in ("up_proj", "down_proj")]
    if up is None or down is None or len(down) != 3 or up != (down[0], down[2], down[1]):
        return f"weights must be [E, I, H] and [E, H, I], found shapes {shapes[0]} and {shapes[1]}"
    return activation_problem(getattr(module, "act_fn", None)) or _extras_problem(module, ("up_proj", "down_proj"))


def check_clamped(module: Any) -> str | None:
    """Why `module` does not hold what the clamped variant requires, or None. The patch guarantees the gating."""
    activation = getattr(module, "act_fn", None)
    if activation is not None and activation_name(activation) != "silu":
        return f"the experts' activation is {type(activation).__name__}, the kernels clamp SiLU's input only"
    if not any(_is_number(module, name) for name in ("limit", "swiglu_limit")):
        return f"{type(module).__name__} has no limit of its gating"
    return _layout_problem(module)


def check_biased(module: Any) -> str | None:
    """Why `module` does not hold what the biased variant requires, or None. The patch guarantees the gating."""
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
        return "gate columns come first, the kernels expect interleaved gate and up columns"
    missing = [name for name in ("limit", "alpha") if not _is_number(module, name)]
    return f"{type(module).__name__} has no {' and no '.join(missing)} of its gating" if missing else None


def _shape_of(module: Any, name: str) -> tuple[int, ...] | None:
    tensor = getattr(module, name, None)
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def _gating_problem(module: Any) -> str | None:
    owner = next((cls for cls in type(module).__mro__ if "_apply_gate" in cls.__dict__), None)
    # A generated class has its slot for the gate that it was reviewed with.
    if owner is None or SLOTS in owner.__dict__ or owner.__dict__["_apply_gate"].__name__ == "_default_apply_gate":
        return None
    return f"{type(module).__name__} overrides _apply_gate"


def _extras_problem(module: Any, weights: tuple[str, ...]) -> str | None:
    """Why the experts compute more than GEMMs and a gating, or None."""
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
    rows, double, hidden = shapes[0]  # type: ignore[misc]
    # Experts that return their input may have unused rows.
    experts = getattr(module, "num_routed_experts", rows)
    if getattr(module, "is_transposed", False) or shapes[1] != (experts, hidden, double // 2):
        return f"weights must be [E, 2I, H] and [E, H, I], found shapes {shapes[0]} and {shapes[1]}"
    if not getattr(module, "is_concatenated", True):
        return "gate and up rows are interleaved, the kernels expect all gate rows first"
    return _extras_problem(module, ("gate_up_proj", "down_proj"))


def _is_number(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), int | float)


def attach(model: Any, slots: Sequence[SlotBinding], kernel: Any) -> list[tuple[Any, str | None]]:
    """Make "eager", where a field names it, mean Transformers' own loop.

    Transformers dispatches to other implementations, by default grouped_mm. Experts that no kernel supports keep that
    dispatch.
    """
    named = [(model.get_submodule(slot.path), slot) for slot in slots if slot.resolution.names_eager]
    eager = [
        module
        for module, slot in named
        if bound_kernel(module, slot.slot) is None and _served(slot.resolution.variant, module)
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
    """The implementation that Transformers dispatches to if no kernel is bound to `module`."""
    return getattr(getattr(module, "config", None), _IMPLEMENTATION, None)


# A fused kernel computes the gradient of a routing weight as dot(dout @ down_proj, h) over I, eager code as
# dot(dout, h @ down_proj.T) over H. Both are correct, but in the former each term has a GEMM's rounding error, which
# matters only if the inputs are as precise as the accumulation.
_TOLERANCE_ULPS = {"float32": 3}


def _variant(
    reference: Callable[..., Tensor], check: Callable[[Any], str | None], weights: tuple[str, ...], description: str
) -> OpVariant:
    """A variant named after its reference; `weights` are its parameters."""
    name = reference.__name__
    return OpVariant(
        name,
        reference,
        CASES[name],
        ("hidden_states", *weights, "top_k_weights"),
        _cost,
        check,
        tolerance_ulps=_TOLERANCE_ULPS,
        compiles=False,
        static_shape=_static_shape,
        benchmark_case=partial(benchmark_case, form=BENCHMARK_FORMS[name]),
        description=description,
    )


_MERGED = ("gate_up_proj", "down_proj")
_VARIANTS = (
    _variant(standard, check_standard, _MERGED, "merged gate_up [E, 2I, H], no bias"),
    _variant(clamped, check_clamped, _MERGED, "merged gate_up [E, 2I, H], gate and up within a limit, no bias"),
    _variant(
        biased,
        check_biased,
        (*_MERGED, "gate_up_proj_bias", "down_proj_bias"),
        "transposed and interleaved gate_up [E, H, 2I], biases, gate and up within a limit (gpt-oss)",
    ),
    _variant(
        split,
        check_split,
        ("gate_proj", "up_proj", "down_proj"),
        "separate gate and up; gate, up and down [E, I, H] each, no bias (DBRX)",
    ),
    _variant(
        transposed,
        check_transposed,
        _MERGED,
        "transposed gate_up [E, H, 2I] and down [E, I, H], no bias (Aria, Llama 4)",
    ),
    _variant(
        ungated,
        check_ungated,
        ("up_proj", "down_proj"),
        "up and down without a gate, [E, I, H] and [E, H, I], no bias (Nemotron 3)",
    ),
)


def _quantized_experts(model: Any) -> str:
    found = (module.__dict__.get("quantized_experts") for module in model.modules())
    format_name = next(filter(None, found), None)
    return f"the weights of experts are {format_name} too, dequantized for each call" if format_name else ""


OP = OpSpec(
    name="moe_experts",
    description="the experts of a mixture of experts: routed gated MLPs and their weighted sum",
    config_field="moe_implementation",
    aliases=("moe_experts_implementation",),
    attach=attach,
    detach=detach,
    runs=runs,
    note=_quantized_experts,
    variants={variant.name: variant for variant in _VARIANTS},
)
