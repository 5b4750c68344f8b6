"""Rotary embeddings whose frequencies depend on the length of a sequence (longrope, dynamic), for packed documents.

Transformers computes the frequencies of a whole batch from its largest position, so that those of a short document
would depend on the longest one that is packed with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def per_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a rotary embedding with the frequencies of each packed document's length.

    Documents are positions [B, S] that rise by one. Rows of one document each, which may be padded, get the frequencies
    of the longest one, as in Transformers: the next tokens of `generate` do too. Rotary embeddings of other types run
    as they are.
    """

    @functools.wraps(forward)
    def rotary(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rope_type = _of_layers(getattr(self, "rope_type", ""), *args, **kwargs)
        is_longrope = rope_type == "longrope"
        if not (is_longrope or "dynamic" in rope_type) or position_ids.dim() != 2 or position_ids.shape[1] == 1:
            return forward(self, x, position_ids, *args, **kwargs)

        parameters = _of_layers(self.config.rope_parameters, *args, **kwargs)
        limit = parameters["original_max_position_embeddings"] if is_longrope else self.original_max_seq_len
        last, packed = last_positions(position_ids), _are_packed(position_ids)
        last = torch.where(packed, last, last.max())
        is_short = last < limit

        def of(tokens: Tensor) -> Any:
            return forward(self, x, position_ids.masked_fill(~tokens, 0), *args, **kwargs)

        if not is_longrope and bool((is_short & (packed | (last < limit - 1))).any()):
            _forget_longer_sequences(self, *args, **kwargs)
        if is_longrope:
            # All long documents have the same frequencies. The last call leaves the module as Transformers does.
            return _select(is_short, of(is_short), forward(self, x, position_ids, *args, **kwargs))
        if bool((last == last[:, -1:]).all()):
            return forward(self, x, position_ids, *args, **kwargs)
        found = of(is_short)
        for each in last[~is_short].unique().tolist():
            found = _select(last == each, of(last == each), found)
        return found

    return rotary


def _forget_longer_sequences(rotary: Any, layer_type: str | None = None) -> None:
    """Give a rotary embedding of type dynamic its frequencies of short sequences.

    Transformers does so from 5.13 on, but not before, and not for sequences of just the original length, which get
    those of the last longer one unless they are packed.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    current, original = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
    setattr(rotary, f"{prefix}inv_freq", original.to(current.device))
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _are_packed(position_ids: Tensor) -> Tensor:
    """Whether a row of positions [B, S] has more documents than one; padding has no two positions that rise by one."""
    rises = torch.nn.functional.pad(position_ids.diff(dim=1) == 1, (1, 0))
    return ((rises[:, 1:] & ~rises[:, :-1]).sum(1) > 1).any()


def last_positions(position_ids: Tensor) -> Tensor:
    """The last position of each token's document [B, S]."""
    document = torch.nn.functional.pad((position_ids.diff(dim=1) != 1).long(), (1, 0)).cumsum(1)
    last = torch.zeros_like(position_ids).scatter_reduce(1, document, position_ids, "amax")
    return last.gather(1, document)


def _select(tokens: Tensor, chosen: Any, others: Any) -> Any:
    """Cosine and sine, or one tensor of both, [B, S, D] of `chosen` for some tokens."""
    if isinstance(chosen, Tensor):
        return torch.where(tokens[..., None], chosen, others)
    return tuple(torch.where(tokens[..., None], a, b) for a, b in zip(chosen, others, strict=True))


def _of_layers(value: Any, layer_type: str | None = None) -> Any:
    """What a rotary embedding has for one kind of layers, where they differ."""
    return value if layer_type is None else value[layer_type]
