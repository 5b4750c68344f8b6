"""The ranks that hold the shards of the sequences which a module gets."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from opslot.distributed import gather_outputs, get_parallel_state

# What was gathered without gradient, since a model passes the same cosine and sine to every layer.
_gathered: list[tuple[weakref.ref[Tensor], int, ProcessGroup, Tensor]] = []
_REMEMBERED = 4


def ranks_of_shards(module: Any) -> ProcessGroup | None:
    """The ranks whose shards of sequences the attention of `module` joins; None where it has whole sequences."""
    kernel = AttentionInterface().get(module.config._attn_implementation)
    return get_parallel_state().sp_group if getattr(kernel, "joins_shards", False) else None


def gather_tokens(x: Tensor, ranks: ProcessGroup) -> Tensor:
    """[B, S, ...] of all ranks' shards [B, S / ranks, ...]; with gradient."""
    if x.requires_grad:
        return gather_outputs(x, 1, ranks)
    for tensor, version, group, whole in _gathered:
        if tensor() is x and (version, group) == (x._version, ranks):
            return whole
    whole = gather_outputs(x, 1, ranks)
    _gathered.append((weakref.ref(x), x._version, ranks, whole))
    del _gathered[:-_REMEMBERED]
    return whole
