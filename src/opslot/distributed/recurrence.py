"""Sequence parallelism of recurrences: causal convolution over a rank's tokens, delta rule and scan over its heads.

Gradients follow `_collectives`' rule: the loss is the sum of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from opslot.distributed._collectives import all_to_all
from opslot.distributed.parallel_state import get_parallel_state
from opslot.distributed.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    kv_repeats,
    merge_ranks,
    slice_input_tensor,
    split_ranks,
)

HEADS = ("value", "key")
SCAN_HEADS = ("scan", "B and C")


@dataclass(eq=False)
class ShardedConvolution:
    """A causal convolution for ranks that hold local sequences: each gets the tokens that its first windows reach.

    Attributes:
        convolve: `(hidden_states, weight, bias, activation, cu_seqlens) -> output` with hidden_states and output
            [B, D, S], weight [D, W].
    """

    convolve: Callable[..., Tensor]

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """hidden_states and output [B, D, S / sp]; `cu_seqlens` are those of the global sequences."""
        group = get_parallel_state().sp_group
        reach = weight.shape[-1] - 1
        if group is None:
            return self.convolve(hidden_states, weight, bias, activation, cu_seqlens)
        rows, length, rank = hidden_states.transpose(1, 2), hidden_states.shape[2], dist.get_rank(group)
        tail = min(reach, length)
        earlier = gather_outputs(rows[:, length - tail :], 1, group)[:, : rank * tail]
        earlier = earlier[:, max(0, earlier.shape[1] - reach) :]
        # [B, reach + S / sp, D], with zeros before the first token.
        rows = torch.cat([F.pad(earlier, (0, 0, reach - earlier.shape[1], 0)), rows], 1)
        if cu_seqlens is not None:
            cu_seqlens = _local_documents(cu_seqlens, length, reach, rank, group.size())
        return self.convolve(rows.transpose(1, 2), weight, bias, activation, cu_seqlens)[..., reach:]


def _local_documents(cu_seqlens: Tensor, length: int, reach: int, rank: int, ranks: int) -> Tensor:
    """Boundaries in a rank's rows of `reach` earlier and `length` local tokens; documents of other ranks are empty."""
    row, offset = cu_seqlens // (length * ranks), cu_seqlens % (length * ranks)
    inside = (offset - rank * length + reach).clamp(0, reach + length)
    # The zeros before the first token of a row belong to its first document.
    return row * (reach + length) + inside.where(offset > 0, 0)


@dataclass(eq=False)
class UlyssesDeltaRule:
    """A gated delta rule for ranks that hold local sequences: each computes some heads of the global sequences.

    Attributes:
        rule: `(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens) ->
            (output, state)` as `opslot.ops.chunk_gated_delta_rule` has it.
    """

    rule: Callable[..., Any]

    @torch.compiler.disable
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tensors [B, S / sp, heads, ...], states of all heads; `cu_seqlens` are those of the global sequences."""
        group = get_parallel_state().sp_group
        options = (output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        if group is None:
            return self.rule(query, key, value, g, beta, initial_state, *options)
        value, query, key = _to_heads(value, (query, key), group, HEADS)
        gates = (gather_seq_scatter_heads(x, 1, 2, group) for x in (g, beta))
        if initial_state is not None:
            initial_state = slice_input_tensor(initial_state, 1, group)
        output, state = self.rule(query, key, value, *gates, initial_state, *options)
        output = gather_heads_scatter_seq(output, 2, 1, group)
        return output, None if state is None else gather_outputs(state, 1, group)


@dataclass(eq=False)
class UlyssesScan:
    """A scan of Mamba-2 for ranks that hold local sequences: each computes some heads of the global sequences.

    Attributes:
        scan: `(x, dt, A, B, C, D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states, cu_seqlens) ->
            output or (output, states)` as `opslot.ops.mamba_chunk_scan` has it.
    """

    scan: Callable[..., Any]

    @torch.compiler.disable
    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """x, dt, B and C [B, S / sp, ...], the others of all heads; `cu_seqlens` are those of the global sequences."""
        group = get_parallel_state().sp_group
        options = (dt_softplus, dt_limit, return_final_states, cu_seqlens)
        if group is None:
            return self.scan(x, dt, A, B, C, D, dt_bias, initial_states, *options)
        x, B, C = _to_heads(x, (B, C), group, SCAN_HEADS)
        dt = gather_seq_scatter_heads(dt, 1, 2, group)
        per_head = [None if p is None else slice_input_tensor(p, 0, group) for p in (A, D, dt_bias)]
        if initial_states is not None:
            initial_states = slice_input_tensor(initial_states, 1, group)
        result = self.scan(x, dt, per_head[0], B, C, *per_head[1:], initial_states, *options)
        if not return_final_states:
            return gather_heads_scatter_seq(result, 2, 1, group)
        output, states = result
        return gather_heads_scatter_seq(output, 2, 1, group), gather_outputs(states, 1, group)


def _to_heads(x: Tensor, shared: tuple[Tensor, ...], group: ProcessGroup, names: tuple[str, str]) -> list[Tensor]:
    """[B, S / sp, heads, width] each to [B, S, heads / sp, width], in one all-to-all.

    Args:
        shared: tensors with fewer heads, each for several of `x`; repeated so that each rank gets those of its heads.
        names: of the heads of `x` and `shared`, for errors.
    """
    repeats = kv_repeats(x.shape[2], shared[0].shape[2], group.size(), names)
    tensors = [x, *(y.repeat_interleave(repeats, 2) if repeats > 1 else y for y in shared)]
    parts = [split_ranks(y, 2, group).flatten(3) for y in tensors]
    received = merge_ranks(all_to_all(torch.cat(parts, 3), group), 1).split([part.shape[3] for part in parts], 2)
    return [y.unflatten(2, (-1, like.shape[3])) for y, like in zip(received, tensors, strict=True)]
