"""Which keys queries see, as an indexer gets it instead of a mask. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Visible(NamedTuple):
    """The keys among which an indexer selects; a query sees those that both attributes show.

    Attributes:
        intervals: int32 [2, B or 1, S], the first key that each query sees and the one after the last; or None.
        shown: bool [B or 1, S or 1, T], a mask; or None.
        ranks: those that hold the shards of each sequence, in their order, if a rank has shards of the keys too.
        starts: int32 [B or 1, T], the first key of each key's document, where queries are a shard of them; or None.
        documents: how many documents a row may have.
        mask: what the model passes to its attention.
    """

    intervals: Tensor | None
    shown: Tensor | None
    ranks: ProcessGroup | None = None
    starts: Tensor | None = None
    documents: int = 1
    mask: Tensor | None = None
