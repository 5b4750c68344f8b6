"""Only one run writes to an output folder at a time, and files of users are kept."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from opslot._base.errors import ConfigError
from opslot.trainer import TextTrainer, load_config
from opslot.trainer.callbacks.base import Callback
from opslot.trainer.callbacks.writers import ExportCallback, read_metrics
from opslot.trainer.exports import place_export
from opslot.trainer.output_lock import LOCK_FILE, OutputLock


def hold(folder, ready):
    OutputLock(folder).acquire()
    ready.set()
    signal.pause()


@pytest.fixture
def other_run(tmp_path):
    """A process that holds the lock of `out`."""
    (tmp_path / "out").mkdir()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "out", ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_second_run_raises_and_writes_nothing(train, tmp_path, other_run):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    code, _, err = train()
    assert code == 2
    assert f"another run writes to train.output_dir={tmp_path / 'out'}" in err
    assert f"found: pid {other_run.pid} on " in err
    assert "set another train.output_dir" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_run_that_starts_later_raises_at_its_first_write(settings, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    trainer = TextTrainer(load_config([str(file), "--train.logging.progress", "off"]))
    (tmp_path / "out").mkdir()
    first = OutputLock(tmp_path / "out")
    first.acquire()
    with pytest.raises(ConfigError, match="another run writes to"):
        trainer.train()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]
    first.release()
    assert trainer.train().completed


def test_lock_of_a_killed_run_is_free(train, tmp_path, other_run):
    other_run.kill()
    other_run.join()
    assert (tmp_path / "out" / LOCK_FILE).is_file()
    assert train()[0] == 0
    assert not (tmp_path / "out" / LOCK_FILE).exists()


def test_file_system_without_locks_warns(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with caplog.at_level("WARNING", logger="opslot"):
        OutputLock(tmp_path).acquire()
    assert "cannot be locked (Operation not supported)" in caplog.text


def test_temporary_files_of_a_killed_run_are_removed(train, tmp_path):
    (tmp_path / "out").mkdir()
    leftover = tmp_path / "out" / f".{'0a' * 16}.loss.png"
    leftover.write_bytes(b"")
    (tmp_path / "out" / ".mine").write_text("")
    assert train()[0] == 0
    assert not leftover.exists()
    assert (tmp_path / "out" / ".mine").exists()


def test_files_of_the_user_in_the_export_are_kept(train, tmp_path):
    assert train()[0] == 0
    hf = tmp_path / "out" / "hf"
    (hf / "README.md").write_text("notes")
    stamp = (hf / "model.safetensors").stat().st_mtime_ns
    assert train("--train.checkpoint.resume_from", "latest")[0] == 0
    assert (hf / "README.md").read_text() == "notes"
    assert (hf / "model.safetensors").stat().st_mtime_ns == stamp
    assert train("--train.checkpoint.resume_from", "latest", "--train.max_steps", "5")[0] == 0
    assert (hf / "README.md").read_text() == "notes"
    assert (hf / "model.safetensors").stat().st_mtime_ns != stamp


@pytest.mark.parametrize(("owner", "call", "left"), [(Path, "rename", None), (shutil, "rmtree", "2")])
def test_kill_while_an_export_is_replaced(tmp_path, monkeypatch, owner, call, left):
    """The user's files were in a folder that the next export removed, and hf/ was removed before it was replaced."""
    hf = tmp_path / "hf"
    export(tmp_path, 1)
    (hf / "README.md").write_text("notes")
    working = getattr(owner, call)

    def kill(path, *rest, **options):
        if path.name in (".unfinished-hf", ".discarded-hf") and path.exists():
            raise KeyboardInterrupt
        return working(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, kill)
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path, 2)
    assert (hf / "model.safetensors").read_text() == left if left else not hf.exists()
    shutil.rmtree(tmp_path / ".unfinished-hf", ignore_errors=True)
    export(tmp_path, 3)
    assert {file.name: file.read_text() for file in hf.iterdir()} == {"README.md": "notes", "model.safetensors": "3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exports.json", "hf"]


def export(folder, step):
    new = folder / ".unfinished-hf"
    new.mkdir()
    (new / "model.safetensors").write_text(str(step))
    place_export(folder, "hf", new, step)


def test_export_folder_that_is_a_link(train, tmp_path):
    """The link could not be replaced by a folder, after the last step."""
    disk, out = tmp_path / "disk", tmp_path / "out"
    out.mkdir()
    (disk / "model").mkdir(parents=True)
    (out / "hf").symlink_to(disk / "model")
    assert train()[0] == 0
    weights = (disk / "model" / "model.safetensors").read_bytes()
    assert train("--train.checkpoint.resume_from", "latest", "--train.max_steps", "5")[0] == 0
    assert (out / "hf").is_symlink()
    assert (out / "hf" / "model.safetensors").read_bytes() != weights
    assert [path.name for path in disk.iterdir()] == ["model"]


def test_export_of_an_earlier_step_is_replaced(train, tmp_path, monkeypatch):
    """A run that was killed between its last checkpoint and its export left hf/ of the run before it."""
    assert train()[0] == 0
    weights = tmp_path / "out" / "hf" / "model.safetensors"
    before = weights.read_bytes()
    longer = ("--train.checkpoint.resume_from", "latest", "--train.max_steps", "6")
    with monkeypatch.context() as patch:
        patch.setattr(ExportCallback, "on_train_end", lambda *_: None)
        assert train(*longer)[0] == 0
    assert weights.read_bytes() == before
    assert train(*longer)[0] == 0
    assert weights.read_bytes() != before
    stamp = weights.stat().st_mtime_ns
    assert train(*longer)[0] == 0
    assert weights.stat().st_mtime_ns == stamp


def test_files_of_an_earlier_export_are_removed(train, tmp_path, settings, model_folder):
    """Transformers loads adapters where a folder has their config, also beside the weights of a later run."""
    pytest.importorskip("peft")
    assert train()[0] == 0
    base, hf = str((tmp_path / "out" / "hf").rename(tmp_path / "base")), tmp_path / "out" / "hf"
    shutil.rmtree(tmp_path / "out")
    settings["model"] = {"model_path": base}
    assert train("--lora.r", "2", "--lora.merge", "true")[0] == 0
    assert {"adapter_config.json", "merged"} <= {file.name for file in hf.iterdir()}
    (hf / "README.md").write_text("notes")
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    assert train()[0] == 0
    assert {file.name for file in hf.iterdir()} == {file.name for file in Path(base).iterdir()} | {"README.md"}


@pytest.mark.quick("line5")
@pytest.mark.parametrize("line", ["[1]", "3", '{"loss": 1.0}', '{"step": "2", "loss": 1}', "\udcff", "[" * 100_000])
def test_invalid_lines_in_metrics_are_dropped_on_resume(train, tmp_path, line):
    assert train()[0] == 0
    file = tmp_path / "out" / "metrics.jsonl"
    file.write_bytes(line.encode(errors="surrogateescape") + b"\n" + file.read_bytes())
    code, _, err = train("--train.checkpoint.resume_from", "latest", "--train.max_steps", "5")
    assert (code, err) == (0, "")
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3, 4, 5]


def test_changed_settings_are_printed_and_configurations_kept(train, tmp_path):
    assert train()[0] == 0
    code, out, _ = train("--train.checkpoint.resume_from=latest", "--train.max_steps=6", "--train.lr=1e-3")
    assert code == 0
    assert "changed since that checkpoint: train.max_steps: 4 -> 6" in out
    assert "changed since that checkpoint: train.lr: 0.01 -> 0.001" in out
    assert "resume_from:" not in out
    folder = tmp_path / "out"
    assert load_config(folder / "config.yaml").train.lr == 1e-3
    assert load_config(folder / "config.1.yaml").train.lr == 1e-2
    assert train("--train.checkpoint.resume_from=latest", "--train.max_steps=6", "--train.lr=1e-3")[0] == 0
    assert not (folder / "config.2.yaml").exists()


@pytest.mark.quick("15-143")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_code_of_a_stopped_run(train, monkeypatch, number, expected):
    class Signal(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 2:
                os.kill(os.getpid(), number)

    default = TextTrainer.default_callbacks
    monkeypatch.setattr(TextTrainer, "default_callbacks", lambda self: [Signal(), *default(self)])
    code, out, _ = train()
    assert code == expected
    assert "stopped after step 2; checkpoint saved, continue with --train.checkpoint.resume_from latest" in out
    monkeypatch.undo()
    assert train("--train.checkpoint.resume_from=latest")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_training_is_one_line(train, monkeypatch, tmp_path, number):
    def interrupted(*_):
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr("opslot.trainer.text.TextTrainer.default_callbacks", interrupted)
    before = signal.getsignal(number)
    code, _, err = train()
    assert code == 128 + number
    name = signal.Signals(number).name
    assert err == f"opslot: stopped by {name} before training started; no checkpoint was written\n"
    assert signal.getsignal(number) is before
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_signal_while_the_run_is_described(train, monkeypatch):
    """Between preparation and the first step."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    monkeypatch.setattr(
        "opslot.trainer.output_folder.write_description", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    try:
        code, _, err = train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, received) == (143, [])
    assert "stopped by SIGTERM before training started" in err


def test_second_signal_meets_the_handler_of_before_the_run(train, monkeypatch):
    class Signal(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 2:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

    received = []
    default = TextTrainer.default_callbacks
    monkeypatch.setattr(TextTrainer, "default_callbacks", lambda self: [Signal(), *default(self)])
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    try:
        assert (train()[0], received) == (143, [True])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signal_in_the_last_step_is_a_complete_run(train, monkeypatch):
    class Signal(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 4:
                os.kill(os.getpid(), signal.SIGINT)

    default = TextTrainer.default_callbacks
    monkeypatch.setattr(TextTrainer, "default_callbacks", lambda self: [Signal(), *default(self)])
    assert train()[0] == 0


@pytest.mark.parametrize("step", [2, 4])
def test_output_folder_that_is_deleted_during_the_run(train, monkeypatch, tmp_path, step):
    class Delete(Callback):
        def on_step_end(self, trainer, record):
            if record.step == step:
                shutil.rmtree(tmp_path / "out")

    default = TextTrainer.default_callbacks
    monkeypatch.setattr(TextTrainer, "default_callbacks", lambda self: [*default(self), Delete()])
    code, out, err = train()
    assert code == 0
    assert "metrics.jsonl was deleted during the run; it is written again" in out + err
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["train"]["max_steps"] == 4


def test_last_lines_show_how_to_load_the_model(train, tmp_path):
    _, out, _ = train()
    assert out.splitlines()[-2] == f"done: 4 steps; model, checkpoints and metrics are in {tmp_path / 'out'}"
    assert out.splitlines()[-1] == f'load it with: AutoModelForCausalLM.from_pretrained("{tmp_path / "out" / "hf"}")'
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["model_type"] == "qwen3_moe"
