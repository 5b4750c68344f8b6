import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading

import numpy as np
import pytest
import torch

from opslot._base.errors import CheckpointError
from opslot.checkpoint import training_state
from opslot.checkpoint.training_state import load_snapshot
from opslot.trainer import checkpointing
from opslot.trainer.config import CheckpointConfig, TrainConfig
from opslot.trainer.output_folder import check_output
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
    return CheckpointSaver(folder, keep=keep, background=False).save(snapshot(step, *trained(seed)))


def snapshot(step, model, optimizer):
    state = {"tokens_seen": 9, "data": {}, "random": [random_states()]}
    return training_state.take_snapshot(step, model, optimizer, state, {"rows": []})


def test_tensors_and_optimizer_round_trip_bit_for_bit(tmp_path):
    model, optimizer = trained(0)
    folder = CheckpointSaver(tmp_path, background=False).save(snapshot(3, model, optimizer))
    other, other_optimizer = trained(1)
    load_snapshot(folder, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][name]), name
    assert other[2].weight is other[0].weight
    state, kernels = training_state.read_state(folder)
    assert (state["step"], state["tokens_seen"], kernels) == (3, 9, {"rows": []})


def test_parameter_without_a_gradient_so_far(tmp_path):
    """An encoder before its first sample: its optimizer state begins when it gets a gradient."""

    def build():
        model = torch.nn.ModuleDict({"text": torch.nn.Linear(2, 2), "vision": torch.nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    model["text"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = CheckpointSaver(tmp_path, background=False).save(snapshot(1, model, optimizer))
    other, other_optimizer = build()
    load_snapshot(folder, other, other_optimizer)
    assert other_optimizer.state.keys() == {*other["text"].parameters()}
    for own, own_optimizer in ((model, optimizer), (other, other_optimizer)):
        own["vision"](torch.ones(1, 2)).sum().backward()
        own_optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_newest_checkpoints_are_kept_and_leftovers_removed(tmp_path):
    (tmp_path / ".unfinished-step_00000001").mkdir()
    (tmp_path / "step_00000009").mkdir()
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpointing.find_checkpoints(tmp_path)] == ["step_00000003", "step_00000010"]
    assert not list(tmp_path.glob(".*"))


def test_failed_save_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_state, "write_json", full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written .*\n  found: .*No space left"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_full_disk_within_a_file_is_named(tmp_path):
    """torch's zip writer raised "unexpected pos 704 vs 598" while it handled the error of the disk."""
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 60) for _ in range(20)))
    large = snapshot(1, model, torch.optim.AdamW(model.parameters()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(CheckpointError, match=r"step 1 cannot be written .*\n  found: .*File too large"):
            CheckpointSaver(tmp_path, background=False).save(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, seed=0)
    save(tmp_path, 1, seed=1)
    model, optimizer = trained(0)
    load_snapshot(tmp_path / "step_00000001", model, optimizer)
    assert torch.equal(model[1].weight, trained(1)[0][1].weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(3, 3), "- 0.weight: only in the checkpoint"),
        (
            torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.Linear(4, 5, bias=False)),
            r"- 1.bias: \[4\] in the checkpoint, \[6\] in this model",
        ),
        (
            torch.nn.ModuleDict({"q": torch.nn.ModuleDict({"lora_A": torch.nn.Linear(4, 2)})}),
            "  hint: its run had no section lora: remove lora.r, or another train.output_dir",
        ),
    ],
)
def test_checkpoint_of_another_model_raises(tmp_path, model, message):
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"is of another model:\n(.*\n)*{message}"):
        load_snapshot(folder, model, torch.optim.AdamW(model.parameters()))


def remove_file(folder, _other):
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
    (folder / training_state.STATE_FILE).write_text("{}")


def another_step(folder, _other):
    state = json.loads((folder / training_state.STATE_FILE).read_text())
    state["step"] += 1
    (folder / training_state.STATE_FILE).write_text(json.dumps(state))


def listing(folder, _other):
    (folder / training_state.STATE_FILE).write_text("[]")


def other_kernels(folder, _other):
    (folder / training_state.KERNELS_FILE).write_text('{"kernels": []}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (another_step, "trainer_state.json is not the file that was written"),
        (listing, "trainer_state.json is not the file that was written"),
        (other_kernels, r"kernels.json has 15 bytes, but \d+ were written"),
        (remove_file, "__0_0.distcp is missing"),
        (truncate, r"__0_0.distcp has 1,000 bytes, but [\d,]+ were written"),
        (flip, "__0_0.distcp is not the file that was written"),
        (mix, "__0_0.distcp is not the file that was written"),
        (empty, "trainer_state.json without step, random, files, crc32"),
    ],
)
def test_damaged_checkpoint_raises_before_loading(tmp_path, damage, message):
    folder, other = save(tmp_path, 2), save(tmp_path, 1, seed=1)
    damage(folder, other)
    model, optimizer = trained(3)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=rf"step_00000002 cannot be read(.*\n)*.*{message}"):
        load_snapshot(folder, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def with_state_entries(folder, **entries):
    """Record the current files of a checkpoint as complete, with changed `entries` of the state."""
    state = json.loads((folder / training_state.STATE_FILE).read_text())
    files = {name: training_state._facts(folder / name) for name in state["files"]}
    state = {name: value for name, value in {**state, "files": files, **entries}.items() if name != "crc32"}
    state["crc32"] = training_state._checksum_of(state)
    (folder / training_state.STATE_FILE).write_text(json.dumps(state))


@pytest.mark.parametrize("wrapped", [False, True])
def test_code_in_the_metadata_is_not_run(tmp_path, wrapped):
    """Pickled alone, or within otherwise valid metadata."""
    folder = save(tmp_path, 1)
    planted = Planted(tmp_path / "ran")
    if wrapped:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = planted
        planted = metadata
    (folder / ".metadata").write_bytes(pickle.dumps(planted))
    with_state_entries(folder)
    with pytest.raises(CheckpointError, match=r"refers to code .*\n  found: (posix|nt).system\n  hint: "):
        load_snapshot(folder, *trained(0))
    assert not (tmp_path / "ran").exists()


def test_metadata_with_a_path_outside_the_checkpoint_raises(tmp_path):
    folder = save(tmp_path, 1)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with_state_entries(folder)
    with pytest.raises(CheckpointError, match=r"files outside of the checkpoint\n  found: \.\./secret"):
        load_snapshot(folder, *trained(0))


def test_code_in_a_value_is_not_run(tmp_path):
    """The optimizer's state may have values other than tensors, which are pickled."""
    model, optimizer = trained(0)
    next(iter(optimizer.state.values()))["step"] = Planted(tmp_path / "ran")
    folder = CheckpointSaver(tmp_path, background=False).save(snapshot(1, model, optimizer))
    with pytest.raises(CheckpointError, match=r"optimizer\.state\..*\.step is not plain data"):
        load_snapshot(folder, *trained(0))
    assert not (tmp_path / "ran").exists()


def test_settings_of_the_optimizer_are_not_read(tmp_path):
    model, optimizer = trained(0)
    optimizer.param_groups[0]["lr"] = Planted(tmp_path / "ran")
    folder = CheckpointSaver(tmp_path, background=False).save(snapshot(1, model, optimizer))
    load_snapshot(folder, *trained(0))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps([1, 2]), pickle.dumps(torch.Size([1]))])
def test_metadata_of_another_object_raises(tmp_path, data):
    folder = save(tmp_path, 1)
    (folder / ".metadata").write_bytes(data)
    with_state_entries(folder)
    with pytest.raises(CheckpointError, match="is not the metadata of a checkpoint"):
        load_snapshot(folder, *trained(0))


@pytest.mark.parametrize(
    "entries",
    [
        {"step": "1"},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"random": "x"},
        {"random": [1]},
        {"files": [1]},
        {"files": {"../secret": {"bytes": 1, "crc32": "x"}}},
        {"files": {"kernels.json": 7}},
        {"files": {}},
        {"tokens_seen": "many"},
        {"tokens_seen": None},
        {"data": None},
        {"data": [1]},
    ],
)
def test_forged_state_raises(tmp_path, entries):
    folder = save(tmp_path, 1)
    with_state_entries(folder, **entries)
    with pytest.raises(CheckpointError, match=r"step_00000001 cannot be read\n  found: "):
        training_state.read_state(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "\xff", '{"step": 1e999}'])
def test_state_that_is_not_json_raises(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / training_state.STATE_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="step_00000001 cannot be read"):
        training_state.read_state(folder)


@pytest.mark.parametrize("name", [training_state.STATE_FILE, training_state.KERNELS_FILE, "__0_0.distcp", ".metadata"])
def test_folder_instead_of_a_file_raises(tmp_path, name):
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(CheckpointError, match="step_00000001 cannot be read"):
        load_snapshot(folder, *trained(0))


@pytest.mark.parametrize(
    "states",
    [{}, {"python": 1, "numpy": 2, "torch": 3}, {"python": [3, [1], None], "numpy": [], "torch": "zz"}],
)
def test_forged_random_states_raise(states):
    with pytest.raises(CheckpointError, match="random states"):
        restore_random_states(states)


def test_rotation_leaves_copies_under_other_names(tmp_path):
    save(tmp_path, 1)
    for name in ("step_00000001_best", "step_9", "step_000000009", "best"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    for step in (2, 3):
        save(tmp_path, step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "step_000000009",
        "step_00000001_best",
        "step_00000003",
        "step_9",
    ]
    assert [path.name for path in checkpointing.find_checkpoints(tmp_path)] == ["step_00000003"]


def test_checkpoints_are_sorted_by_step_number(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    found = [path.name for path in checkpointing.find_checkpoints(tmp_path)]
    assert found == ["step_99999999", "step_100000000"]


def test_checkpoint_under_another_name_is_complete_and_loaded(tmp_path):
    folder = save(tmp_path, 1).rename(tmp_path / "best")
    assert training_state.is_complete(folder)
    model, optimizer = trained(3)
    load_snapshot(folder, model, optimizer)
    assert torch.equal(model[1].weight, trained(0)[0][1].weight)
    save(tmp_path, 2)
    assert [path.name for path in checkpointing.newer_checkpoints(folder)] == ["step_00000002"]


@pytest.fixture
def paused_save(monkeypatch):
    """Saves wait for the event before they complete."""
    go_on, finish = threading.Event(), training_state._finish

    def wait_and_finish(*arguments):
        assert go_on.wait(30)
        finish(*arguments)

    monkeypatch.setattr(training_state, "_finish", wait_and_finish)
    yield go_on
    go_on.set()


def test_background_save_is_named_when_complete(tmp_path, paused_save):
    model, optimizer = trained(0)
    saved = [parameter.clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    saver = CheckpointSaver(tmp_path)
    folder = saver.save(snapshot(1, model, optimizer))
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(saved[0], next(model.parameters()))
    assert checkpointing.find_checkpoints(tmp_path) == []
    paused_save.set()
    saver.wait()
    assert checkpointing.find_checkpoints(tmp_path) == [folder]
    other, other_optimizer = trained(1)
    load_snapshot(folder, other, other_optimizer)
    assert all(map(torch.equal, saved, other.parameters()))
    assert all(torch.equal(m, other_optimizer.state[p]["exp_avg"]) for m, p in zip(moments, other.parameters()))


def test_save_waits_for_the_previous_one(tmp_path, paused_save):
    saver = CheckpointSaver(tmp_path, keep=2)
    threading.Timer(0.2, paused_save.set).start()
    for step in (1, 2, 3):
        saver.save(snapshot(step, *trained(step)))
        assert len(checkpointing.find_checkpoints(tmp_path)) == min(step - 1, 2)
    saver.wait()
    assert [path.name for path in checkpointing.find_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_background_saves_have_their_own_state(tmp_path, device):
    """On a GPU each save is staged in the memory of the previous one."""
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
        load_snapshot(folder, other, other_optimizer)
        assert all(map(torch.equal, parameters, other.parameters())), folder
    saver.close()


def test_background_error_is_raised_by_the_next_call(tmp_path, monkeypatch):
    saver = CheckpointSaver(tmp_path)
    saver.save(snapshot(1, *trained(0)))
    saver.wait()
    assert not saver.failed

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_state, "_finish", full)
    saver.save(snapshot(2, *trained(0)))
    saver._thread.join()
    assert saver.failed
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written .*\n  found: .*No space left"):
        saver.save(snapshot(3, *trained(0)))
    assert not saver.failed
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_hanging_save_is_abandoned(tmp_path, paused_save, caplog):
    saver = CheckpointSaver(tmp_path)
    saver.save(snapshot(1, *trained(0)))
    saver.close(seconds=0.1)
    assert "was abandoned; the previous one is intact" in caplog.text
    assert checkpointing.find_checkpoints(tmp_path) == []


def test_random_states_round_trip():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()  # noqa: NPY002

    draw()
    states = random_states()
    first = draw()
    draw()
    restore_random_states(states)
    assert draw() == first


def test_resume_from_a_checkpoint_under_another_name(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 3).rename(checkpoints / "step_00000003_best")
    problems = []
    resume = CheckpointConfig(resume_from=str(checkpoints / "step_00000003_best"))
    config = TrainConfig(output_dir=str(tmp_path), checkpoint=resume)
    assert check_output(config, problems) == checkpoints / "step_00000003_best"
    assert problems == []
    save(checkpoints, 5)
    check_output(config, problems)
    assert "has other checkpoints (step_00000005)" in problems[0]
