"""What every kernel of the op does before its own work: check the call, follow autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from opslot._base.errors import KernelError, explain_problem


def prepare(
    kernel: str,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    dtypes: frozenset[torch.dtype] | None = None,
    contiguous: bool = False,
    multiple: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`hidden_states`, `gate_up_proj` and `down_proj` as the kernel gets them: in autocast's dtype where that is on.

    Raises:
        KernelError: shapes, dtypes or devices that are not the contract's, a dtype not in `dtypes`, a width that is
            not a multiple of `multiple`, or, if `contiguous`, weights with strides of their own.
    """
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        wanted = torch.get_autocast_dtype(device)
        hidden_states, gate_up_proj, down_proj = (t.to(wanted) for t in (hidden_states, gate_up_proj, down_proj))
    problem = _shape_problem(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    devices = {str(t.device) for t in (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)}
    if not problem and len(devices) > 1:
        problem = f"tensors on {' and '.join(sorted(devices))}", "move all five to one device"
    problem = problem or _dtype_problem(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, dtypes)
    if not problem and contiguous and not (gate_up_proj.is_contiguous() and down_proj.is_contiguous()):
        problem = (
            f"gate_up_proj with strides {gate_up_proj.stride()} and down_proj with {down_proj.stride()}",
            "store them contiguous as [E, 2I, H] and [E, H, I], or use moe_implementation=grouped_mm",
        )
    if not problem and any(width % multiple for width in down_proj.shape[1:]):
        problem = (
            f"hidden and intermediate widths {tuple(down_proj.shape[1:])}, not multiples of {multiple}",
            "use moe_implementation=fused_triton or grouped_mm",
        )
    if problem:
        found, todo = problem
        raise KernelError(explain_problem(f"moe_implementation={kernel!r} cannot run this call", found, todo))
    return hidden_states, gate_up_proj, down_proj


def _shape_problem(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> tuple[str, str] | None:
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3 or index.dim() != 2:
        dims = [t.dim() for t in (x, gate_up, down, index)]
        return (
            f"hidden_states, gate_up_proj, down_proj and top_k_index of {dims} dimensions",
            "pass [T, H], [E, 2I, H], [E, H, I] and [T, K]",
        )
    experts, hidden, intermediate = down.shape
    if gate_up.shape != (experts, 2 * intermediate, hidden):
        return (
            f"gate_up_proj {list(gate_up.shape)} with down_proj {list(down.shape)}",
            "pass gate_up_proj as [E, 2I, H] and down_proj as [E, H, I]",
        )
    if x.shape[1] != hidden or index.shape[0] != x.shape[0]:
        return (
            f"hidden_states {list(x.shape)} with top_k_index {list(index.shape)} and hidden width {hidden}",
            "pass hidden_states as [T, H] and top_k_index as [T, K]",
        )
    if weights.shape != index.shape:
        return (
            f"top_k_weights {list(weights.shape)} with top_k_index {list(index.shape)}",
            "pass one weight for each index",
        )
    return None


def _dtype_problem(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, dtypes: frozenset[torch.dtype] | None
) -> tuple[str, str] | None:
    if not x.dtype == gate_up.dtype == down.dtype:
        return (
            f"hidden_states in {x.dtype}, gate_up_proj in {gate_up.dtype}, down_proj in {down.dtype}",
            "use one dtype for all three, or torch.autocast",
        )
    if dtypes is not None and x.dtype not in dtypes:
        accepted = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return f"hidden_states in {x.dtype}; this kernel takes {accepted}", "use moe_implementation=grouped_mm or eager"
    if not weights.dtype.is_floating_point or index.dtype.is_floating_point:
        return (
            f"top_k_weights in {weights.dtype} and top_k_index in {index.dtype}",
            "pass floating weights and integer indices",
        )
    return None
