"""Modules that mix tokens and run on global sequences, on each rank, where ranks hold shards of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from opslot.distributed import gather_outputs, get_parallel_state
from opslot.slots.protocol import runs_on_global_sequences


def run_on_global_sequences(model: nn.Module) -> None:
    """Let these modules of `model` get the tokens of all ranks, and return those of this rank."""
    for module in model.modules():
        if runs_on_global_sequences(module):
            module.register_forward_pre_hook(_gather, with_kwargs=True)
            module.register_forward_hook(_own)


def _gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward pre-hook: tensors [B, S, ...] of [B, S / sp, ...]. Masks of padding are those of tokens."""
    if get_parallel_state().sp == 1:
        return None
    states = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 2)
    rows, length = states.shape[:2]

    def gather(x: Any) -> Any:
        is_shard = isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (rows, length)
        return gather_outputs(x, 1) if is_shard else x

    # Transformers makes no mask of a shard without padding, whatever the other ranks have.
    masks = {
        name: states.new_ones(rows, length, dtype=torch.bool) if x is None else x.bool()
        for name, x in kwargs.items()
        if "mask" in name
    }
    return tree_map(gather, (args, {**kwargs, **masks}))


def _own(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: this rank's tokens of [B, S, ...]."""
    state = get_parallel_state()
    return output if state.sp == 1 else output.chunk(state.sp, 1)[state.sp_rank]
