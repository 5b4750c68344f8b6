"""The ranks that hold the shards of the sequences which a module gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from opslot._base.tensor_cache import TensorCache
from opslot.distributed import gather_outputs, get_parallel_state

# Cosine and sine.
_gathered: TensorCache[Tensor] = TensorCache(4)


def ranks_of_shards(module: Any) -> ProcessGroup | None:
    """The ranks whose shards of sequences the attention of `module` joins; None where it has global sequences."""
    kernel = AttentionInterface().get(module.config._attn_implementation)
    return get_parallel_state().sp_group if getattr(kernel, "joins_shards", False) else None


def gather_tokens(x: Tensor, ranks: ProcessGroup) -> Tensor:
    """[B, S, ...] of all ranks' shards [B, S / ranks, ...]; with gradient."""
    if x.requires_grad:
        return gather_outputs(x, 1, ranks)
    return _gathered.get(x, lambda: gather_outputs(x, 1, ranks), ranks)
