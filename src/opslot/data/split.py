"""Documents held out for evaluation, chosen block by block, so that no choice waits for the whole corpus."""

from __future__ import annotations

import numpy as np

from opslot._base.errors import DataError
from opslot.data.packing import Block, Corpus, Documents

# An evaluation reads no more blocks than these: `fraction` of 256 MiB of text.
_MOST_BLOCKS = 64
# What is drawn; see the numbers in packing.py.
_HELD_OUT_BLOCKS, _HELD_OUT_DOCUMENTS = 4, 5


def split_documents(corpus: Corpus, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents for training and for evaluation.

    The second holds `fraction` of the documents, at least one; of a large corpus, that share of blocks drawn from all
    over it.

    Raises:
        DataError: a single document cannot be split.
    """
    split = _Split(corpus, fraction, seed)
    return _Kept(corpus, split), _HeldOut(corpus, split)


class _Split:
    """The numbers of documents that are held out."""

    def __init__(self, corpus: Corpus, fraction: float, seed: int) -> None:
        self.corpus = corpus
        self.fraction = fraction
        self.seed = seed
        self._order = np.random.default_rng([seed, len(corpus.sizes), 0, _HELD_OUT_BLOCKS]).permutation(
            len(corpus.sizes)
        )
        self._first: int | None = None
        if len(self._order) == 1 and len(corpus.block(0).lengths) < 2:
            raise DataError(
                "train.eval_steps is set, but there is one document alone, so none can be held out",
                hint="set data.eval_path, or data.sample_by: paragraph",
            )

    @property
    def blocks(self) -> np.ndarray:
        return self._order[:_MOST_BLOCKS]

    def of(self, number: int, count: int) -> np.ndarray:
        """Numbers of the documents held out of the `count` of a block, ascending."""
        rng = np.random.default_rng([self.seed, len(self._order), number, _HELD_OUT_DOCUMENTS])
        # Rounded up as often as it makes the expectation right, however few documents blocks have.
        held_out = int(count * self.fraction + rng.random())
        if number == self.first:
            held_out = max(1, round(count * self.fraction))
        if len(self._order) == 1:
            held_out = min(held_out, count - 1)
        return np.sort(rng.permutation(count)[:held_out])

    @property
    def first(self) -> int:
        """The block that gives at least one document: the first that has any."""
        if self._first is None:
            with_text = (int(n) for n in self.blocks if len(self.corpus.block(int(n)).lengths))
            self._first = next(with_text, int(self._order[0]))
        return self._first


class _HeldOut(Documents):
    def __init__(self, corpus: Corpus, split: _Split) -> None:
        self.blocks = split.blocks
        self.identity = split.fraction
        self._split = split

    def of(self, number: int, block: Block) -> np.ndarray:
        return self._split.of(number, len(block.lengths))


class _Kept(Documents):
    def __init__(self, corpus: Corpus, split: _Split) -> None:
        super().__init__(corpus)
        self.identity = split.fraction
        self._split = split
        self._touched = frozenset(split.blocks.tolist())

    def of(self, number: int, block: Block) -> np.ndarray:
        every = np.arange(len(block.lengths))
        return np.delete(every, self._split.of(number, len(every))) if number in self._touched else every
