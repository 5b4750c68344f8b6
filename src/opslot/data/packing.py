"""Rows of packed documents, each a pure function of (seed, epoch, index).

Because a row can be computed from its number alone, a run's place in its data is one integer: resuming is exact after
a kill, and whatever happened to the micro batch size, the number of workers or of ranks in between.

The order of an epoch is drawn window by window, so that a row needs the tokens up to its own window alone: blocks of
the corpus come in an order of their own, and all documents of a window's blocks are shuffled together. The first
windows are small, so that training starts when a single block is tokenized.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from opslot._base.errors import DataError

IGNORE_INDEX = -100

# Blocks whose documents are shuffled together: 256 MiB of text.
_LARGEST_WINDOW = 64
# What is drawn from (seed, epoch, window): NumPy pads seeds with zeros, so each has a number of its own.
_BLOCKS, _DOCUMENTS, _ROWS = 1, 2, 3


class Block(Protocol):
    """Documents of a part of the corpus: `opslot.data.TokenBlock`."""

    lengths: np.ndarray

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray: ...


class Corpus(Protocol):
    """Blocks that are made when they are asked for: `opslot.data.TokenCorpus`."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def sizes(self) -> np.ndarray: ...

    def block(self, number: int) -> Block: ...

    def prepare(self, numbers: Sequence[int] | np.ndarray) -> None: ...


class Documents:
    """Which documents of a corpus: all of them, or a part that a subclass chooses block by block.

    Attributes:
        blocks: the blocks that have any, int64.
        identity: what the choice depends on beside the corpus, for `PackedRows.identity`.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.blocks: np.ndarray = np.arange(len(corpus.sizes))
        self.identity: Any = None

    def of(self, number: int, block: Block) -> np.ndarray:
        """The chosen documents of block `number`, ascending, int64."""
        return np.arange(len(block.lengths))


@dataclass
class _Epoch:
    """One pass over the documents, as far as it is known.

    Attributes:
        windows: the blocks of each window.
        text: bytes of text up to the end of each window.
        ends: where each known window ends in the epoch's stream: in tokens when rows are packed, in rows when each row
            holds one document.
        rows: rows that end in the known windows up to each.
    """

    number: int
    windows: list[np.ndarray]
    text: np.ndarray
    ends: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return len(self.ends) == len(self.windows)


@dataclass(frozen=True)
class _Window:
    """The documents of a window in their order, those cut off from the row that goes on here first.

    Attributes:
        blocks: the blocks.
        places, documents: for each document, its block's place in `blocks` and its number there; int64 [documents].
        lengths: tokens in each document, int64 [documents].
        carried: the tokens before this window that belong to its first row, document by document.
        starts: where each of `carried`, then each document, then what follows starts in the epoch's stream, int64.
        rows: the rows that end here, in the order in which they are drawn.
    """

    blocks: list[Block]
    places: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray
    carried: list[np.ndarray]
    starts: np.ndarray
    rows: np.ndarray

    def tokens(self, position: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the document at `position` of `starts`."""
        if position < len(self.carried):
            return self.carried[position][start:stop]
        position -= len(self.carried)
        return self.blocks[self.places[position]].tokens(int(self.documents[position]), start, stop)


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
        corpus: Corpus,
        max_seq_len: int,
        *,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        documents: Documents | None = None,
        pad_token_id: int = 0,
    ) -> None:
        self.corpus = corpus
        self.max_seq_len = max_seq_len
        self.packing = packing
        self.shuffle = shuffle
        self.seed = seed
        self.documents = Documents(corpus) if documents is None else documents
        self.pad_token_id = pad_token_id
        self._sizes: dict[int, int] = {}
        self._rows_per_epoch: int | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._windows: dict[tuple[int, int], _Window] = {}

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the documents; tokenizes what is not there.

        Raises:
            DataError: there is no text.
        """
        if self._rows_per_epoch is None:
            self.corpus.prepare(self.documents.blocks)
            epoch = self._epoch(0)
            while not epoch.is_known:
                self._extend(epoch)
            if not epoch.rows or epoch.rows[-1] == 0:
                raise DataError("the data cannot be read:\n- there is no document to train on, or to evaluate with")
            self._rows_per_epoch = epoch.rows[-1]
        return self._rows_per_epoch

    def __len__(self) -> int:
        return self.rows_per_epoch

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Row number `row`: "input_ids" int64 [max_seq_len] and "lengths", the tokens of each of its documents.

        "padding" tells how many tokens at the end are padding; they are the last document.
        """
        return padded_row(self.tokens(row), self.max_seq_len, self.pad_token_id)

    def prepare(self, row: int) -> None:
        """Return when the tokens of all rows up to number `row` are there."""
        self._locate(row)

    def tokens(self, row: int) -> list[np.ndarray]:
        """Tokens of each document of row number `row`, unsigned, without padding."""
        epoch, place, index = self._locate(row)
        window = self._window(epoch, place)
        return self._pieces(window, int(window.rows[index - _before(epoch.rows, place)]))

    def token_counts(self, first: int, stop: int) -> np.ndarray:
        """Tokens of the rows [first, stop), int64, of rows of one document each."""
        assert not self.packing, "packed rows are full"
        counts = []
        while first < stop:
            epoch, place, index = self._locate(first)
            window = self._window(epoch, place)
            begin = index - _before(epoch.rows, place)
            rows = window.rows[begin : begin + stop - first]
            positions = np.searchsorted(window.starts, rows, side="right") - 1
            before = (rows - window.starts[positions]) * self.max_seq_len
            counts.append(np.minimum(window.lengths[positions] - before, self.max_seq_len))
            first += len(rows)
        return np.concatenate(counts)

    def epochs(self, rows: int) -> float:
        """Passes over the data that are done after the first `rows` rows, by bytes of text; whole ones are whole
        numbers. It needs no more of the text than those rows do."""
        if rows == 0:
            return 0.0
        epoch, place, index = self._locate(rows - 1)
        first, stop = _before(epoch.rows, place), epoch.rows[place]
        begin, end = _before(epoch.text, place), int(epoch.text[place])
        if index + 1 == stop:
            # Windows in which no row ends count with the one before them.
            while place + 1 < len(epoch.windows):
                if len(epoch.rows) == place + 1:
                    self._extend(epoch)
                if epoch.rows[place + 1] > stop:
                    break
                place += 1
                end = int(epoch.text[place])
            return epoch.number + end / int(epoch.text[-1])
        return epoch.number + (begin + (end - begin) * (index + 1 - first) / (stop - first)) / int(epoch.text[-1])

    def blocks_in_order(self) -> np.ndarray:
        """The blocks in the order in which the first epoch needs them."""
        return np.concatenate(self._epoch(0).windows)

    def identity(self) -> dict[str, Any]:
        """What decides which tokens row `i` holds."""
        return {
            "data": self.corpus.fingerprint,
            "data.max_seq_len": self.max_seq_len,
            "data.packing": self.packing,
            "data.shuffle": self.shuffle,
            "train.seed": self.seed,
            "data.eval_fraction": self.documents.identity,
        }

    def _locate(self, row: int) -> tuple[_Epoch, int, int]:
        """Epoch of a row, place of its window there, and its index among the epoch's rows."""
        number, index = (0, row) if self._rows_per_epoch is None else divmod(row, self._rows_per_epoch)
        epoch = self._epoch(number)
        while not epoch.rows or epoch.rows[-1] <= index:
            if epoch.is_known:
                # The first epoch has fewer rows; how many is known now.
                assert self.rows_per_epoch <= row
                return self._locate(row)
            self._extend(epoch)
        return epoch, bisect.bisect_right(epoch.rows, index), index

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            blocks, size = self.documents.blocks, 1
            if self.shuffle:
                blocks = np.random.default_rng([self.seed, number, 0, _BLOCKS]).permutation(blocks)
            windows = []
            while len(blocks):
                windows.append(blocks[:size])
                blocks = blocks[size:]
                size = min(2 * size, _LARGEST_WINDOW) if self.shuffle else 1
            text = np.cumsum([self.corpus.sizes[window].sum() for window in windows])
            self._epochs = _with(self._epochs, number, _Epoch(number, windows, text))
        return self._epochs[number]

    def _extend(self, epoch: _Epoch) -> None:
        """Learn how long the next window is."""
        window = epoch.windows[len(epoch.ends)]
        self.corpus.prepare(window)
        end = (epoch.ends[-1] if epoch.ends else 0) + sum(self._size(int(number)) for number in window)
        epoch.ends.append(end)
        rows = end // self.max_seq_len if self.packing else end
        epoch.rows.append(min(1, end) if epoch.is_known and rows == 0 else rows)

    def _size(self, number: int) -> int:
        """Tokens, or rows, of the documents of a block."""
        if number not in self._sizes:
            block = self.corpus.block(number)
            self._sizes[number] = int(self._stretch(block.lengths[self.documents.of(number, block)]).sum())
        return self._sizes[number]

    def _stretch(self, lengths: np.ndarray) -> np.ndarray:
        """What documents of `lengths` tokens take in an epoch's stream."""
        return lengths if self.packing else -(-lengths // self.max_seq_len)

    def _window(self, epoch: _Epoch, place: int) -> _Window:
        key = (epoch.number, place)
        if key not in self._windows:
            blocks, places, documents = self._draw(epoch, place)
            start = _before(epoch.ends, place)
            carried = self._carried(epoch, place, start % self.max_seq_len) if self.packing else []
            lengths = _lengths_of(blocks, places, documents)
            before = np.array([len(tokens) for tokens in carried], dtype=np.int64)
            sizes = np.concatenate([before, self._stretch(lengths)])
            rows = np.arange(_before(epoch.rows, place), epoch.rows[place])
            if self.shuffle:
                rows = np.random.default_rng([self.seed, *key, _ROWS]).permutation(rows)
            starts = start - int(before.sum()) + np.concatenate([[0], np.cumsum(sizes)])
            self._windows = _with(
                self._windows, key, _Window(blocks, places, documents, lengths, carried, starts, rows)
            )
        return self._windows[key]

    def _draw(self, epoch: _Epoch, place: int) -> tuple[list[Block], np.ndarray, np.ndarray]:
        """Blocks of a window, and for each of its documents in their order its block's place and its number there."""
        numbers = [int(number) for number in epoch.windows[place]]
        blocks = [self.corpus.block(number) for number in numbers]
        chosen = [self.documents.of(number, block) for number, block in zip(numbers, blocks, strict=True)]
        places = np.repeat(np.arange(len(blocks)), [len(documents) for documents in chosen])
        documents = np.concatenate(chosen)
        if not self.shuffle:
            return blocks, places, documents
        order = np.random.default_rng([self.seed, epoch.number, place, _DOCUMENTS]).permutation(len(documents))
        return blocks, places[order], documents[order]

    def _carried(self, epoch: _Epoch, place: int, count: int) -> list[np.ndarray]:
        """The last `count` tokens before a window, document by document."""
        pieces: list[np.ndarray] = []
        while count:
            place -= 1
            blocks, places, documents = self._draw(epoch, place)
            for block, document in zip(places[::-1], documents[::-1], strict=True):
                piece = blocks[block].tokens(int(document))[-count:]
                pieces.append(piece)
                count -= len(piece)
                if not count:
                    break
        return pieces[::-1]

    def _pieces(self, window: _Window, row: int) -> list[np.ndarray]:
        size = self.max_seq_len
        if not self.packing:
            position = int(np.searchsorted(window.starts, row, side="right")) - 1
            start = (row - int(window.starts[position])) * size
            return [window.tokens(position, start, start + size)]
        begin, end = row * size, (row + 1) * size
        first = int(np.searchsorted(window.starts, begin, side="right")) - 1
        last = int(np.searchsorted(window.starts, end, side="left"))
        pieces = []
        for position in range(first, min(last, len(window.starts) - 1)):
            offset = int(window.starts[position])
            pieces.append(window.tokens(position, max(0, begin - offset), end - offset))
        return pieces


def _lengths_of(blocks: list[Block], places: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Tokens in each document, given as in `_Window`."""
    firsts = np.cumsum([0, *(len(block.lengths) for block in blocks)])[:-1]
    return np.concatenate([block.lengths for block in blocks])[firsts[places] + documents]


def _before(ends: Any, place: int) -> int:
    """The end of the window before `place`."""
    return int(ends[place - 1]) if place else 0


def _with(kept: dict[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """The newest entry and `value`: rows near a border are asked for on both sides."""
    return {**dict(list(kept.items())[-1:]), key: value}


def padded_row(pieces: list[np.ndarray], size: int, pad_token_id: int) -> dict[str, Any]:
    """A row of `size` tokens from documents of at most as many, in the form of `PackedRows`' rows."""
    lengths = [len(piece) for piece in pieces]
    padding = size - sum(lengths)
    if padding:
        pieces = [*pieces, np.full(padding, pad_token_id, dtype=np.int64)]
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
