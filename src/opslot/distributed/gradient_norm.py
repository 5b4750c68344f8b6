"""The norm of gradients over all ranks, however they are sharded, and clipping to it."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from opslot._base.errors import ConfigError
from opslot.distributed.dtensors import local_tensor

# Elements whose norm is computed at once on the CPU.
_CPU_PART = 2**12


def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients to `max_norm`, and return their 2-norm over all ranks.

    The norm does not depend on the sharding; that of 16-bit gradients is computed in float32.

    Args:
        parameters: tensors or DTensors of any meshes, or one of them; those without a gradient are left out.
        max_norm: infinity only computes the norm.

    Raises:
        ConfigError: `max_norm` is negative or not a number.
    """
    owners = _by_owner(parameters)
    total, scale = _norm_and_scale(owners, max_norm)
    if not math.isinf(max_norm):
        _scale(owners, scale)
    return total


def clip_grad_norm_on_host(
    parameters: Iterable[Tensor], max_norm: float, wait: contextlib.AbstractContextManager[None] | None = None
) -> float:
    """`clip_grad_norm` that waits for the norm, inside `wait`; gradients within `max_norm` are not written again."""
    owners = _by_owner(parameters)
    total, scale = _norm_and_scale(owners, max_norm)
    both = torch.stack([total, scale])
    with wait or contextlib.nullcontext():
        found, factor = both.tolist()
    # Also of a factor that is not a number.
    if not factor >= 1:
        _scale(owners, scale)
    return found


def _by_owner(parameters: Tensor | Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients, together those of one dtype and one placement."""
    owners: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        grad = parameter.grad
        if grad is not None:
            placement = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            owners[placement, grad.dtype].append(grad)
    return list(owners.values())


def _norm_and_scale(owners: list[list[Tensor]], max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm over all ranks, and the factor at most 1 that clips it."""
    if not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm} must be at least 0", hint="infinity computes the norm without clipping")
    if not owners:
        return torch.tensor(0.0), torch.tensor(1.0)
    total = torch.linalg.vector_norm(torch.stack([_norm(grads) for grads in owners]))
    return total, torch.ones_like(total) if math.isinf(max_norm) else (max_norm / (total + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def _scale(owners: list[list[Tensor]], factor: Tensor) -> None:
    """Of local shards: torch's sharding propagation for a list of DTensors takes longer than the multiplication."""
    for grads in owners:
        local = [local_tensor(grad) for grad in grads]
        torch._foreach_mul_(local, factor.to(local[0].device))


@torch.no_grad()
def _norm(grads: list[Tensor]) -> Tensor:
    """Of gradients of one dtype and one placement, over all ranks; DTensor does not propagate a norm's dtype."""
    # In 16 bits, the norm would have 3 digits, and float16 would overflow at 65504.
    upcast = {"dtype": torch.float32} if grads[0].itemsize == 2 else {}
    local = [part for grad in grads for part in _parts(local_tensor(grad))]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(local, 2, **upcast)))
    first = grads[0]
    if isinstance(first, DTensor):
        square = norm.square()
        for dim, placement in enumerate(first.placements):
            assert not placement.is_partial(), "FSDP2 has reduced the gradients"
            if not placement.is_replicate():
                dist.all_reduce(square, group=first.device_mesh.get_group(dim))
        norm = square.sqrt()
    return norm


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """`x`, on the CPU in parts: torch adds up the squares there one after the other, which for five million elements in
    float32 is off by 1e-4.
    """
    return x.reshape(-1).split(_CPU_PART) if x.device.type == "cpu" and x.numel() > _CPU_PART else (x,)
