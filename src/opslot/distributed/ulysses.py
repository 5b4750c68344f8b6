"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): outside attention a rank holds the local part of
every sequence and all heads, inside it holds the global sequence and some of the heads.

The ranks are those of `group`, where a function takes one, by default the sp group of `get_parallel_state()`. With only
one rank, functions return their input. Gradients follow `_collectives`' rule: the loss is the sum of the ranks' losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from opslot._base.errors import ConfigError, ParallelError
from opslot.distributed._collectives import AsyncAllToAll, all_gather, all_to_all
from opslot.distributed.parallel_state import get_parallel_state


def gather_seq_scatter_heads(x: Tensor, seq_dim: int, head_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """[..., S / sp, ..., heads, ...] to [..., S, ..., heads / sp, ...].

    `head_dim` may also be a flattened heads * width dim. Without extra copies if `seq_dim` is the first
    dim of more than one element.
    """
    return _transpose(x, gathered=seq_dim, scattered=head_dim, group=group)


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """[..., S, ..., heads / sp, ...] to [..., S / sp, ..., heads, ...]: the inverse of `gather_seq_scatter_heads`."""
    return _transpose(x, gathered=head_dim, scattered=seq_dim, group=group)


def _transpose(x: Tensor, gathered: int, scattered: int, group: ProcessGroup | None) -> Tensor:
    gathered, scattered = _dim(x, gathered), _dim(x, scattered)
    if gathered == scattered:
        raise ConfigError(
            f"dim {gathered} of a tensor of shape {tuple(x.shape)} cannot be both the sequence and the heads",
            hint="give two dims as seq_dim and head_dim",
        )
    group = group or get_parallel_state().sp_group
    if group is None:
        return x
    return merge_ranks(all_to_all(split_ranks(x, scattered, group), group), gathered)


def _dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the first one."""
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(
            f"a tensor of shape {tuple(x.shape)} has no dim {dim}",
            hint=f"give one of {-x.dim()} to {x.dim() - 1}",
        )
    return dim % x.dim()


def split_ranks(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """[ranks, ...] with `dim` split over them."""
    ranks, dim = group.size(), _dim(x, dim)
    if x.shape[dim] % ranks:
        raise ConfigError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be split over {ranks} sequence-parallel ranks",
            hint="pad it (sp_pad_and_slice), or choose an sp size that divides it",
        )
    return x.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def merge_ranks(x: Tensor, dim: int) -> Tensor:
    """[ranks, ...] with the parts joined along `dim` of the rest, counted from the first."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


def gather_outputs(x: Tensor, dim: int, group: ProcessGroup | None = None, unpadded_size: int | None = None) -> Tensor:
    """All ranks' parts, equal in shape, joined along `dim`; with gradient.

    Args:
        unpadded_size: size of `dim` before `sp_pad_and_slice`; the padding is removed.
    """
    dim = _dim(x, dim)
    group = group or get_parallel_state().sp_group
    if group is not None:
        x = merge_ranks(all_gather(x, group), dim)
    return x if unpadded_size is None else unpad_tensor(x, dim, unpadded_size)


def slice_input_tensor(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's shard of a tensor that all ranks hold; ConfigError when `dim` does not divide."""
    group = group or get_parallel_state().sp_group
    return x if group is None else split_ranks(x, dim, group)[dist.get_rank(group)]


def sp_pad_and_slice(
    x: Tensor, dim: int, pad_value: float = 0, pad_scale: int = 1, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's shard of `x` after padding `dim` at its end to a multiple of `pad_scale` * ranks.

    Args:
        pad_scale: tokens that must stay together, e.g. 4 patches that a vision model merges.
    """
    if pad_scale < 1:
        raise ConfigError(f"pad_scale={pad_scale} must be at least 1", hint="leave it out for single tokens")
    group = group or get_parallel_state().sp_group
    if group is None:
        return x
    dim = _dim(x, dim)
    missing = -x.shape[dim] % (pad_scale * group.size())
    if missing:
        x = F.pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, missing), value=pad_value)
    return slice_input_tensor(x, dim, group)


def unpad_tensor(x: Tensor, dim: int, size: int) -> Tensor:
    """The first `size` elements of `dim`; removes the padding of `sp_pad_and_slice`."""
    if not 0 <= size <= x.shape[_dim(x, dim)]:
        raise ConfigError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has no first {size} elements",
            hint="pass the size before padding",
        )
    return x.narrow(dim, 0, size)


def kv_repeats(heads: int, kv_heads: int, sp: int, names: tuple[str, str] = ("query", "key/value")) -> int:
    """How often to repeat each key/value head, so that each of `sp` ranks gets those of its query heads.

    Raises:
        ConfigError: the query heads cannot be split over `sp` ranks.
    """
    if heads % math.lcm(kv_heads, sp):
        fitting = [n for n in range(1, heads + 1) if heads % math.lcm(kv_heads, n) == 0]
        raise ConfigError(
            f"sp={sp} does not divide {heads} {names[0]} heads (with {kv_heads} {names[1]} heads)",
            hint=f"use one of {', '.join(map(str, fitting))}",
        )
    return math.lcm(kv_heads, sp) // kv_heads


class OverlappedAllToAll:
    """All-to-alls of query, key and value of one attention module, from local sequences to local heads.

    Each starts when its tensor is projected and is awaited where it is needed; it overlaps with what is computed in
    between, forward and backward.
    """

    _ATTRIBUTE = "_ulysses_all_to_all"

    def __init__(self) -> None:
        self._running: dict[str, AsyncAllToAll] = {}

    @classmethod
    def of(cls, module: nn.Module | None) -> OverlappedAllToAll | None:
        return getattr(module, cls._ATTRIBUTE, None)

    def attach(self, module: nn.Module) -> None:
        """Let `ulysses_attention` find the transfers of `module`."""
        module.__dict__[self._ATTRIBUTE] = self

    @torch.compiler.disable
    def start(self, name: str, x: Tensor, repeats: int = 1) -> Tensor:
        """Start the all-to-all of `x` [B, S / sp, heads, D], each head repeated `repeats` times.

        Returns:
            [B, S / sp, heads * repeats, D], a placeholder until `wait`; its values are undefined.
        """
        group = get_parallel_state().sp_group
        if group is None:
            return x
        x = x.repeat_interleave(repeats, 2) if repeats > 1 else x
        handle = self._running[name] = AsyncAllToAll(split_ranks(x, 2, group), group)
        return handle.pending.view(x.shape)

    @torch.compiler.disable
    def wait(self, name: str, x: Tensor) -> Tensor:
        """Wait for the all-to-all started as `name`; returns [B, heads / sp, S, D].

        Args:
            x: the placeholder that `start` returned, as [B, heads, S / sp, D].

        Raises:
            ParallelError: the placeholder was read or changed.
        """
        handle = self._running.pop(name, None)
        if handle is None:
            return x
        if x.untyped_storage().data_ptr() != handle.pending.untyped_storage().data_ptr():
            raise ParallelError(
                f"the {name} was changed between its projection and its use, during its all-to-all",
                hint="set ulysses_overlap to False",
            )
        return merge_ranks(handle.wait(), 1).transpose(1, 2)


def ulysses_attention(attention: Callable[..., Any], pipeline: int = 1) -> Callable[..., Any]:
    """`attention` for ranks that hold local sequences.

    Args:
        attention: `(module, query, key, value, attention_mask, dropout, scaling, **kwargs) -> (output, weights)` with
            query [B, heads, S, D], key and value [B, kv_heads, S, D], output [B, S, heads, D].
        pipeline: chunks of a rank's heads, if they divide; the all-to-alls of one chunk overlap with the computation of
            another, forward and backward.

    Returns:
        The same function of query [B, heads, S / sp, D], key and value [B, kv_heads, S / sp, D], whose output is
        [B, S / sp, heads, D] and whose weights are None. Sinks `s_aux` [heads] are of all heads; `attention_mask`,
        `cu_seq_lens_*` and `max_length_*` those of the global sequence, and `selected_bits` [B, S / sp, ...] or
        [B, kv_heads, S / sp, ...] those of the rank's queries. Its attribute `joins_shards` is True. With an
        `OverlappedAllToAll`, query and key are global already.
    """

    # Kernels are single ops, and torch 2.11 cannot trace the mesh of the ranks.
    @torch.compiler.disable
    @functools.wraps(attention)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        ranks = get_parallel_state().sp_group
        if ranks is None:
            return attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        overlapped = OverlappedAllToAll.of(module)
        if overlapped is not None:
            value = overlapped.wait("value", value)
            kwargs |= _of_heads(kwargs, ranks, 1)[0]
            output, _ = attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
            return gather_heads_scatter_seq(output, 2, 1, ranks), None
        repeats = kv_repeats(query.shape[1], key.shape[1], ranks.size())
        count = math.gcd(pipeline, key.shape[1] * repeats // ranks.size())
        # [sp, B, S / sp, heads / sp, D]
        chunks = [
            split_ranks(x.repeat_interleave(n, 1) if n > 1 else x, 1, ranks).transpose(2, 3).chunk(count, 3)
            for x, n in ((query, 1), (key, repeats), (value, repeats))
        ]
        inputs = [[AsyncAllToAll(x, ranks) for x in chunk] for chunk in zip(*chunks, strict=True)]
        outputs = []
        for chunk, of_heads in zip(inputs, _of_heads(kwargs, ranks, count, repeats), strict=True):
            q, k, v = (merge_ranks(handle.wait(), 1).transpose(1, 2) for handle in chunk)
            options = {**kwargs, **of_heads}
            output, _ = attention(module, q, k, v, attention_mask, dropout=dropout, scaling=scaling, **options)
            outputs.append(AsyncAllToAll(split_ranks(output, 1, ranks), ranks))
        gathered = [handle.wait() for handle in outputs]
        return merge_ranks(torch.cat(gathered, 3) if count > 1 else gathered[0], 2), None

    attend.joins_shards = True
    return attend


def _of_heads(kwargs: dict[str, Any], group: ProcessGroup, chunks: int, repeats: int = 1) -> list[dict[str, Tensor]]:
    """Attention sinks and bits of selected keys of this rank's heads, for each of `chunks` chunks of them.

    Args:
        repeats: of each key/value head.
    """
    rank, found = dist.get_rank(group), {}
    sinks, bits = kwargs.get("s_aux"), kwargs.get("selected_bits")
    if sinks is not None:
        found["s_aux"] = split_ranks(sinks, 0, group)[rank].chunk(chunks)
    if bits is not None:
        bits = gather_outputs(bits, -2, group)
        if bits.dim() == 4:
            own = split_ranks(bits.repeat_interleave(repeats, 1), 1, group)[rank]
            found["selected_bits"] = own.chunk(chunks, 1)
        else:
            found["selected_bits"] = (bits,) * chunks
    return [{name: parts[chunk] for name, parts in found.items()} for chunk in range(chunks)]
