"""All parameters on each rank (DDP): the same numbers as one process, without FSDP2."""

import pytest
import torch

from tests.distributed import tiny

BF16 = torch.bfloat16
DDP = {"data_parallel_mode": "ddp"}


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, **kwargs)


def check(ranks, name="qwen3", sizes=None, options=None, **kwargs):
    expected = torch.tensor(tiny.train(name, **kwargs))
    assert expected[0, 1] > 1e-2
    for found in ranks.run(on_ranks, name, sizes or {}, {**kwargs, "options": DDP | (options or {})}):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_equals_one_process(ranks, micro_batches):
    check(ranks, micro_batches=micro_batches)
