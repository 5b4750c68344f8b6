"""Argument handling that all kernels of the op share: checks, autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.ops._common.activations import activation_name, activation_problem
from opslot.ops._common.arguments import autocast_dtype
from opslot.ops.moe_experts.contract import Experts, ExpertsInputs

Problem = tuple[str, str] | None


def prepare(
    kernel: str,
    given: ExpertsInputs,
    dtypes: frozenset[torch.dtype] | None = None,
    contiguous: bool = False,
    multiple: int = 1,
) -> tuple[Tensor, Experts]:
    """Check a call; returns its `hidden_states` and `experts`, cast to autocast's dtype if autocast is enabled.

    The activation of `experts` becomes its name in `ACTIVATIONS`.

    Raises:
        KernelError: an activation that the kernels do not compute, unsupported shapes, dtypes or devices, a dtype not
            in `dtypes`, a hidden or intermediate size that is not a multiple of `multiple`, or, if `contiguous`,
            weights that are not contiguous.
    """
    hidden_states, experts, top_k_index, top_k_weights = given
    experts = _with_activation_name(experts)
    wanted = autocast_dtype(hidden_states)
    if wanted is not None:
        hidden_states = hidden_states.to(wanted)
        cast: dict[str, Any] = {name: t.to(wanted) for name, t in experts._asdict().items() if isinstance(t, Tensor)}
        experts = experts._replace(**cast)
    weights = _named(experts)
    tensors = {**weights, "hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    problem = (
        _shape_problem(experts, tensors)
        or _device_problem(tensors)
        or _dtype_problem({"hidden_states": hidden_states, **weights}, top_k_index, top_k_weights, dtypes)
        or (_stride_problem(weights) if contiguous else None)
    )
    widths = experts.sizes[1:] if not problem else ()
    if any(width % multiple for width in widths):
        problem = (
            f"hidden and intermediate widths {widths}, not multiples of {multiple}",
            "use moe_implementation=fused_triton or grouped_mm",
        )
    if problem:
        found, hint = problem
        raise KernelError(f"moe_implementation={kernel!r} cannot run this call", found=found, hint=hint)
    return hidden_states, experts


def _with_activation_name(experts: Experts) -> Experts:
    name = activation_name(experts.activation)
    if name is None:
        raise KernelError(
            "moe_experts: unsupported activation",
            found=activation_problem(experts.activation) or "",
            hint="set moe_implementation to eager",
        )
    return experts if name is experts.activation else experts._replace(activation=name)


def _named(experts: Experts) -> dict[str, Tensor]:
    """The parameters by name."""
    first = "up_proj" if not experts.gated else "gate_up_proj" if experts.up_proj is None else "gate_proj"
    named = {
        first: experts.gate_up_proj,
        **({} if experts.up_proj is None else {"up_proj": experts.up_proj}),
        "down_proj": experts.down_proj,
        "gate_up_proj_bias": experts.gate_up_bias,
        "down_proj_bias": experts.down_bias,
    }
    return {name: t for name, t in named.items() if t is not None}


def _shape_problem(experts: Experts, tensors: dict[str, Tensor]) -> Problem:
    rows = "I" if experts.halves == 1 else "2I"
    layouts = {
        **dict.fromkeys(
            ("gate_up_proj", "gate_proj", "up_proj"), ("E", "H", rows) if experts.transposed else ("E", rows, "H")
        ),
        "down_proj": ("E", "I", "H") if experts.down_transposed else ("E", "H", "I"),
        "gate_up_proj_bias": ("E", rows),
        "down_proj_bias": ("E", "H"),
        "hidden_states": ("T", "H"),
        "top_k_index": ("T", "K"),
        "top_k_weights": ("T", "K"),
    }
    sizes = {d: size for name in ("down_proj", "top_k_index") for d, size in zip(layouts[name], tensors[name].shape)}
    sizes["2I"] = 2 * sizes.get("I", 0)
    wrong = [name for name, t in tensors.items() if t.shape != tuple([sizes.get(d) for d in layouts[name]])]
    if wrong:
        shown = dict.fromkeys((*wrong, "down_proj", "top_k_index"))
        return (
            ", ".join(f"{name} {list(tensors[name].shape)}" for name in shown),
            "pass " + ", ".join(f"{name} as [{', '.join(layouts[name])}]" for name in shown),
        )
    if not sizes["E"] or not sizes["K"]:
        return f"{sizes['E']} experts and {sizes['K']} choices a token", "pass at least one of both"
    return None


def _device_problem(tensors: dict[str, Tensor]) -> Problem:
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) == 1:
        return None
    return f"tensors on {' and '.join(sorted(devices))}", "move them all to one device"


def _dtype_problem(
    named: dict[str, Tensor], index: Tensor, weights: Tensor, dtypes: frozenset[torch.dtype] | None
) -> Problem:
    x = named["hidden_states"]
    if len({t.dtype for t in named.values()}) > 1:
        return (
            ", ".join(f"{name} in {t.dtype}" for name, t in named.items()),
            "use one dtype for all of them, or torch.autocast",
        )
    if dtypes is not None and x.dtype not in dtypes:
        accepted = ", ".join(sorted(map(dtype_name, dtypes)))
        return f"hidden_states in {x.dtype}; this kernel takes {accepted}", "use moe_implementation=grouped_mm or eager"
    if not weights.dtype.is_floating_point or index.dtype.is_floating_point:
        return (
            f"top_k_weights in {weights.dtype} and top_k_index in {index.dtype}",
            "pass floating weights and integer indices",
        )
    return None


def _stride_problem(weights: dict[str, Tensor]) -> Problem:
    strided = {name: t for name, t in weights.items() if not t.is_contiguous()}
    if not strided:
        return None
    return (
        " and ".join(f"{name} with strides {t.stride()}" for name, t in strided.items()),
        "store them contiguous, or use moe_implementation=grouped_mm",
    )
