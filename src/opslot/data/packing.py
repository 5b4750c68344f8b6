"""Rows of packed documents, each a pure function of (seed, epoch, index).

Because a row can be computed from its number alone, a run's place in its data is one integer: resuming is exact after
a kill, and whatever happened to the micro batch size, the number of workers or of ranks in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from opslot._base.errors import DataError
from opslot.data.corpus import TokenCorpus

IGNORE_INDEX = -100


@dataclass(frozen=True)
class _Epoch:
    """One pass over the documents.

    Attributes:
        documents: the documents in the order of this epoch, int64 [documents].
        starts: for each of them and for the end, the place in the epoch's stream where it starts: in tokens when rows
            are packed, in rows when each row holds one document; int64 [documents + 1].
        rows: the order in which rows are drawn, int64 [rows].
    """

    number: int
    documents: np.ndarray
    starts: np.ndarray
    rows: np.ndarray


class PackedRows(Dataset):
    """Endless rows of `max_seq_len` tokens; row number `i` belongs to epoch `i // rows_per_epoch`.

    With packing, an epoch is the concatenation of its documents cut into rows, so a document may go on in another
    row, without its beginning; the last, partial row is left out (unless it is the only one). Without, each row
    holds one document, or the next `max_seq_len` tokens of a longer one, padded.

    Args:
        corpus: the tokenized documents.
        documents: which of them; default all.
        pad_token_id: fills rows that are too short; never predicted, in a document of its own.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        max_seq_len: int,
        *,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        documents: np.ndarray | None = None,
        pad_token_id: int = 0,
    ) -> None:
        self.corpus = corpus
        self.max_seq_len = max_seq_len
        self.packing = packing
        self.shuffle = shuffle
        self.seed = seed
        self.documents = np.arange(len(corpus)) if documents is None else documents
        self.pad_token_id = pad_token_id
        lengths = corpus.lengths[self.documents]
        if packing:
            self.rows_per_epoch = max(1, int(lengths.sum()) // max_seq_len)
        else:
            self.rows_per_epoch = int(np.sum(-(-lengths // max_seq_len)))
        self._epoch: _Epoch | None = None

    def __len__(self) -> int:
        return self.rows_per_epoch

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Row number `row`: "input_ids" int64 [max_seq_len] and "lengths", the tokens of each of its documents.

        "padding" tells how many tokens at the end are padding; they are the last document.
        """
        return padded_row(self.tokens(row), self.max_seq_len, self.pad_token_id)

    def tokens(self, row: int) -> list[np.ndarray]:
        """Tokens of each document of row number `row`, int32, without padding."""
        number, index = divmod(row, self.rows_per_epoch)
        epoch = self._plan(number)
        return self._pieces(epoch, int(epoch.rows[index]))

    def token_counts(self, first: int, stop: int) -> np.ndarray:
        """Tokens of the rows [first, stop), int64, of rows of one document each."""
        assert not self.packing, "packed rows are full"
        counts = []
        while first < stop:
            number, index = divmod(first, self.rows_per_epoch)
            epoch = self._plan(number)
            rows = epoch.rows[index : index + stop - first]
            place = np.searchsorted(epoch.starts, rows, side="right") - 1
            before = (rows - epoch.starts[place]) * self.max_seq_len
            counts.append(np.minimum(self.corpus.lengths[epoch.documents[place]] - before, self.max_seq_len))
            first += len(rows)
        return np.concatenate(counts)

    def identity(self) -> dict[str, Any]:
        """What decides which tokens row `i` holds."""
        return {
            "data": self.corpus.fingerprint,
            "data.max_seq_len": self.max_seq_len,
            "data.packing": self.packing,
            "data.shuffle": self.shuffle,
            "train.seed": self.seed,
            "training documents": len(self.documents),
        }

    def _plan(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != number:
            rng = np.random.default_rng([self.seed, number])
            documents = rng.permutation(self.documents) if self.shuffle else self.documents
            lengths = self.corpus.lengths[documents]
            sizes = lengths if self.packing else -(-lengths // self.max_seq_len)
            rows = np.arange(self.rows_per_epoch)
            self._epoch = _Epoch(
                number,
                documents,
                np.concatenate([[0], np.cumsum(sizes)]),
                rng.permutation(rows) if self.shuffle else rows,
            )
        return self._epoch

    def _pieces(self, epoch: _Epoch, row: int) -> list[np.ndarray]:
        size = self.max_seq_len
        if not self.packing:
            place = int(np.searchsorted(epoch.starts, row, side="right")) - 1
            start = (row - int(epoch.starts[place])) * size
            return [self.corpus.tokens(int(epoch.documents[place]), start, start + size)]
        begin, end = row * size, (row + 1) * size
        first = int(np.searchsorted(epoch.starts, begin, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, end, side="left"))
        pieces = []
        for place in range(first, min(last, len(epoch.documents))):
            offset = int(epoch.starts[place])
            pieces.append(self.corpus.tokens(int(epoch.documents[place]), max(0, begin - offset), end - offset))
        return pieces


def padded_row(pieces: list[np.ndarray], size: int, pad_token_id: int) -> dict[str, Any]:
    """A row of `size` tokens from documents of at most as many, in the form of `PackedRows`' rows."""
    lengths = [len(piece) for piece in pieces]
    padding = size - sum(lengths)
    if padding:
        pieces = [*pieces, np.full(padding, pad_token_id, dtype=np.int32)]
        lengths.append(padding)
    return {
        "input_ids": torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        "lengths": lengths,
        "padding": padding,
    }


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One micro batch of rows [B, S] as keyword arguments of a Transformers causal model.

    Returns:
        input_ids, labels, position_ids: int64 [B, S]. Positions restart with each document; the first token of each
            and all padding carry label -100, so nothing is predicted across a border.
        cu_seq_lens_q, cu_seq_lens_k: int32 [documents + 1], borders of the documents, and so of the rows, in the
            flattened B * S tokens.
        max_length_q, max_length_k: tokens of the longest document, int.

        There is no attention_mask: restarting positions make eager and sdpa attention block-diagonal, and cu_seq_lens
        does it for kernels that take them.
    """
    input_ids = torch.stack([row["input_ids"] for row in rows])
    lengths = torch.tensor([length for row in rows for length in row["lengths"]])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    starts = torch.repeat_interleave(borders[:-1], lengths)
    labels = input_ids.flatten().clone()
    labels[borders[:-1]] = IGNORE_INDEX
    labels = labels.view_as(input_ids)
    for row, label in zip(rows, labels, strict=True):
        if row["padding"]:
            label[-row["padding"] :] = IGNORE_INDEX
    cu_seqlens = borders.to(torch.int32)
    longest = int(lengths.max())
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": (torch.arange(len(starts)) - starts).view_as(input_ids),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def count_targets(labels: torch.Tensor) -> int:
    """Tokens that a causal model predicts from `labels` [B, S], which it shifts by one."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


def split_documents(corpus: TokenCorpus, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents for training and for evaluation; the second holds `fraction` of them, at least one.

    Raises:
        DataError: a single document cannot be split.
    """
    if len(corpus) < 2:
        raise DataError(
            "train.eval_steps is set, but there is one document alone, so none can be held out\n"
            "  to do: set data.eval_path, or data.sample_by: paragraph"
        )
    held_out = min(len(corpus) - 1, max(1, round(len(corpus) * fraction)))
    order = np.random.default_rng([seed, len(corpus)]).permutation(len(corpus))
    return np.sort(order[held_out:]), np.sort(order[:held_out])
