"""A corpus in memory."""

import numpy as np


class Corpus:
    """Documents of given lengths, in one shard; each token is the number of its document."""

    sizes = np.array([1])

    def __init__(self, lengths):
        self.identity = {"data.train_path": "in memory"}
        self.lengths = np.array(lengths, dtype=np.int64)

    def prepare(self, numbers):
        pass

    def shard(self, number):
        return self

    def tokens(self, document, start=0, stop=None):
        return np.full(int(self.lengths[document]), document, dtype=np.int32)[start:stop]

    def extra(self, document):
        return None

    def cost(self, document):
        return 0.0
