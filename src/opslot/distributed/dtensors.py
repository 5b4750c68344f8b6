"""What a rank holds of a tensor that may be sharded, and the whole tensor; for a plain tensor, the tensor itself."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(x: Tensor) -> Tensor:
    """The local part of a DTensor; shares its memory, and is differentiable."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """A DTensor gathered over its mesh, whose ranks all call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x
