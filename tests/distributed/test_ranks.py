"""The processes that run functions of the tests as ranks."""

import multiprocessing
import os
from multiprocessing import resource_sharer

import torch


def doubled(tensor):
    return 2 * tensor


def test_ranks_take_and_return_tensors(ranks, forks, monkeypatch):
    # Workers of pytest-xdist and ranks share a key, since both are forks of one process; other test processes do not.
    monkeypatch.setattr(multiprocessing.current_process(), "authkey", os.urandom(32))
    # The resource sharer keeps the key of the first tensor that was sent.
    monkeypatch.setattr("multiprocessing.resource_sharer._resource_sharer", resource_sharer._ResourceSharer())
    others = type(ranks)(forks)
    try:
        found = others.run(doubled, torch.arange(3), world=1)
    finally:
        others.close()
    assert found[0].tolist() == [0, 2, 4]
