"""Expert parallelism of LongCat, some of whose experts return their input and have no weights."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import opslot
from opslot.checkpoint import load_weights, save_weights
from opslot.checkpoint.initialize import initialize_weights
from opslot.checkpoint.training_state import load_snapshot, take_snapshot, write_snapshot
from opslot.distributed import get_parallel_state, init_parallel_state, shard_sequence, sum_over_ranks
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def build(is_parallel, load=None):
    """The model; with `load`, which fills it, from meta."""
    model = random_model(tiny_config("longcat_flash"))
    opslot.apply(model, "auto")
    if load is not None:
        model = model.to("meta")
    if is_parallel:
        opslot.parallelize(model, init_parallel_state(device_type="cpu", ep=2), load=load)
    elif load is not None:
        load(model)
    return model


def train(is_parallel, steps, save=None, load=None):
    """The losses of the steps after a checkpoint, if one is loaded."""
    model = build(is_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    if load is not None:
        load_snapshot(Path(load), model, optimizer)
        start = 2
    ids = random_ids(model.config)
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(ids.numel())}
    losses = []
    for _ in range(start, steps):
        row = slice(get_parallel_state().dp_rank, None, get_parallel_state().dp_size)
        own = {name: value[row] if value.dim() else value for name, value in batch.items()}
        loss = model(**shard_sequence(own), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(loss.item())[0])
    if save is not None:
        state = {"tokens_seen": 0, "data": {}, "random": []}
        write_snapshot(Path(save), take_snapshot(2, model, optimizer, state, {}))
    return losses


def run(ranks, is_parallel, *arguments):
    return ranks.run(train, True, *arguments)[0] if is_parallel else train(False, *arguments)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_resume_with_and_without_expert_parallelism(ranks, tmp_path, before, after):
    folder = str(tmp_path / "2")
    losses = run(ranks, before, 2, folder)
    losses += run(ranks, after, 4, None, folder)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(False, 4)), rtol=1e-5, atol=0)


def save_from_ranks(folder):
    model = build(is_parallel=True)
    save_weights(model, folder)
    weights = dict(model.named_parameters())
    held = [weights[name] for name in (GATE_UP, GATE_UP.replace("gate_up", "down"))]
    assert all(isinstance(weight, DTensor) for weight in held)
    return [len(weight.to_local()) for weight in held]


def load_on_ranks(folder):
    model = build(is_parallel=True, load=lambda model: load_weights(model, folder))
    return model.get_parameter(GATE_UP).full_tensor().tolist()


def test_checkpoints_have_the_experts_that_nothing_reads(ranks, tmp_path):
    """They are zeros, which Transformers needs; the others are saved and loaded unchanged."""
    assert ranks.run(save_from_ranks, str(tmp_path)) == [[2, 2]] * 2
    wanted = random_model(tiny_config("longcat_flash"))
    experts = wanted.config.n_routed_experts
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for name, weight in wanted.named_parameters():
        read = slice(experts if name.endswith("gate_up_proj") else None)
        assert torch.equal(found.get_parameter(name)[read], weight[read]), name
    assert not found.get_parameter(GATE_UP)[experts:].any()
    for values in ranks.run(load_on_ranks, str(tmp_path)):
        assert torch.equal(torch.tensor(values), wanted.get_parameter(GATE_UP)[:experts])


def test_initial_weights_do_not_depend_on_expert_parallelism(ranks):
    alone = build(is_parallel=False, load=initialize)
    for values in ranks.run(initialize_on_ranks):
        assert torch.equal(torch.tensor(values), alone.get_parameter(GATE_UP)[:4])


def initialize(model):
    initialize_weights(model, seed=3)


def initialize_on_ranks():
    model = build(is_parallel=True, load=initialize)
    return model.get_parameter(GATE_UP).full_tensor().tolist()
