"""Documents held out for evaluation, selected shard by shard, so that no selection needs the whole corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opslot._base.errors import DataError
from opslot.data.packing import Documents

if TYPE_CHECKING:
    from opslot.data.corpus import TokenCorpus, TokenShard

# An evaluation reads at most this many shards: `fraction` of 256 MiB of text.
_MOST_SHARDS = 64
# Last element of the seed of each random draw; see packing.py.
_HELD_OUT_SHARDS, _HELD_OUT_DOCUMENTS = 4, 5


def split_documents(corpus: TokenCorpus, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents for training and for evaluation.

    The second selection holds `fraction` of the documents, at least one; of a large corpus, that fraction of randomly
    drawn shards.

    Raises:
        DataError: the corpus is a single document.
    """
    split = _Split(corpus, fraction, seed)
    return _Part(split, held_out=False), _Part(split, held_out=True)


class _Split:
    """The numbers of the documents that are held out."""

    def __init__(self, corpus: TokenCorpus, fraction: float, seed: int) -> None:
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


class _Part(Documents):
    """The documents that are held out, or all others."""

    def __init__(self, split: _Split, held_out: bool) -> None:
        super().__init__(split.corpus)
        self.identity = split.fraction
        self._split, self._held_out = split, held_out
        self._touched = frozenset(split.shards.tolist())
        if held_out:
            self.shards = split.shards

    def of(self, number: int, shard: TokenShard) -> np.ndarray:
        every = super().of(number, shard)
        held_out = self._split.of(number, len(every)) if number in self._touched else every[:0]
        return held_out if self._held_out else np.delete(every, held_out)
