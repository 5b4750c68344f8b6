"""Offloading and reloading a model and its optimizer between steps changes nothing."""

import pytest
import torch
from torch import nn

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import init_parallel_state, shard_model


class Layer(nn.Linear):
    pass


def losses(device, moved):
    state = init_parallel_state(device_type=device) if torch.distributed.is_initialized() else None
    torch.manual_seed(0)
    model = nn.Sequential(Layer(8, 8), nn.LayerNorm(8), Layer(8, 1)).to(device)
    if state is not None:
        shard_model(model, state, layers=["Layer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if moved:
            kept = list(model.parameters())
            opslot.offload(model, optimizer)
            opslot.offload(model, optimizer)
            assert all(p.device.type == "cpu" for p in model.parameters())
            assert all(
                value.device.type == "cpu"
                for held in optimizer.state.values()
                for value in held.values()
                if isinstance(value, torch.Tensor)
            )
            opslot.reload(model, optimizer)
            assert all(p.device.type == device for p in model.parameters())
            assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    return found


def test_steps_continue_after_reload():
    assert losses("cpu", True) == losses("cpu", False)


@pytest.mark.gpu
def test_steps_continue_after_reload_on_a_gpu():
    assert losses("cuda", True) == losses("cuda", False)


def sharded(moved):
    init_parallel_state(device_type="cpu")
    return losses("cpu", moved)


def test_sharded_steps_continue_after_reload(ranks):
    assert ranks.run(sharded, True) == ranks.run(sharded, False)


def test_reload_without_offload_raises():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="the model is not offloaded"):
        opslot.reload(model)
    opslot.offload(model)
    with pytest.raises(ConfigError, match="the optimizer is not offloaded"):
        opslot.reload(model, optimizer)
    opslot.reload(model)
