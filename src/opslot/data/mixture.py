"""Several data sets in one: samples drawn by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from opslot.data.packing import PackedDataset

# Samples whose data sets are drawn together; a part of the meaning of a sample number.
_BLOCK = 4096
# Last element of the seed; see packing.py.
_SOURCE = 6


class MixedDataset(Dataset):
    """An endless sequence of samples of several data sets, each drawn with a probability proportional to its weight.

    A pure function of (seed, number), as `PackedDataset` is: the data sets of each block of samples are drawn with a
    seed of their own, and the samples of each data set follow in its own order, epoch by epoch. An epoch of the mixture
    has as many samples as the data sets have together; one with a large weight is repeated in it.

    Args:
        datasets: of the same `max_seq_len` and packing.
        weights: positive, of any sum.
        names: for the dataloader state.
    """

    def __init__(
        self, datasets: Sequence[PackedDataset], weights: Sequence[float], names: Sequence[str], seed: int = 0
    ) -> None:
        self.datasets = list(datasets)
        self.weights = np.asarray(weights, dtype=float) / math.fsum(weights)
        self.names = list(names)
        self.seed = seed
        self.packing = datasets[0].packing
        self.shuffle = datasets[0].shuffle
        self.max_seq_len = datasets[0].max_seq_len
        self.pad_token_id = datasets[0].pad_token_id
        # Samples of each data set before each block that was drawn, [blocks + 1, datasets].
        self._before: list[np.ndarray] = [np.zeros(len(self.datasets), dtype=np.int64)]
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all data sets; tokenizes all of them."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def epoch_end(self, number: int) -> int | None:
        """None, since data sets end at different samples."""
        return None

    def __len__(self) -> int:
        return self.samples_per_epoch

    def __getitem__(self, number: int) -> dict[str, Any]:
        source, index = self.locate(number)
        return self.datasets[source][index]

    def locate(self, number: int) -> tuple[int, int]:
        """The data set of sample `number`, and the number of the sample there."""
        sources, counts = self._block(number // _BLOCK)
        offset = number % _BLOCK
        source = int(sources[offset])
        return source, int(self._before[number // _BLOCK][source] + counts[offset])

    def prepare(self, number: int) -> None:
        """Tokenize what the samples up to `number` need."""
        for dataset, count in zip(self.datasets, self._counts(number + 1), strict=True):
            if count:
                dataset.prepare(count - 1)

    def tokens(self, number: int) -> list[np.ndarray]:
        """Tokens of each document of sample `number`, without padding."""
        source, index = self.locate(number)
        return self.datasets[source].tokens(index)

    def extras(self, number: int) -> list[bytes]:
        """See `PackedDataset.extras`."""
        source, index = self.locate(number)
        return self.datasets[source].extras(index)

    def costs(self, first: int, stop: int) -> np.ndarray:
        """See `PackedDataset.costs`."""
        located = [self.locate(number) for number in range(first, stop)]
        return np.array([float(self.datasets[source].costs(index, index + 1)[0]) for source, index in located])

    def attended_pairs(self, number: int) -> int:
        """See `PackedDataset.attended_pairs`."""
        source, index = self.locate(number)
        return self.datasets[source].attended_pairs(index)

    def token_counts(self, first: int, stop: int) -> np.ndarray:
        """Tokens of the samples [first, stop), int64; only without packing."""
        located = [self.locate(number) for number in range(first, stop)]
        return np.array([int(self.datasets[source].token_counts(index, index + 1)[0]) for source, index in located])

    def epochs(self, count: int) -> float:
        """Passes over the data after the first `count` samples: the mean over the data sets, by bytes of text."""
        sizes = np.array([int(dataset.corpus.sizes.sum()) for dataset in self.datasets], dtype=float)
        passes = [dataset.epochs(int(n)) for dataset, n in zip(self.datasets, self._counts(count), strict=True)]
        return float(np.dot(sizes, passes) / sizes.sum())

    def identity(self) -> dict[str, Any]:
        """Everything that determines which tokens sample `i` holds."""
        found = {}
        for name, weight, dataset in zip(self.names, self.weights.tolist(), self.datasets, strict=True):
            for field, value in dataset.identity().items():
                own = field == "data.train_path"
                found[f"{name}: {field}" if own else field] = f"{value}, weight {weight:.6g}" if own else value
        return found

    def _counts(self, number: int) -> list[int]:
        """Samples of each data set among the first `number`."""
        sources, _ = self._block(number // _BLOCK)
        inside = np.bincount(sources[: number % _BLOCK], minlength=len(self.datasets))
        return [int(count) for count in self._before[number // _BLOCK] + inside]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its data set, and the number of earlier samples of that data set in the block."""
        while len(self._before) <= block:
            drawn = np.bincount(self._draw(len(self._before) - 1), minlength=len(self.datasets))
            self._before.append(self._before[-1] + drawn)
        if block not in self._drawn:
            sources = self._draw(block)
            counts = np.zeros(_BLOCK, dtype=np.int64)
            for source in range(len(self.datasets)):
                mine = sources == source
                counts[mine] = np.arange(mine.sum())
            self._drawn = {**dict(list(self._drawn.items())[-1:]), block: (sources, counts)}
        return self._drawn[block]

    def _draw(self, block: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, block, 0, _SOURCE])
        return rng.choice(len(self.datasets), size=_BLOCK, p=self.weights)
