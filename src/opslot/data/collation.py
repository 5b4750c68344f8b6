"""Samples and micro batches of token documents, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opslot._base.boundaries import boundaries_of
from opslot._base.labels import IGNORE_INDEX

# A token with its label, where that is not the token itself; documents are arrays of these, or of unsigned integers.
LABELED = np.dtype([("token", "<u4"), ("label", "<i4")])


def make_sample(
    documents: list[np.ndarray], size: int, pad_token_id: int, extras: Sequence[bytes] = ()
) -> dict[str, Any]:
    """A sample of `size` tokens from documents of at most as many; see `PackedDataset.__getitem__`.

    Documents of `LABELED` tokens also give "labels", int64 [size], and `extras` is kept as "extras".
    """
    lengths = [len(tokens) for tokens in documents]
    padding = size - sum(lengths)
    if padding:
        lengths.append(padding)

    def joined(parts: list[np.ndarray], fill: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*parts, np.full(padding, fill)]).astype(np.int64))

    labeled = bool(documents) and documents[0].dtype == LABELED
    sample: dict[str, Any] = {
        "input_ids": joined([tokens["token"] if labeled else tokens for tokens in documents], pad_token_id),
        "lengths": lengths,
        "padding": padding,
    }
    if extras:
        sample["extras"] = list(extras)
    if labeled:
        sample["labels"] = joined([tokens["label"] for tokens in documents], IGNORE_INDEX)
    return sample


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro batch of packed samples [B, S] as keyword arguments of a Transformers causal model.

    Returns:
        input_ids, labels, position_ids: int64 [B, S]. Positions restart with each document. Labels are those of the
            samples, else the tokens themselves; the model shifts them. The first token of each document and all
            padding have label -100, so nothing is predicted across documents.
        cu_seq_lens_q, cu_seq_lens_k: int32 [documents + 1], offsets of the documents in the flattened B * S tokens;
            sample boundaries are document boundaries.
        max_length_q, max_length_k: tokens of the longest document, int.

        There is no attention_mask: eager and sdpa attention derive the block-diagonal mask from the restarting
        positions, other kernels use cu_seq_lens.
    """
    input_ids = torch.stack([sample["input_ids"] for sample in samples])
    lengths = torch.tensor([length for sample in samples for length in sample["lengths"]])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    starts = torch.repeat_interleave(offsets[:-1], lengths)
    labels = _labels(samples).flatten()
    labels[offsets[:-1]] = IGNORE_INDEX
    return {
        "input_ids": input_ids,
        "labels": _ignore_padding(labels.view_as(input_ids), samples),
        "position_ids": (torch.arange(len(starts)) - starts).view_as(input_ids),
        **boundaries_of(offsets),
    }


def collate_padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro batch of samples of one document each, padded on the right, as Transformers' collators make it.

    Every causal model takes it, also one whose attention does not separate packed documents.

    Returns:
        input_ids, labels, position_ids: int64 [B, S]. Padding and the first token have label -100.
        attention_mask: int64 [B, S], 1 for tokens; absent without padding.
    """
    input_ids = torch.stack([sample["input_ids"] for sample in samples])
    labels = _labels(samples)
    labels[:, 0] = IGNORE_INDEX
    batch = {
        "input_ids": input_ids,
        "labels": _ignore_padding(labels, samples),
        "position_ids": torch.arange(input_ids.shape[1]).expand_as(input_ids).contiguous(),
    }
    if any(sample["padding"] for sample in samples):
        mask = torch.ones_like(input_ids)
        for sample, tokens in zip(samples, mask, strict=True):
            tokens[len(tokens) - sample["padding"] :] = 0
        batch["attention_mask"] = mask
    return batch


def _labels(samples: list[dict[str, Any]]) -> torch.Tensor:
    """A copy of the labels of `samples`, int64 [B, S]."""
    return torch.stack([sample.get("labels", sample["input_ids"]) for sample in samples])


def _ignore_padding(labels: torch.Tensor, samples: list[dict[str, Any]]) -> torch.Tensor:
    for sample, label in zip(samples, labels, strict=True):
        label[len(label) - sample["padding"] :] = IGNORE_INDEX
    return labels


def count_targets(labels: torch.Tensor) -> int:
    """Number of tokens that a causal model predicts from `labels` [B, S], which it shifts by one."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())
