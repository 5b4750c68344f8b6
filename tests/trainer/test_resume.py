"""Runs that were stopped, killed or interrupted, and continued."""

import io
import json
import os
import shutil
import signal

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from opslot.trainer.callbacks.base import Callback
from opslot.trainer.checkpointing import find_checkpoints
from tests.trainer.runs import curve, trainer_of


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(train, settings, tmp_path):
    settings["train"] |= {"max_steps": 9, "checkpoint.save_steps": 3, "eval_steps": 4}
    assert train()[0] == 0
    straight = curve(tmp_path / "out")
    settings["train"]["output_dir"] = str(tmp_path / "again")
    settings["train"]["checkpoint.resume_from"] = "latest"

    class Kill(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 5:
                raise KeyboardInterrupt

    killed = trainer_of(settings, tmp_path)
    killed.callbacks.append(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert [record["step"] for record in curve(tmp_path / "again")] == [1, 2, 3, 4, 5]
    code, out, _ = train("--data.num_workers", "1")
    assert code == 0
    assert "step_00000003 (step 3)" in out
    assert curve(tmp_path / "again") == straight
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf").state_dict() for name in ("out", "again")
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("data", [{}, {"max_tokens_per_batch": 64}], ids=["samples", "tokens"])
def test_resumed_run_has_the_same_dropout(settings, tmp_path, model_folder, data):
    """Dropout uses torch's generator, so one random number more or less changes the losses."""
    model = tmp_path / "model"
    model.mkdir()
    for file in model_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    settings["model"] |= {"config_path": str(model), "ops_implementation": "eager"}
    settings["data"] |= {**data, "sample_by": "paragraph"}
    settings["train"] |= {"lr_scheduler": "constant"}

    def run(name, steps, **changes):
        settings["train"] |= {"output_dir": str(tmp_path / name), "max_steps": steps, **changes}
        trainer_of(settings, tmp_path).train()
        return curve(tmp_path / name)

    straight = run("straight", 4)
    assert run("halves", 2) == straight[:2]
    assert run("halves", 4, **{"checkpoint.resume_from": "latest"}) == straight


# Kills itself when a checkpoint file is written, or within the forward pass of a step, between saves. Uses as many
# threads as the run that it is compared with, so that sums are rounded equally.
KILLED = """
import os, signal, sys
import torch
from opslot.checkpoint import training_state
from opslot.trainer import TextTrainer, checkpointing, cli_train

file, step, threads = sys.argv[1:4]
torch.set_num_threads(int(threads))
write_json, split_loss = training_state.write_json, TextTrainer.split_loss

def write_or_kill(path, value):
    if path.name == file and path.parent.name.endswith(checkpointing.checkpoint_name(int(step))):
        os.kill(os.getpid(), signal.SIGKILL)
    write_json(path, value)

def split_or_kill(self, outputs):
    if file == "forward" and self.step + 1 == int(step):
        self.saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return split_loss(self, outputs)

training_state.write_json, TextTrainer.split_loss = write_or_kill, split_or_kill
sys.exit(cli_train(sys.argv[4:]))
"""


@pytest.mark.slow
def test_sigkill_during_a_save_and_a_step(forks, train, settings, tmp_path):
    settings["train"] |= {"max_steps": 8, "checkpoint.save_steps": 2, "checkpoint.save_total_limit": 2}
    assert train()[0] == 0
    straight = curve(tmp_path / "out")
    settings["train"] |= {"output_dir": str(tmp_path / "killed"), "checkpoint.resume_from": "latest"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    checkpoints = tmp_path / "killed" / "checkpoints"
    for moment, step, complete in [("trainer_state.json", 4, [2]), ("forward", 6, [2, 4])]:
        process = forks.start(script, moment, str(step), str(torch.get_num_threads()), str(tmp_path / "run.yaml"))
        _, err = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, err
        assert [path.name for path in find_checkpoints(checkpoints)] == [f"step_{n:08d}" for n in complete]
    code, out, err = train()
    assert code == 0, err
    assert "step_00000004 (step 4)" in out
    assert curve(tmp_path / "killed") == straight
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_run_with_a_checkpoint(settings, tmp_path, capsys, number):
    class Signal(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 2:
                os.kill(os.getpid(), number)

    previous = signal.getsignal(number)
    trainer = trainer_of(settings, tmp_path)
    trainer.callbacks.insert(0, Signal())
    result = trainer.train()
    assert (result.step, result.completed, result.signal) == (2, False, number)
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")] == ["step_00000002"]
    assert not (tmp_path / "out" / "hf").exists()
    assert f"{signal.Signals(number).name}: stopping after the current step" in capsys.readouterr().out
    assert signal.getsignal(number) is previous


class _Interrupted(io.RawIOBase):
    """A stream that gets a signal in the middle of a write when `armed`."""

    armed = False

    def writable(self):
        return True

    def write(self, data):
        if self.armed:
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_signal_during_a_write_to_the_console(settings, tmp_path):
    stream = _Interrupted()

    class Print(Callback):
        def on_step_end(self, trainer, record):
            stream.armed = record.step == 2
            trainer.print(f"step {record.step}")

    console = Console(file=io.TextIOWrapper(io.BufferedWriter(stream), line_buffering=True))
    trainer = trainer_of(settings, tmp_path, console=console)
    trainer.callbacks.insert(0, Print())
    assert (trainer.train().step, stream.armed) == (2, False)
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")] == ["step_00000002"]


def test_resume_latest_without_checkpoint_and_after_the_last_step(train, settings):
    settings["train"]["checkpoint.resume_from"] = "latest"
    code, out, _ = train()
    assert code == 0
    assert "; starting from step 1" in out
    code, out, _ = train()
    assert code == 0
    assert "step 4 was the last one; nothing left to train" in out
    assert "; 0 steps of" in train("--train.max_steps", "3")[1]


def test_checkpoints_of_another_run_are_not_overwritten(train, tmp_path):
    assert train()[0] == 0
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    code, _, err = train()
    assert code == 2
    assert "holds checkpoints of another run (newest step_00000004)" in err
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before


def test_resume_before_later_checkpoints_needs_another_folder(train, settings, tmp_path):
    settings["train"]["checkpoint.save_steps"] = 2
    assert train()[0] == 0
    middle = tmp_path / "out" / "checkpoints" / "step_00000002"
    code, _, err = train("--train.checkpoint.resume_from", str(middle))
    assert code == 2
    assert "step_00000004" in err
    code, _, _ = train("--train.checkpoint.resume_from", str(middle), "--train.output_dir", str(tmp_path / "branch"))
    assert code == 0
    assert curve(tmp_path / "branch") == curve(tmp_path / "out")[2:]


def test_resumed_run_uses_its_own_optimizer_settings(settings, tmp_path):
    settings["train"] |= {"max_steps": 2, "weight_decay": 0.0}
    trainer_of(settings, tmp_path).train()
    settings["train"] |= {
        "max_steps": 3,
        "weight_decay": 0.5,
        "optimizer": {"beta2": 0.9},
        "checkpoint.resume_from": "latest",
    }
    resumed = trainer_of(settings, tmp_path)
    groups = resumed.optimizer.param_groups
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.5, (0.9, 0.9)), (0.0, (0.9, 0.9))]
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {2}


def test_resume_with_changed_data_raises(train, settings, tmp_path):
    assert train()[0] == 0
    code, _, err = train(
        "--train.checkpoint.resume_from", "latest", "--data.max_seq_len", "64", "--train.max_steps", "6"
    )
    assert code == 2
    assert "data.max_seq_len: 32 -> 64" in err


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "trainer_state.json"])
def test_damaged_checkpoint_raises(train, tmp_path, damaged):
    assert train()[0] == 0
    file = tmp_path / "out" / "checkpoints" / "step_00000004" / damaged
    file.write_bytes(file.read_bytes()[:1000])
    code, _, err = train("--train.checkpoint.resume_from", "latest", "--train.max_steps", "6")
    assert code == 2
    assert "step_00000004 cannot be read\n  found: " in err
    assert "hint: move it away and resume from the one before" in err


@pytest.mark.parametrize("lost", [".metadata", "trainer_state.json"])
def test_incomplete_newest_checkpoint_is_not_skipped(train, settings, tmp_path, lost):
    settings["train"]["checkpoint.save_steps"] = 2
    assert train()[0] == 0
    checkpoints = tmp_path / "out" / "checkpoints"
    (checkpoints / "step_00000004" / lost).unlink()
    code, _, err = train("--train.checkpoint.resume_from", "latest", "--train.max_steps", "6")
    assert code == 2
    assert "step_00000004 is incomplete" in err
    assert "continue from step_00000002" in err
    shutil.rmtree(checkpoints / "step_00000002")
    assert "continue from the first step" in train("--train.checkpoint.resume_from", "latest")[2]
