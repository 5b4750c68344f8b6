"""Sequences of a model with towers under Ulysses: global up to its language model, which gets a shard of them.

Features of images are placed in the embeddings of the global sequence, and positions and masks are computed from it.
Then its parts for the ranks are cut: embeddings, positions of any number of axes, masks of tokens, features that are
added in deeper layers. The images of the sequences are shared over their ranks (`sharing`), or computed by all
of them. A rank's shard of the embeddings alone has a gradient, so gradients of towers are summed over ranks as all
others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import ParallelError
from opslot.distributed import get_parallel_state, has_features

_whole: ContextVar[bool] = ContextVar("opslot_whole_sequences", default=False)
_LAST = "position_ids"


def has_whole_sequences() -> bool:
    """Whether the model that runs has not yet sharded its sequences."""
    return _whole.get()


def shard_at_decoder(model: nn.Module, decoder: nn.Module) -> None:
    """Let `decoder`, the language model of `model`, get this rank's shard of batches with images, videos or audio.

    Batches of text alone are sharded already.
    """
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)
    decoder.register_forward_pre_hook(partial(_shard, type(model).__name__), with_kwargs=True)


def _begin(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    _whole.set(has_features(kwargs))


def _end(*_: Any) -> None:
    _whole.set(False)


def _shard(model: str, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the language model."""
    state = get_parallel_state()
    if not _whole.get() or state.sp == 1:
        return None
    _whole.set(False)
    embeds = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
    batch, length = embeds.shape[:2]
    if length % state.sp:
        raise ParallelError(
            f"{model} got sequences of {length} tokens, which sp={state.sp} does not divide",
            hint="call it with **opslot.distributed.shard_sequence(batch), which pads them",
        )
    if kwargs.get(_LAST) is None:
        kwargs = {**kwargs, _LAST: torch.arange(length, device=embeds.device).expand(batch, -1)}
    part = slice(state.sp_rank * (length // state.sp), (state.sp_rank + 1) * (length // state.sp))
    rows = {name: value for name, value in kwargs.items() if isinstance(value, list | tuple)}
    found = {name: _part(name, value, (batch, length), part) for name, value in kwargs.items() if name not in rows}
    mask = next((v for name, v in kwargs.items() if name != "attention_mask" and _marks(v, (batch, length))), None)
    if mask is not None:
        found |= {name: [_rows(value, mask, part) for value in values] for name, values in rows.items()}
    else:
        found |= rows
    return args, found


def _marks(value: Any, shape: tuple[int, int]) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == shape


def _part(name: str, value: Any, shape: tuple[int, int], part: slice) -> Any:
    """This rank's tokens of a tensor [B, S, ...] or [axes, B or 1, S]; any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.shape[:2] == shape:
        return value[:, part]
    # Positions of audio and video may be fractions.
    integers = name == _LAST or not value.is_floating_point()
    is_positions = value.dim() <= 3 and integers and value.shape[-1] == shape[1]
    return value[..., part] if is_positions and value.shape[-2] in (1, shape[0]) else value


def _rows(features: Any, mask: Tensor, part: slice) -> Any:
    """Features [tokens where `mask`, H] of the tokens of this rank."""
    if not isinstance(features, Tensor):
        return features
    number = (mask.flatten().cumsum(0) - 1).view_as(mask)
    return features[number[:, part][mask[:, part]].to(features.device)]
