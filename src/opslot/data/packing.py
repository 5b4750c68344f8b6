"""Samples of packed documents; each is a pure function of (seed, epoch, index).

A sample can be computed from its number alone, so the dataloader state is one integer. Resuming is exact after a kill,
with any micro batch size and any number of workers and ranks.

An epoch is shuffled buffer by buffer, so that a sample needs the tokens up to its own buffer only: the shards of the
corpus are visited in random order, and all documents of a shuffle buffer (several shards) are shuffled together. The
first buffers are small, so that training starts when a single shard is tokenized.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from opslot._base.errors import DataError
from opslot.data.collation import make_sample
from opslot.data.sources import described_counts

if TYPE_CHECKING:
    from opslot.data.corpus import TokenCorpus, TokenShard


# Shards in the largest shuffle buffer: 256 MiB of text.
_LARGEST_BUFFER = 64
# Last element of the seed of each random draw: NumPy pads seeds with zeros, so each draw needs its own number.
_SHARD_ORDER, _DOCUMENT_ORDER, _SAMPLE_ORDER = 1, 2, 3


class Documents:
    """A selection of the documents of a corpus: all of them, or what a subclass selects from each shard.

    Attributes:
        shards: numbers of the shards that have selected documents, int64.
        identity: parameters of the selection, for `PackedDataset.identity`.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        self.shards: np.ndarray = np.arange(len(corpus.sizes))
        self.identity: Any = None

    def of(self, number: int, shard: TokenShard) -> np.ndarray:
        """The selected documents of shard `number`, ascending, int64."""
        return np.arange(len(shard.lengths))


@dataclass
class _Epoch:
    """One pass over the documents, as far as its shards have been tokenized.

    Attributes:
        buffers: the shards of each shuffle buffer.
        text: bytes of text up to the end of each buffer.
        ends: end of each known buffer in the stream of the epoch: in tokens with packing, in samples without.
        samples: number of samples that end in the known buffers up to each one.
    """

    number: int
    buffers: list[np.ndarray]
    text: np.ndarray
    ends: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return len(self.ends) == len(self.buffers)


@dataclass(frozen=True)
class _ShuffleBuffer:
    """The shuffled documents of a buffer, after the remainder of the previous buffers.

    Attributes:
        shards: the shards.
        shard_indices, documents: for each document, the index of its shard in `shards` and its number there; int64
            [documents].
        lengths: tokens in each document, int64 [documents].
        remainder: tokens before this buffer that belong to its first sample, document by document.
        starts: start of each remainder document, each document, and what follows, in the stream of the epoch, int64.
        samples: the samples that end in this buffer, in shuffled order.
    """

    shards: list[TokenShard]
    shard_indices: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray
    remainder: list[np.ndarray]
    starts: np.ndarray
    samples: np.ndarray

    def tokens(self, position: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the document at `position` of `starts`."""
        if position < len(self.remainder):
            return self.remainder[position][start:stop]
        position -= len(self.remainder)
        return self.shards[self.shard_indices[position]].tokens(int(self.documents[position]), start, stop)


class PackedDataset(Dataset):
    """An endless sequence of samples of `max_seq_len` tokens; sample `i` is in epoch `i // samples_per_epoch`.

    With packing, an epoch is the concatenation of its documents, cut into samples: a document may continue in another
    sample, without its beginning. Without packing, each sample is one document, or the next `max_seq_len` tokens of a
    longer one, padded.

    Args:
        corpus: the tokenized documents.
        documents: a selection of them; default all.
        pad_token_id: pads samples that are too short; padding is never predicted.
        drop_last: leave out the last, partial sample of an epoch with packing, unless it is the only one; else pad it.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        max_seq_len: int,
        *,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        documents: Documents | None = None,
        pad_token_id: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.corpus = corpus
        self.max_seq_len = max_seq_len
        self.packing = packing
        self.shuffle = shuffle
        self.seed = seed
        self.documents = Documents(corpus) if documents is None else documents
        self.pad_token_id = pad_token_id
        self.drop_last = drop_last
        self._sizes: dict[int, int] = {}
        self._samples_per_epoch: int | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._buffers: dict[tuple[int, int], _ShuffleBuffer] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the documents; tokenizes all of them.

        Raises:
            DataError: no document has text.
        """
        if self._samples_per_epoch is None:
            self.corpus.prepare(self.documents.shards)
            epoch = self._epoch(0)
            while not epoch.is_known:
                self._extend(epoch)
            if not epoch.samples or epoch.samples[-1] == 0:
                raise DataError(
                    "no documents to train on, or to evaluate with",
                    found=described_counts(self.corpus.sample_counts()),
                    hint="give more data, or a smaller data.eval_fraction",
                )
            self._samples_per_epoch = epoch.samples[-1]
        return self._samples_per_epoch

    def epoch_end(self, number: int) -> int | None:
        """The first sample of the epoch after that of sample `number`; None until a sample after it was computed."""
        size = self._samples_per_epoch
        return None if size is None else (number // size + 1) * size

    def __len__(self) -> int:
        return self.samples_per_epoch

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Sample `number`: "input_ids" int64 [max_seq_len] and "lengths", the tokens of each of its documents.

        "padding" is the number of padding tokens at the end, which are also the last entry of "lengths".
        """
        return make_sample(self.tokens(number), self.max_seq_len, self.pad_token_id, self.extras(number))

    def prepare(self, number: int) -> None:
        """Tokenize what the samples up to `number` need."""
        self._locate(number)

    def tokens(self, number: int) -> list[np.ndarray]:
        """Tokens of each document of sample `number`, unsigned or `LABELED`, without padding."""
        return self._documents_of(*self._sample(number))

    def extras(self, number: int) -> list[bytes]:
        """`MediaDocument.extra` of each document of sample `number`; empty where documents have none."""
        if self.packing:
            return []
        shard, document = self._document_of(number)
        extra = shard.extra(document)
        return [] if extra is None else [extra]

    def costs(self, first: int, stop: int) -> np.ndarray:
        """`MediaDocument.cost` of the samples [first, stop), float64; zero where documents have none."""
        located = [self._document_of(number) for number in range(first, stop)]
        return np.array([shard.cost(document) for shard, document in located])

    def _document_of(self, number: int) -> tuple[TokenShard, int]:
        """The shard of a sample that is one document, and the document's number there."""
        buffer, sample = self._sample(number)
        position = int(np.searchsorted(buffer.starts, sample, side="right")) - 1
        return buffer.shards[buffer.shard_indices[position]], int(buffer.documents[position])

    def token_counts(self, first: int, stop: int) -> np.ndarray:
        """Tokens of the samples [first, stop), int64; only without packing, where each is one document."""
        assert not self.packing, "packed samples are full"
        counts = []
        while first < stop:
            epoch, buffer_number, index = self._locate(first)
            buffer = self._buffer(epoch, buffer_number)
            begin = index - _before(epoch.samples, buffer_number)
            samples = buffer.samples[begin : begin + stop - first]
            positions = np.searchsorted(buffer.starts, samples, side="right") - 1
            before = (samples - buffer.starts[positions]) * self.max_seq_len
            counts.append(np.minimum(buffer.lengths[positions] - before, self.max_seq_len))
            first += len(samples)
        return np.concatenate(counts)

    def attended_pairs(self, number: int) -> int:
        """Sum of the squared lengths of the documents in sample `number`, to which its attention is proportional."""
        assert self.packing, "samples are single documents"
        buffer, sample = self._sample(number)
        begin = sample * self.max_seq_len
        first, last = np.searchsorted(buffer.starts, [begin, begin + self.max_seq_len])
        ends = [begin, *buffer.starts[first:last].tolist(), min(begin + self.max_seq_len, int(buffer.starts[-1]))]
        return int((np.diff(ends) ** 2).sum())

    def epochs(self, count: int) -> float:
        """Passes over the data after the first `count` samples, by bytes of text; a whole number at the end of each.

        Tokenizes no more than those samples need.
        """
        if count == 0:
            return 0.0
        epoch, buffer_number, index = self._locate(count - 1)
        first, stop = _before(epoch.samples, buffer_number), epoch.samples[buffer_number]
        begin, end = _before(epoch.text, buffer_number), int(epoch.text[buffer_number])
        if index + 1 == stop:
            # Buffers in which no sample ends count with the previous one.
            while buffer_number + 1 < len(epoch.buffers):
                if len(epoch.samples) == buffer_number + 1:
                    self._extend(epoch)
                if epoch.samples[buffer_number + 1] > stop:
                    break
                buffer_number += 1
                end = int(epoch.text[buffer_number])
            return epoch.number + end / int(epoch.text[-1])
        return epoch.number + (begin + (end - begin) * (index + 1 - first) / (stop - first)) / int(epoch.text[-1])

    def shards_in_order(self) -> np.ndarray:
        """The shards in the order in which the first epoch needs them."""
        return np.concatenate(self._epoch(0).buffers)

    def identity(self) -> dict[str, Any]:
        """Everything that determines which tokens sample `i` holds."""
        return {
            **self.corpus.identity,
            "data.max_seq_len": self.max_seq_len,
            "data.packing": self.packing,
            "data.shuffle": self.shuffle,
            "train.seed": self.seed,
            "data.eval_fraction": self.documents.identity,
        }

    def _sample(self, number: int) -> tuple[_ShuffleBuffer, int]:
        """The shuffle buffer of a sample, and its index in the epoch's stream."""
        epoch, buffer_number, index = self._locate(number)
        buffer = self._buffer(epoch, buffer_number)
        return buffer, int(buffer.samples[index - _before(epoch.samples, buffer_number)])

    def _locate(self, number: int) -> tuple[_Epoch, int, int]:
        """Epoch of a sample, number of its shuffle buffer there, and its index in the epoch."""
        epoch_number, index = (
            (0, number) if self._samples_per_epoch is None else divmod(number, self._samples_per_epoch)
        )
        epoch = self._epoch(epoch_number)
        while not epoch.samples or epoch.samples[-1] <= index:
            if epoch.is_known:
                # The first epoch has fewer samples than that, and their number is known now.
                assert self.samples_per_epoch <= number
                return self._locate(number)
            self._extend(epoch)
        return epoch, bisect.bisect_right(epoch.samples, index), index

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            shards, size = self.documents.shards, 1
            if self.shuffle:
                shards = np.random.default_rng([self.seed, number, 0, _SHARD_ORDER]).permutation(shards)
            buffers = []
            while len(shards):
                buffers.append(shards[:size])
                shards = shards[size:]
                size = min(2 * size, _LARGEST_BUFFER) if self.shuffle else 1
            text = np.cumsum([self.corpus.sizes[buffer].sum() for buffer in buffers])
            self._epochs = _keep_newest(self._epochs, number, _Epoch(number, buffers, text))
        return self._epochs[number]

    def _extend(self, epoch: _Epoch) -> None:
        """Tokenize the next buffer, so that its length is known."""
        buffer = epoch.buffers[len(epoch.ends)]
        self.corpus.prepare(buffer)
        end = (epoch.ends[-1] if epoch.ends else 0) + sum(self._size(int(number)) for number in buffer)
        epoch.ends.append(end)
        if self.packing:
            is_partial = epoch.is_known and not (self.drop_last and end >= self.max_seq_len)
            end = math.ceil(end / self.max_seq_len) if is_partial else end // self.max_seq_len
        epoch.samples.append(end)

    def _size(self, number: int) -> int:
        """Length of a shard's documents in the stream of an epoch."""
        if number not in self._sizes:
            shard = self.corpus.shard(number)
            self._sizes[number] = int(self._stream_lengths(shard.lengths[self.documents.of(number, shard)]).sum())
        return self._sizes[number]

    def _stream_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths of documents in the stream of an epoch: in tokens with packing, in samples without."""
        return lengths if self.packing else -(-lengths // self.max_seq_len)

    def _buffer(self, epoch: _Epoch, buffer_number: int) -> _ShuffleBuffer:
        key = (epoch.number, buffer_number)
        if key not in self._buffers:
            shards, shard_indices, documents = self._draw(epoch, buffer_number)
            start = _before(epoch.ends, buffer_number)
            remainder = self._remainder(epoch, buffer_number, start % self.max_seq_len) if self.packing else []
            lengths = _lengths_of(shards, shard_indices, documents)
            before = np.array([len(tokens) for tokens in remainder], dtype=np.int64)
            sizes = np.concatenate([before, self._stream_lengths(lengths)])
            samples = np.arange(_before(epoch.samples, buffer_number), epoch.samples[buffer_number])
            if self.shuffle:
                samples = np.random.default_rng([self.seed, *key, _SAMPLE_ORDER]).permutation(samples)
            starts = start - int(before.sum()) + np.concatenate([[0], np.cumsum(sizes)])
            self._buffers = _keep_newest(
                self._buffers,
                key,
                _ShuffleBuffer(shards, shard_indices, documents, lengths, remainder, starts, samples),
            )
        return self._buffers[key]

    def _draw(self, epoch: _Epoch, buffer_number: int) -> tuple[list[TokenShard], np.ndarray, np.ndarray]:
        """Shards of a buffer and, for each document in shuffled order, the index of its shard and its number there."""
        numbers = [int(number) for number in epoch.buffers[buffer_number]]
        shards = [self.corpus.shard(number) for number in numbers]
        selected = [self.documents.of(number, shard) for number, shard in zip(numbers, shards, strict=True)]
        shard_indices = np.repeat(np.arange(len(shards)), [len(documents) for documents in selected])
        documents = np.concatenate(selected)
        if not self.shuffle:
            return shards, shard_indices, documents
        order = np.random.default_rng([self.seed, epoch.number, buffer_number, _DOCUMENT_ORDER]).permutation(
            len(documents)
        )
        return shards, shard_indices[order], documents[order]

    def _remainder(self, epoch: _Epoch, buffer_number: int, count: int) -> list[np.ndarray]:
        """The last `count` tokens before a buffer, document by document."""
        parts: list[np.ndarray] = []
        while count:
            buffer_number -= 1
            shards, shard_indices, documents = self._draw(epoch, buffer_number)
            for shard, document in zip(shard_indices[::-1], documents[::-1], strict=True):
                part = shards[shard].tokens(int(document))[-count:]
                parts.append(part)
                count -= len(part)
                if not count:
                    break
        return parts[::-1]

    def _documents_of(self, buffer: _ShuffleBuffer, index: int) -> list[np.ndarray]:
        """Tokens of each document of the sample with this index in the epoch's stream."""
        size = self.max_seq_len
        if not self.packing:
            position = int(np.searchsorted(buffer.starts, index, side="right")) - 1
            start = (index - int(buffer.starts[position])) * size
            return [buffer.tokens(position, start, start + size)]
        begin, end = index * size, (index + 1) * size
        first = int(np.searchsorted(buffer.starts, begin, side="right")) - 1
        last = int(np.searchsorted(buffer.starts, end, side="left"))
        parts = []
        for position in range(first, min(last, len(buffer.starts) - 1)):
            offset = int(buffer.starts[position])
            parts.append(buffer.tokens(position, max(0, begin - offset), end - offset))
        return parts


def _lengths_of(shards: list[TokenShard], shard_indices: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Tokens in each document, given as in `_ShuffleBuffer`."""
    firsts = np.cumsum([0, *(len(shard.lengths) for shard in shards)])[:-1]
    return np.concatenate([shard.lengths for shard in shards])[firsts[shard_indices] + documents]


def _before(ends: Any, buffer_number: int) -> int:
    """End of the buffer before `buffer_number`."""
    return int(ends[buffer_number - 1]) if buffer_number else 0


def _keep_newest(kept: dict[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """`value` and the previously newest entry: samples near a boundary alternate between two buffers."""
    return {**dict(list(kept.items())[-1:]), key: value}
