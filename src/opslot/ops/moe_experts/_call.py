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
    problem = (
        _shape_problem(hidden_states, experts, top_k_index, top_k_weights)
        or _device_problem(hidden_states, *_named(experts).values(), top_k_index, top_k_weights)
        or _dtype_problem(hidden_states, experts, top_k_index, top_k_weights, dtypes)
        or (_stride_problem(experts) if contiguous else None)
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


def _shape_problem(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Problem:
    down = experts.down_proj
    up_weights = {name: t for name, t in _named(experts).items() if name in ("gate_up_proj", "gate_proj", "up_proj")}
    up_layout = "[E, H, 2I]" if experts.transposed else "[E, 2I, H]"
    down_layout = "[E, I, H]" if experts.down_transposed else "[E, H, I]"
    if experts.halves == 1:
        up_layout = "[E, I, H]"
    if x.dim() != 2 or any(t.dim() != 3 for t in (*up_weights.values(), down)) or index.dim() != 2:
        dims = [t.dim() for t in (x, *up_weights.values(), down, index)]
        return (
            f"hidden_states, {', '.join(up_weights)}, down_proj and top_k_index of {dims} dimensions",
            f"pass [T, H], {', '.join([up_layout] * len(up_weights))}, {down_layout} and [T, K]",
        )
    count, hidden, intermediate = experts.sizes
    rows = experts.halves * intermediate
    wanted = (count, hidden, rows) if experts.transposed else (count, rows, hidden)
    if any(t.shape != wanted for t in up_weights.values()):
        found = " and ".join(f"{name} {list(t.shape)}" for name, t in up_weights.items())
        return (
            f"{found} with down_proj {list(down.shape)}",
            f"pass {' and '.join(up_weights)} as {up_layout} and down_proj as {down_layout}",
        )
    biases = [t for t in (experts.gate_up_bias, experts.down_bias) if t is not None]
    if biases and [list(b.shape) for b in biases] != [[count, 2 * intermediate], [count, hidden]]:
        return (
            f"biases {' and '.join(str(list(b.shape)) for b in biases)} with down_proj {list(down.shape)}",
            "pass gate_up_proj_bias as [E, 2I] and down_proj_bias as [E, H]",
        )
    if x.shape[1] != hidden or index.shape[0] != x.shape[0]:
        return (
            f"hidden_states {list(x.shape)} with top_k_index {list(index.shape)} and hidden width {hidden}",
            "pass hidden_states as [T, H] and top_k_index as [T, K]",
        )
    if not count or not index.shape[1]:
        return f"{count} experts and {index.shape[1]} choices a token", "pass at least one of both"
    if weights.shape != index.shape:
        return (
            f"top_k_weights {list(weights.shape)} with top_k_index {list(index.shape)}",
            "pass one weight for each index",
        )
    return None


def _device_problem(*tensors: Tensor) -> Problem:
    devices = {str(t.device) for t in tensors}
    if len(devices) == 1:
        return None
    return f"tensors on {' and '.join(sorted(devices))}", "move them all to one device"


def _dtype_problem(
    x: Tensor, experts: Experts, index: Tensor, weights: Tensor, dtypes: frozenset[torch.dtype] | None
) -> Problem:
    named = {"hidden_states": x, **_named(experts)}
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


def _stride_problem(experts: Experts) -> Problem:
    strided = {name: t for name, t in _named(experts).items() if not t.is_contiguous()}
    if not strided:
        return None
    return (
        " and ".join(f"{name} with strides {t.stride()}" for name, t in strided.items()),
        "store them contiguous, or use moe_implementation=grouped_mm",
    )
