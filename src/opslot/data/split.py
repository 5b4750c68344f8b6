"""Documents held out for evaluation, selected shard by shard, so that no selection needs the whole corpus."""

from __future__ import annotations

import functools
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
    if len(corpus.sizes) == 1 and len(corpus.shard(0).lengths) < 2:
        raise DataError(
            "train.eval_steps is set, but the data is a single document, so none can be held out",
            hint="set data.eval_path, or data.sample_by: paragraph",
        )
    return _Part(corpus, fraction, seed, held_out=False), _Part(corpus, fraction, seed, held_out=True)


class _Part(Documents):
    """The documents that are held out, or all others."""

    def __init__(self, corpus: TokenCorpus, fraction: float, seed: int, *, held_out: bool) -> None:
        super().__init__(corpus)
        self.identity = fraction
        self._corpus, self._seed, self._held_out = corpus, seed, held_out
        count = len(corpus.sizes)
        order = np.random.default_rng([seed, count, 0, _HELD_OUT_SHARDS]).permutation(count)
        self._split_shards = order[:_MOST_SHARDS].tolist()
        if held_out:
            self.shards = order[:_MOST_SHARDS]

    def of(self, number: int, shard: TokenShard) -> np.ndarray:
        every = super().of(number, shard)
        held_out = self._held_out_of(number, len(every)) if number in self._split_shards else every[:0]
        return held_out if self._held_out else np.delete(every, held_out)

    def _held_out_of(self, number: int, count: int) -> np.ndarray:
        """Numbers of the documents held out of the `count` documents of a shard, ascending."""
        shards = len(self._corpus.sizes)
        rng = np.random.default_rng([self._seed, shards, number, _HELD_OUT_DOCUMENTS])
        # Randomized rounding keeps the expectation right, however few documents shards have.
        held_out = int(count * self.identity + rng.random())
        if number == self._first:
            held_out = max(1, round(count * self.identity))
        if shards == 1:
            held_out = min(held_out, count - 1)
        return np.sort(rng.permutation(count)[:held_out])

    @functools.cached_property
    def _first(self) -> int:
        """The shard of which at least one document is held out: the first that has any."""
        with_text = (number for number in self._split_shards if len(self._corpus.shard(number).lengths))
        return next(with_text, self._split_shards[0])
