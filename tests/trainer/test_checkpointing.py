import json
import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch

from opslot._base.errors import CheckpointError
from opslot.trainer import checkpointing
from opslot.trainer.random_states import random_states, restore_random_states
from opslot.trainer.saver import CheckpointSaver

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(3, 3), "- 0.weight: only in the checkpoint"),
        (
            torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.Linear(4, 5, bias=False)),
            r"- 1.bias: \[4\] in the checkpoint, \[6\] in this model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(tmp_path, model, message):
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"is of another model:\n(.*\n)*{message}"):
        checkpointing.load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def lose(folder, _other):
    (folder / "__0_0.distcp").unlink()


def truncate(folder, _other):
    os.truncate(folder / "__0_0.distcp", 1000)


def flip(folder, _other):
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def mix(folder, other):
    shutil.copy(other / "__0_0.distcp", folder)


def empty(folder, _other):
    (folder / checkpointing.STATE_FILE).write_text("{}")


def another_step(folder, _other):
    state = json.loads((folder / checkpointing.STATE_FILE).read_text())
    state["step"] += 1
    (folder / checkpointing.STATE_FILE).write_text(json.dumps(state))


def listing(folder, _other):
    (folder / checkpointing.STATE_FILE).write_text("[]")


def other_kernels(folder, _other):
    (folder / checkpointing.KERNELS_FILE).write_text('{"kernels": []}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (another_step, "trainer_state.json is not the file that was written"),
        (listing, "trainer_state.json is not the file that was written"),
        (other_kernels, r"kernels.json has 15 bytes, but \d+ were written"),
        (lose, "__0_0.distcp is missing"),
        (truncate, r"__0_0.distcp has 1,000 bytes, but [\d,]+ were written"),
        (flip, "__0_0.distcp is not the file that was written"),
        (mix, "__0_0.distcp is not the file that was written"),
        (empty, "trainer_state.json without step, random"),
    ],
)
def test_damage_is_told_before_anything_is_loaded(tmp_path, damage, message):
    folder, other = save(tmp_path, 2), save(tmp_path, 1, seed=1)
    damage(folder, other)
    model, optimizer = trained(3)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=rf"step_00000002 cannot be read; (.*\n)*.*{message}"):
        checkpointing.load_checkpoint(folder, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.fixture
def held_back(monkeypatch):
    """Saves stop before they are complete, until the event is set."""
    go_on, finish = threading.Event(), checkpointing._finish

    def wait_and_finish(*arguments):
        assert go_on.wait(30)
        finish(*arguments)

    monkeypatch.setattr(checkpointing, "_finish", wait_and_finish)
    yield go_on
    go_on.set()


def snapshot(step, model, optimizer):
    return checkpointing.take_snapshot(step, model, optimizer, {}, {})


def test_in_the_background_the_moment_is_saved_and_named_when_complete(tmp_path, held_back):
    model, optimizer = trained(0)
    saved = [parameter.clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    saver = CheckpointSaver(tmp_path)
    folder = saver.save(snapshot(1, model, optimizer))
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(saved[0], next(model.parameters()))
    assert checkpointing.find_checkpoints(tmp_path) == []
    held_back.set()
    saver.wait()
    assert checkpointing.find_checkpoints(tmp_path) == [folder]
    other, other_optimizer = trained(1)
    checkpointing.load_checkpoint(folder, other, other_optimizer)
    assert all(map(torch.equal, saved, other.parameters()))
    assert all(torch.equal(m, other_optimizer.state[p]["exp_avg"]) for m, p in zip(moments, other.parameters()))


def test_a_save_waits_for_the_one_before(tmp_path, held_back):
    saver = CheckpointSaver(tmp_path, keep=2)
    threading.Timer(0.2, held_back.set).start()
    for step in (1, 2, 3):
        saver.save(snapshot(step, *trained(step)))
        assert len(checkpointing.find_checkpoints(tmp_path)) == min(step - 1, 2)
    saver.wait()
    assert [path.name for path in checkpointing.find_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_every_save_in_the_background_holds_its_own_moment(tmp_path, device):
    """On a GPU each save is staged in the memory of the one before."""
    model, optimizer = trained(0)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saver, saved = CheckpointSaver(tmp_path), {}
    for step in (1, 2, 3):
        model(torch.arange(5, device=device)).square().sum().backward()
        optimizer.step()
        saved[saver.save(snapshot(step, model, optimizer))] = [p.detach().cpu().clone() for p in model.parameters()]
    saver.wait()
    for folder, parameters in saved.items():
        other, other_optimizer = trained(1)
        checkpointing.load_checkpoint(folder, other, other_optimizer)
        assert all(map(torch.equal, parameters, other.parameters())), folder
    saver.close()


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    saver = CheckpointSaver(tmp_path)
    saver.save(snapshot(1, *trained(0)))
    saver.wait()
    assert not saver.failed

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing, "_finish", full)
    saver.save(snapshot(2, *trained(0)))
    saver._thread.join()
    assert saver.failed
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written .*No space left"):
        saver.save(snapshot(3, *trained(0)))
    assert not saver.failed
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_save_that_hangs_is_given_up(tmp_path, held_back, caplog):
    saver = CheckpointSaver(tmp_path)
    saver.save(snapshot(1, *trained(0)))
    saver.close(seconds=0.1)
    assert "is given up; the one before is intact" in caplog.text
    assert checkpointing.find_checkpoints(tmp_path) == []


def test_random_generators_go_on_where_they_were():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()  # noqa: NPY002

    draw()
    states = random_states()
    first = draw()
    draw()
    restore_random_states(states)
    assert draw() == first
