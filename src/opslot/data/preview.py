"""Samples as text, with their trained parts marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Part:
    """Consecutive tokens that are all trained, with labels of one kind, or all not.

    Attributes:
        labels: of the tokens where they are not the tokens themselves, as in classification.
    """

    text: str
    tokens: list[str]
    trained: bool
    labels: list[int]


def parts_of(tokenizer: PreTrainedTokenizerBase, input_ids: Any, labels: Any) -> list[Part]:
    """The parts of one document, from its int64 [S] tokens and labels as a trainer gives them to the model."""
    ids, targets = np.asarray(input_ids), np.asarray(labels)
    trained = targets != IGNORE_INDEX
    # After an answer, the label can be the end-of-sequence token instead of the token that follows.
    changes = np.flatnonzero(np.diff(trained) | np.diff(trained & (targets != ids))) + 1
    bounds = [0, *changes.tolist(), len(ids)]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        part, own = ids[start:stop].tolist(), targets[start:stop].tolist()
        parts.append(
            Part(
                str(tokenizer.decode(part)),
                [str(token) for token in tokenizer.convert_ids_to_tokens(part)],
                bool(trained[start]),
                own if trained[start] and own != part else [],
            )
        )
    return parts


def documents_of(batch: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Tokens and labels, int64 [S], of each document in a micro batch, without padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    if "cu_seq_lens_q" in batch:
        offsets = batch["cu_seq_lens_q"].tolist()
        flat_ids, flat_labels = ids.flatten(), labels.flatten()
        found = [(flat_ids[a:b], flat_labels[a:b]) for a, b in itertools.pairwise(offsets)]
        # Padding is a document without labels at the end of a sample.
        return [(tokens, own) for tokens, own in found if len(tokens) == 1 or (own != IGNORE_INDEX).any()]
    mask = batch.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    if labels.ndim == 1:
        # One label per text, which its last token predicts.
        spread = ids.new_full(ids.shape, IGNORE_INDEX)
        for row, length, label in zip(spread, lengths, labels, strict=True):
            row[length - 1] = label
        labels = spread
    return [(tokens[:n], own[:n]) for tokens, own, n in zip(ids, labels, lengths, strict=True)]
