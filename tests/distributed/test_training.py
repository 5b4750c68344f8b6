"""Five steps on two ranks against one process: losses and gradient norms, for every architecture and axis."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("opslot_test_tiny", Path(__file__).with_name("tiny.py"))
tiny = sys.modules.setdefault("opslot_test_tiny", importlib.util.module_from_spec(_spec))
if not hasattr(tiny, "train"):
    _spec.loader.exec_module(tiny)

DENSE = ["llama", "qwen2", "qwen3", "seed_oss"]
SIZES = {"fsdp": {}, "sp": {"sp": 2}, "ep": {"ep": 2}, "sp and ep": {"sp": 2, "ep": 2}, "hsdp": {"dp_replicate": 2}}


def train(*args, **kwargs):
    return tiny.train(*args, **kwargs)


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, **kwargs)


def check(ranks, name, sizes, **kwargs):
    here = {k: v for k, v in kwargs.items() if k != "options"}
    expected = torch.tensor(train(name, **here))
    assert expected[0, 1] > 1e-2
    for found in ranks.run(on_ranks, name, sizes, kwargs):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("axis", ["fsdp", "sp"])
def test_dense(ranks, name, axis):
    check(ranks, name, SIZES[axis], micro_batches=2)


@pytest.mark.parametrize("axis", list(SIZES))
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_experts(ranks, axis, ops):
    check(ranks, "qwen3_moe", SIZES[axis], micro_batches=2, ops=ops, aux_loss=ops == "eager")
