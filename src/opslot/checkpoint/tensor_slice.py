"""Slices of a model's tensors that a checkpoint's tensors fill, and the part of a parameter that a rank keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from opslot._base.errors import CheckpointError

Region = tuple[slice, ...]
"""One slice(start, stop) per dim of a tensor."""

# What is computed while it is read takes memory beside the model, on each of a few threads.
_PIECE_NUMEL = 1 << 20


class Stored(Protocol):
    """A checkpoint's tensor of which regions can be read: a tensor, or one that is dequantized when it is read."""

    def __getitem__(self, region: Region, /) -> Tensor: ...


def full_region(shape: Sequence[int]) -> Region:
    """The region that covers a whole tensor of `shape`."""
    return tuple(slice(0, n) for n in shape)


def extent(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(r.stop - r.start for r in region)


def volume(region: Region) -> int:
    """The number of elements of a region."""
    return math.prod(extent(region))


def intersect(a: Region, b: Region) -> Region | None:
    """The region that two regions of one tensor share; None when it is empty."""
    assert len(a) == len(b), f"regions of different tensors: {a}, {b}"
    both = tuple(slice(max(p.start, q.start), min(p.stop, q.stop)) for p, q in zip(a, b))
    return None if any(r.start >= r.stop for r in both) else both


def pieces(region: Region, numel: int) -> Iterator[Region]:
    """`region` in parts of at most `numel` elements."""
    dim = next((i for i, r in enumerate(region) if r.stop - r.start > 1), None)
    if dim is None or volume(region) <= numel:
        yield region
        return
    whole = region[dim]
    step = max(1, numel * (whole.stop - whole.start) // volume(region))
    for start in range(whole.start, whole.stop, step):
        part = slice(start, min(start + step, whole.stop))
        yield from pieces((*region[:dim], part, *region[dim + 1 :]), numel)


def relative(region: Region, origin: Region) -> Region:
    """`region` in coordinates that begin where `origin` does."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(region, origin))


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A checkpoint tensor is one region of a model's tensor, perhaps with its last two dims swapped.

    Used both to load it and to save it.

    Attributes:
        target: name of the model's tensor.
        region: the part of the target it fills.
        shape: shape of the checkpoint's tensor: the region's extent less leading dims of 1, swapped if
            `transposed`.
        transposed: whether the checkpoint holds the last two dims the other way round.
    """

    target: str
    region: Region
    shape: tuple[int, ...]
    transposed: bool = False

    @classmethod
    def whole(cls, target: str, shape: Sequence[int], *, transposed: bool = False) -> TensorSlice:
        """The checkpoint's tensor is the whole target of `shape`."""
        stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        return cls(target, full_region(shape), stored, transposed)

    def read(self, stored: Stored, part: Region) -> Tensor:
        """The values of `part` of the target, which is inside `region`, from the checkpoint's tensor."""
        within = relative(part, self.region)[len(self.region) - len(self.shape) :]
        if self.transposed:
            within = (*within[:-2], within[-1], within[-2])
        values = stored[within]
        view = values.mT if self.transposed else values
        return view[(None,) * (len(self.region) - view.ndim)]

    def as_stored(self, tensor: Tensor) -> Tensor:
        """The inverse of `read`: a view of the region's values with the dims of the checkpoint's tensor."""
        view = tensor[(0,) * (tensor.ndim - len(self.shape))]
        return view.mT if self.transposed else view


def copy_overlap(destination: Tensor, region: Region, stored: Stored, tensor_slice: TensorSlice) -> Tensor | None:
    """Copy what `stored`, placed by `tensor_slice`, has of `region` of the target into `destination`.

    Returns the part of `destination` that was written; None if there is none.

    Args:
        destination: [extent(region)], any dtype and device; written in place.
        region: the part of the target that `destination` holds.
        stored: the checkpoint's tensor, [tensor_slice.shape].
        tensor_slice: where `stored` is in the target.
    """
    overlap = intersect(region, tensor_slice.region)
    if overlap is None:
        return None
    for part in [overlap] if isinstance(stored, Tensor) else pieces(overlap, _PIECE_NUMEL):
        destination[relative(part, region)].copy_(tensor_slice.read(stored, part))
    return destination[relative(overlap, region)]


def local_ranges(tensor: Tensor) -> Region:
    """The part of a parameter that this rank keeps, in coordinates of the whole parameter.

    A plain tensor is kept whole; a rank outside the DTensor's mesh keeps nothing.

    Raises:
        CheckpointError: the DTensor is partial, or a rank's shard is not contiguous in each dim (an uneven
            strided shard).
    """
    if not isinstance(tensor, DTensor):
        return full_region(tensor.shape)
    placements = tensor.placements
    if any(p.is_partial() for p in placements):
        raise CheckpointError(f"weights cannot be loaded into a partial DTensor ({placements})", hint="reduce it first")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    if len(offset) != tensor.ndim:
        return tuple(slice(0, 0) for _ in tensor.shape)
    if tuple(tensor._local_tensor.shape) != tuple(shape) or not _is_block(tensor):
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)} placed as {placements} over {tensor.device_mesh} "
            "is not one region on this rank",
            hint="shard evenly or on different dims",
        )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape))


def _is_block(tensor: DTensor) -> bool:
    """Whether a rank's part of each dim is one run of indices.

    Plain shards of a dim always give one. A strided shard (FSDP over tensor parallelism of the same dim) does
    when it undoes the shards right of it, that is when its split_factor is their number, and every split is
    even.
    """
    for dim in range(tensor.ndim):
        right_of_it = 1
        strided = False
        for axis in reversed(range(len(tensor.placements))):
            placement = tensor.placements[axis]
            if getattr(placement, "dim", None) != dim:
                continue
            split_factor = getattr(placement, "split_factor", None)
            strided = strided or split_factor is not None
            if split_factor not in (None, right_of_it):
                return False
            right_of_it *= tensor.device_mesh.size(axis)
        if strided and tensor.shape[dim] % right_of_it:
            return False
    return True


def is_numeric_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of `stored` may become `wanted` by a plain cast: same dtype, or both 16 bits or wider
    and floating.

    Integers and 8-bit floats in place of floats are quantized weights, whose scales a cast would drop.
    """
    if stored == wanted:
        return True
    return all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in (stored, wanted))
