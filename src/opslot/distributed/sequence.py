"""Sharding a batch of global sequences over sequence-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot._base.boundaries import BOUNDARIES, boundaries_of, offsets_of
from opslot._base.errors import ConfigError
from opslot._base.labels import IGNORE_INDEX, shifted_labels
from opslot.distributed.parallel_state import ParallelState, get_parallel_state

_SHOWN = 8
_FEATURES = ("pixel_values", "input_features", "input_values", "audio_input_ids")
_TYPE_IDS = ("token_type_ids", "mm_token_type_ids")


def shard_sequence(batch: dict[str, Any], state: ParallelState | None = None) -> dict[str, Any]:
    """This rank's shard of a causal model's inputs; the batch itself without sequence parallelism.

    Sequences are padded at the end to a multiple of the ranks; the labels of padding are ignored.

    A batch with images, videos or audio, or with token_type_ids, keeps its sequences: a multimodal model places
    features in the global sequence and shards it at the entrance of its language model. Labels are sharded here.

    Args:
        batch: the same on all ranks of a sequence. input_ids int64 [B, S]; labels [B, S], or shift_labels [B, S], which
            are shifted already; position_ids [B, S], which restart with each document, or [axes, B, S] of a multimodal
            rotary embedding, where the first of 4 axes does; attention_mask [B, S], 1 for tokens; cu_seq_lens_q int
            [documents + 1] over B * S tokens. All but input_ids may be absent. Other entries are passed on.

    Returns:
        input_ids, position_ids, labels and shift_labels [B, S / sp] of this rank's positions, the last two both shifted
        over the global sequence, so that a shard's last token has its label; for packed sequences also cu_seq_lens_q,
        cu_seq_lens_k, max_length_q and max_length_k of the global sequences; where there is padding, also
        attention_mask [B, S / sp] of this rank's positions, which load-balancing losses need; in attention, padding is
        a separate document.

    Raises:
        ConfigError: no input_ids, an attention mask that is not a padding mask, or entries of other shapes.
    """
    state = state or get_parallel_state()
    if state.sp == 1:
        return batch
    _check_shapes(batch)
    input_ids: Tensor = batch["input_ids"]
    labels: Tensor | None = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = shifted_labels(batch["labels"])
    positions: Tensor | None = batch.get("position_ids")
    starts = _document_starts(batch)
    padding = -input_ids.shape[1] % state.sp
    whole = has_features(batch)
    if positions is None and not whole:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    inputs = {"input_ids": F.pad(input_ids, (0, padding))}
    if positions is not None:
        inputs["position_ids"] = F.pad(positions.expand(*positions.shape[:-2], *input_ids.shape), (0, padding))
    mask: Tensor | None = batch.get("attention_mask")
    if padding or mask is not None:
        inputs["attention_mask"] = F.pad(torch.ones_like(input_ids) if mask is None else mask, (0, padding))
    targets = {}
    if labels is not None:
        shifted = F.pad(labels, (0, padding), value=IGNORE_INDEX)
        targets = {"labels": shifted, "shift_labels": shifted}
    if whole:
        inputs |= {name: F.pad(batch[name], (0, padding)) for name in _TYPE_IDS if batch.get(name) is not None}
    own = targets if whole else {**inputs, **targets}
    parts = {name: value.chunk(state.sp, -1)[state.sp_rank].contiguous() for name, value in own.items()}
    rest = {name: value for name, value in batch.items() if name not in _REPLACED}
    return {**rest, **inputs, **parts, **_documents(F.pad(starts, (0, padding)))}


def has_features(batch: Mapping[str, Any]) -> bool:
    """Whether a batch has images, videos or audio, or marks their tokens."""
    return any(value is not None and name.startswith((*_FEATURES, *_TYPE_IDS)) for name, value in batch.items())


_REPLACED = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", *BOUNDARIES)


def _check_shapes(batch: dict[str, Any]) -> None:
    input_ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if input_ids is None:
        raise ConfigError(
            f"sequence parallelism shards input_ids, but the batch has {', '.join(batch)}",
            hint="let the model embed the tokens itself, or set sp to 1",
        )
    if input_ids.dim() != 2:
        raise ConfigError(
            f"sequence parallelism got input_ids of shape {tuple(input_ids.shape)}",
            hint="give [B, S]; for a single sequence input_ids[None]",
        )
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if mask is not None and shape != input_ids.shape:
        raise ConfigError(
            f"sequence parallelism got an attention_mask of shape {shape} for input_ids of "
            f"shape {tuple(input_ids.shape)}",
            hint="give a [B, S] padding mask, or documents as cu_seq_lens_q",
        )
    one_row = (input_ids.shape[1:], input_ids[:1].shape)
    for name in ("labels", "shift_labels", "position_ids"):
        value = batch.get(name)
        if value is None or value.shape == input_ids.shape:
            continue
        if name == "position_ids" and (value.shape in one_row or value.shape[1:] == input_ids.shape):
            continue
        raise ConfigError(
            f"sequence parallelism got {name} of shape {tuple(value.shape)} for input_ids of "
            f"shape {tuple(input_ids.shape)}",
            hint="give one for each token, [B, S]",
        )
    _check_cu_seqlens(batch.get("cu_seq_lens_q"), input_ids)


def _check_cu_seqlens(cu_seqlens: Tensor | None, input_ids: Tensor) -> None:
    if cu_seqlens is None:
        return
    ends = cu_seqlens.tolist()
    if ends[:1] != [0] or ends[-1] != input_ids.numel() or ends != sorted(ends):
        found = str(ends) if len(ends) <= _SHOWN else f"{ends[:_SHOWN]} ... {ends[-1]}"
        raise ConfigError(
            f"cu_seq_lens_q must rise from 0 to the {input_ids.numel()} tokens of input_ids {tuple(input_ids.shape)}",
            found=found,
            hint="give the boundaries of all documents, with padding as a separate document",
        )


def _documents(starts: Tensor) -> dict[str, Any]:
    """cu_seqlens and maximum lengths of documents that begin where `starts` [B, S] is True.

    Empty if each sequence is one document: causal attention needs no cu_seqlens then, and is faster without.
    """
    offsets = offsets_of(starts)
    return {} if len(offsets) == len(starts) + 1 else boundaries_of(offsets)


# Dims of position_ids [axes, B, S], and axes if the first is that of text.
_AXES_FIRST, _WITH_TEXT_AXIS = 3, 4


def _document_starts(batch: dict[str, Any]) -> Tensor:
    """[B, S] bool: the first token of each row, document, and run of padding."""
    input_ids, mask = batch["input_ids"], batch.get("attention_mask")
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    starts[:, 0] = True
    cu_seqlens, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if cu_seqlens is not None:
        offsets = cu_seqlens.long()
        # Documents without tokens begin where the next one does, and the last of them after the last token.
        starts.view(-1)[offsets[offsets < starts.numel()]] = True
    elif positions is not None and (positions.dim() < _AXES_FIRST or len(positions) == _WITH_TEXT_AXIS):
        text = positions[0] if positions.dim() == _AXES_FIRST else positions
        step = text.expand_as(input_ids).diff(dim=1)
        # Positions that rise through all rows, whatever numbers they skip, are those of one document a row.
        starts[:, 1:] |= (step != 1) & (step < 1).any()
    if mask is not None:
        starts[:, 1:] |= mask[:, 1:].bool() != mask[:, :-1].bool()
    return starts
