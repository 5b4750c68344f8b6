import random

import numpy as np
import pytest
import torch

from opslot._base.errors import CheckpointError
from opslot.trainer import checkpointing


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder, step, keep=None, seed=0):
    return checkpointing.save_checkpoint(folder, step, *trained(seed), {"data": 1}, {"rows": []}, keep=keep)


def test_tensors_and_optimizer_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained(0)
    folder = checkpointing.save_checkpoint(tmp_path, 3, model, optimizer, {"tokens_seen": 9}, {"rows": []})
    other, other_optimizer = trained(1)
    checkpointing.load_checkpoint(folder, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][name]), name
    assert other[2].weight is other[0].weight
    state, kernels = checkpointing.read_state(folder)
    assert (state["step"], state["tokens_seen"], kernels) == (3, 9, {"rows": []})


def test_the_newest_are_kept_and_leftovers_are_swept(tmp_path):
    (tmp_path / ".unfinished-step_00000001").mkdir()
    (tmp_path / "step_00000009").mkdir()
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpointing.find_checkpoints(tmp_path)] == ["step_00000003", "step_00000010"]
    assert not list(tmp_path.glob(".*"))


def test_a_save_that_fails_leaves_the_earlier_ones(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing, "write_json", full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written .*No space left"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, seed=0)
    save(tmp_path, 1, seed=1)
    model, optimizer = trained(0)
    checkpointing.load_checkpoint(tmp_path / "step_00000001", model, optimizer)
    assert torch.equal(model[1].weight, trained(1)[0][1].weight)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    folder = save(tmp_path, 1)
    model = torch.nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpointing.load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def test_random_generators_go_on_where_they_were():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()  # noqa: NPY002

    draw()
    states = checkpointing.random_states()
    first = draw()
    draw()
    checkpointing.restore_random_states(states)
    assert draw() == first
