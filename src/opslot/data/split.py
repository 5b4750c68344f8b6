"""Documents held out for evaluation, selected shard by shard, so that no selection needs the whole corpus."""

from __future__ import annotations

import numpy as np

from opslot._base.errors import DataError
from opslot.data.packing import Corpus, Documents, Shard

# An evaluation reads at most this many shards: `fraction` of 256 MiB of text.
_MOST_SHARDS = 64
# Last element of the seed of each random draw; see packing.py.
_HELD_OUT_SHARDS, _HELD_OUT_DOCUMENTS = 4, 5


def split_documents(corpus: Corpus, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents for training and for evaluation.

    The second selection holds `fraction` of the documents, at least one; of a large corpus, that fraction of randomly
    drawn shards.

    Raises:
        DataError: the corpus is a single document.
    """
    split = _Split(corpus, fraction, seed)
    return _Kept(corpus, split), _HeldOut(split)


class _Split:
    """The numbers of the documents that are held out."""

    def __init__(self, corpus: Corpus, fraction: float, seed: int) -> None:
        self.corpus = corpus
        self.fraction = fraction
        self.seed = seed
        self._order = np.random.default_rng([seed, len(corpus.sizes), 0, _HELD_OUT_SHARDS]).permutation(
            len(corpus.sizes)
        )
        self._first: int | None = None
        if len(self._order) == 1 and len(corpus.shard(0).lengths) < 2:
            raise DataError(
                "train.eval_steps is set, but the data is a single document, so none can be held out",
                hint="set data.eval_path, or data.sample_by: paragraph",
            )

    @property
    def shards(self) -> np.ndarray:
        return self._order[:_MOST_SHARDS]

    def of(self, number: int, count: int) -> np.ndarray:
        """Numbers of the documents held out of the `count` documents of a shard, ascending."""
        rng = np.random.default_rng([self.seed, len(self._order), number, _HELD_OUT_DOCUMENTS])
        # Randomized rounding keeps the expectation right, however few documents shards have.
        held_out = int(count * self.fraction + rng.random())
        if number == self.first:
            held_out = max(1, round(count * self.fraction))
        if len(self._order) == 1:
            held_out = min(held_out, count - 1)
        return np.sort(rng.permutation(count)[:held_out])

    @property
    def first(self) -> int:
        """The shard of which at least one document is held out: the first that has any."""
        if self._first is None:
            with_text = (int(n) for n in self.shards if len(self.corpus.shard(int(n)).lengths))
            self._first = next(with_text, int(self._order[0]))
        return self._first


class _HeldOut(Documents):
    def __init__(self, split: _Split) -> None:
        self.shards = split.shards
        self.identity = split.fraction
        self._split = split

    def of(self, number: int, shard: Shard) -> np.ndarray:
        return self._split.of(number, len(shard.lengths))


class _Kept(Documents):
    def __init__(self, corpus: Corpus, split: _Split) -> None:
        super().__init__(corpus)
        self.identity = split.fraction
        self._split = split
        self._touched = frozenset(split.shards.tolist())

    def of(self, number: int, shard: Shard) -> np.ndarray:
        every = np.arange(len(shard.lengths))
        return np.delete(every, self._split.of(number, len(every))) if number in self._touched else every
