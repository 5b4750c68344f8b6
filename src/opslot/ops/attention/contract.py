"""The arguments of attention, in all of its variants and kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from opslot.ops._common.contract import takes


class AttentionCall(NamedTuple):
    """One call; `kwargs` are the keywords that have no name in the contract, such as `sliding_window`."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Any
    attention_mask: Any
    dropout: float
    scaling: float | None
    kwargs: dict[str, Any]


def _call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> AttentionCall:
    return AttentionCall(module, query, key, value, attention_mask, dropout, scaling, kwargs)


takes_call = takes(_call)
