"""Input cases of moe_experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from opslot.ops._common.activations import ACTIVATIONS
from opslot.slots import InputCase
from opslot.slots.random_inputs import randn

# (dtype, arguments of the standard variant) -> arguments of another variant
CaseForm = Callable[[torch.dtype, dict[str, Any]], dict[str, Any]]


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
    form: CaseForm | None = None,
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
    """A limit that a third of the cases' values exceed, halfway between two numbers of `dtype`.

    Rounding then never moves a value across the limit, where the gradient is discontinuous.
    """
    return 1.0 + torch.finfo(dtype).eps / 2


def _bounded(dtype: torch.dtype, arguments: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
    return {**arguments, "limit": limit or _limit(dtype)}


def _bounded_with_offset(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    return {**_bounded(dtype, arguments), "alpha": 1.702, "up_offset": 1.0}


def _bounded_activation(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    gate = _limit(dtype)
    return {**_bounded(dtype, arguments, gate / (1.0 + math.exp(-gate))), "clamps_activation": True}


def _biased(dtype: torch.dtype, arguments: dict[str, Any], limit: float | None = None) -> dict[str, Any]:
    gate_up, down = arguments["gate_up_proj"], arguments["down_proj"]
    _, double, hidden = gate_up.shape
    # Biases as large as the values they are added to, computed from the weights, so that no random numbers are drawn.
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
    rest["down_proj"] = rest["down_proj"].mT.contiguous()
    return {"hidden_states": rest.pop("hidden_states"), "gate_proj": gate, "up_proj": up, **rest}


def _transposed(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, **{name: arguments[name].mT.contiguous() for name in ("gate_up_proj", "down_proj")}}


def _ungated(dtype: torch.dtype, arguments: dict[str, Any], activation: str = "relu2") -> dict[str, Any]:
    rest = dict(arguments)
    up = rest.pop("gate_up_proj").chunk(2, dim=1)[0].contiguous()
    return {"hidden_states": rest.pop("hidden_states"), "up_proj": up, **rest, "activation": activation}


# With the limits of DeepSeek-V4 and gpt-oss, for shapes that are compared with eager code in the same dtype: with a
# lower limit, rounding would move many values across it.
_DEEPSEEK_V4 = partial(_bounded, limit=10.0)
_GPT_OSS = partial(_biased, limit=7.0)


def _checks(form: CaseForm | None = None) -> list[InputCase]:
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
        # On a GPU, eager's matmuls over 2048 channels are cuBLAS's, which adds up partial sums.
        _case("long sums", 40, 2, 1, 2048, 16, form=form),
    ]


def _gpt_oss_layers(form: CaseForm) -> list[InputCase]:
    return [
        _case(f"gpt-oss-20b layer, T={tokens}", tokens, 32, 4, 2880, 2880, form=form, role="bench")
        for tokens in (8192, 1024)
    ]


def _qwen3(tokens: int, form: CaseForm | None = None) -> InputCase:
    name = f"Qwen3-30B-A3B layer, T={tokens}"
    return _case(name, tokens, 128, 8, 2048, 768, float32_weights=True, form=form, role="bench")


def _with(name: str, dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "activation": name}


def benchmark_case(shape: Mapping[str, int], tokens: int, form: CaseForm | None = None) -> InputCase:
    sizes = shape["experts"], shape["top_k"], shape["hidden"], shape["intermediate"]
    name = "T={} E={} K={} H={} I={}".format(tokens, *sizes)
    return _case(name, tokens, *sizes, float32_weights=True, form=form, role="bench")


# The forms of the variants that `benchmark_case` takes.
BENCHMARK_FORMS = {
    "standard": None,
    "clamped": _DEEPSEEK_V4,
    "biased": _GPT_OSS,
    "split": _split,
    "transposed": _transposed,
    "ungated": _ungated,
}
CASES = {
    "standard": [
        *_checks(),
        *(_case(name, 23, 4, 2, 40, 24, form=partial(_with, name)) for name in ACTIVATIONS if name != "silu"),
        _qwen3(16384),
        _case("DeepSeek-V3 slice E=32, T=8192", 8192, 32, 8, 7168, 2048, float32_weights=True, role="bench"),
        _qwen3(256),
        _qwen3(2048),
        _case("Mixtral layer, T=8192", 8192, 8, 2, 4096, 14336, float32_weights=True, role="bench"),
    ],
    "clamped": [
        _case("bounded and offset", 61, 4, 2, 40, 24, form=_bounded_with_offset),
        _case("bounded after the activation", 61, 4, 2, 40, 24, form=_bounded_activation),
        *_checks(_bounded),
        *_gpt_oss_layers(_DEEPSEEK_V4),
    ],
    "biased": [*_checks(_biased), *_gpt_oss_layers(_GPT_OSS)],
    "split": [*_checks(_split), _qwen3(16384, _split), _qwen3(256, _split)],
    "transposed": [
        *_checks(_transposed),
        _case("Llama 4 Scout layer, T=4096", 4096, 16, 1, 5120, 8192, form=_transposed, role="bench"),
        _case("Aria layer, T=8192", 8192, 64, 6, 2560, 1664, form=_transposed, role="bench"),
    ],
    "ungated": [
        *_checks(_ungated),
        _case("silu", 23, 4, 2, 40, 24, form=partial(_ungated, activation="silu")),
        _case("Nemotron-3-Nano layer, T=8192", 8192, 128, 6, 2688, 1856, form=_ungated, role="bench"),
    ],
}
