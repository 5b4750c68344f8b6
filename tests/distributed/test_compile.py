"""`parallelize(compile=True)`: steps with compiled layers equal steps without, on one process and on two."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.distributed import tiny

SIZES = {"fsdp": {}, "sp": {"sp": 2}, "ep": {"ep": 2}}


def train_compiled(name, sizes, options):
    """Losses and gradient norms, and how many graphs Dynamo made; inductor would compile C++ for a minute."""
    original = nn.Module.compile
    nn.Module.compile = functools.partialmethod(original, backend="aot_eager")
    counters.clear()
    try:
        options = {"compile": True, **options}
        history = tiny.train(name, sizes, steps=2, micro_batches=2, options=options)
        return history, counters["stats"]["unique_graphs"]
    finally:
        nn.Module.compile = original
        torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_compiled_layers_on_one_process(checkpointing):
    expected = torch.tensor(tiny.train("qwen3", steps=2, micro_batches=2))
    found, graphs = train_compiled("qwen3", None, {"activation_checkpointing": checkpointing})
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)
    assert graphs == 1  # of two layers


@pytest.mark.slow
@pytest.mark.parametrize("axis", SIZES)
def test_compiled_layers_on_two_processes(ranks, axis):
    name = "qwen3_moe" if axis == "ep" else "qwen3"
    expected = torch.tensor(tiny.train(name, steps=2, micro_batches=2))
    for found, graphs in ranks.run(train_compiled, name, SIZES[axis], {}, world=2):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)
        assert graphs > 0
