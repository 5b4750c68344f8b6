"""Omni models on two processes: ranks with different modalities, experts and sequences."""

import pytest
import torch

from opslot.distributed import init_parallel_state
from opslot.models import build_foundation_model
from opslot.models.parallelize import parallelize
from tests.distributed.tiny import assert_gradients_close, gradients
from tests.omni import CONFIGS, inputs

KINDS = [(), ("audio",), ("image", "audio"), ("video",), ("audio", "audio")]


def build(name):
    torch.manual_seed(0)
    return build_foundation_model(CONFIGS[name]())


def step(model, batch):
    batch = {key: value for key, value in batch.items() if key != "attention_mask"}
    loss = model(**batch, num_items_in_batch=torch.tensor(20), use_cache=False).loss
    loss.backward()
    return loss


def on_ranks(name, first, sizes):
    state = init_parallel_state(device_type="cpu", **sizes)
    model = build(name)
    parallelize(model, state)
    step(model, inputs(name, KINDS[first + state.rank]))
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "first", "sizes"),
    [
        pytest.param("qwen2_5_omni", 0, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_omni_moe", 1, {}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", 2, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_omni_moe", 3, {}, marks=pytest.mark.slow),
        ("qwen3_omni_moe", 0, {"ep": 2}),
    ],
)
def test_ranks_with_different_modalities(ranks, name, first, sizes):
    model = build(name)
    for kinds in KINDS[first : first + 2]:
        step(model, inputs(name, kinds))
    expected = gradients(model)
    assert_gradients_close(ranks.run(on_ranks, name, first, sizes), expected)
