"""Runs that tokenize text during training, so their number of steps is not known at the start."""

import functools
import json
import math
import multiprocessing
import os
import shutil
import signal

import pytest
import yaml

from opslot._base.errors import DataError
from opslot.data.corpus import open_corpus
from opslot.trainer import cli_train
from opslot.trainer.callbacks.base import Callback
from opslot.trainer.optimizer import learning_rate
from tests.trainer.runs import curve, trainer_of


def in_small_shards(monkeypatch):
    monkeypatch.setattr("opslot.trainer.run_data.open_corpus", functools.partial(open_corpus, shard_bytes=1500))
    monkeypatch.setattr("opslot.trainer.run_data._TOKENIZED_AT_START", 0)


@pytest.fixture
def streaming(settings, monkeypatch):
    """`settings` for two epochs of a text that is treated as large, in several shards."""
    in_small_shards(monkeypatch)
    settings["data"]["max_seq_len"] = 64
    settings["train"] |= {"num_epochs": 2, "global_batch_size": 8, "checkpoint.save_steps": 5, "lr": 1e-3}
    del settings["train"]["max_steps"]
    return settings


@pytest.mark.quick("changes1")
@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_batch": 128}])
def test_uncounted_run_ends_with_its_epochs(streaming, tmp_path, changes):
    streaming["data"] |= changes
    streaming["train"] |= {"eval_steps": 1000, "warmup_steps": 3}
    trainer = trainer_of(streaming, tmp_path)
    assert trainer.max_steps is None
    assert not trainer.data.is_complete
    result = trainer.train()
    samples = trainer.train_set.samples_per_epoch
    steps = trainer.batches.steps(2) if changes else math.ceil(2 * samples / 8)
    assert (result.step, result.completed) == (steps, True)
    records = curve(tmp_path / "out")
    assert len(records) == steps
    assert [record["step"] for record in records if "eval_loss" in record] == [steps]
    assert records[-2]["epoch"] < 2 <= records[-1]["epoch"]
    train = trainer.config.train
    exact = [learning_rate(train, step, steps) for step in range(1, steps + 1)]
    assert [record["lr"] for record in records] == pytest.approx(exact, abs=0.05 * train.lr)
    assert records[-1]["lr"] == exact[-1]


def test_killed_run_resumes_with_any_cache(streaming, tmp_path):
    streaming["train"] |= {"global_batch_size": 16, "checkpoint.save_steps": 4}
    trainer_of(streaming, tmp_path).train()
    straight = curve(tmp_path / "out")
    streaming["train"] |= {"output_dir": str(tmp_path / "again"), "checkpoint.resume_from": "latest"}

    class Kill(Callback):
        def on_step_end(self, trainer, record):
            if record.step == self.step:
                raise KeyboardInterrupt

    for step, workers in ((5, 0), (len(straight) - 3, 1)):
        shutil.rmtree(tmp_path / "cache")
        streaming["data"]["num_workers"] = workers
        killed = trainer_of(streaming, tmp_path)
        killed.callbacks.append(Kill())
        killed.callbacks[-1].step = step
        with pytest.raises(KeyboardInterrupt):
            killed.train()
        assert len(curve(tmp_path / "again")) == step
    shutil.rmtree(tmp_path / "cache")
    trainer_of(streaming, tmp_path).train()
    assert curve(tmp_path / "again") == straight


def test_complete_run_has_nothing_left_to_train(streaming, tmp_path, capsys):
    streaming["train"]["num_epochs"] = 1
    done = trainer_of(streaming, tmp_path).train()
    streaming["train"]["checkpoint.resume_from"] = "latest"
    again = trainer_of(streaming, tmp_path)
    assert again.max_steps == done.step
    assert "was the last one; nothing left to train" in capsys.readouterr().out
    assert again.train().record is None


def run_in_small_shards(file):
    with pytest.MonkeyPatch.context() as patch:
        in_small_shards(patch)
        return cli_train([file])


def test_two_ranks_share_tokenization(ranks, streaming, tmp_path):
    curves = []
    for name in ("one", "two"):
        streaming["train"] |= {"output_dir": str(tmp_path / name), "num_epochs": 0.5, "eval_steps": 5}
        streaming["data"]["cache_dir"] = str(tmp_path / f"cache of {name}")
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(streaming))
        if name == "one":
            assert run_in_small_shards(str(file)) == 0
        else:
            assert ranks.run(run_in_small_shards, str(file)) == [0, 0]
        curves.append(curve(tmp_path / name))
    assert len(curves[0]) == len(curves[1])
    for one, two in zip(*curves, strict=True):
        assert two == pytest.approx(one, rel=1e-5)


def test_tokenizing_processes_exit_with_the_run(train, streaming, tmp_path):
    code, out, err = train("--data.num_workers=2", "--train.num_epochs=0.5")
    assert (code, err) == (0, "")
    assert " MB of text" in out
    assert "; 0.5 epochs in steps of 512 tokens" in out
    assert "step: 1/~" in out
    assert multiprocessing.active_children() == []
    records = curve(tmp_path / "out")
    assert train(f"--train.output_dir={tmp_path / 'here'}", "--train.num_epochs=0.5")[0] == 0
    assert curve(tmp_path / "here") == records


@pytest.mark.parametrize("workers", [0, 1])
def test_malformed_line_in_a_later_shard_raises(train, streaming, tmp_path, workers):
    lines = [json.dumps({"text": "one and two, " * 30})] * 40
    lines[25] = '{"text": '
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    streaming["data"] |= {"train_path": str(tmp_path / "bad.jsonl"), "shuffle": False, "num_workers": workers}
    streaming["train"] |= {"checkpoint.save_steps": 1, "global_batch_size": 16}
    code, _, err = train()
    assert code == 2
    assert err.startswith("opslot: error: the data cannot be read:\n- ")
    assert err.count("bad.jsonl, line 26: not JSON") == 1
    assert "Traceback" not in err
    assert multiprocessing.active_children() == []
    steps = [record["step"] for record in curve(tmp_path / "out")] if (tmp_path / "out").exists() else []
    # Earlier shards have 23 lines of 391 tokens, and a step takes 1024. With workers the error is raised earlier.
    assert steps == list(range(1, (8 if workers == 0 else len(steps)) + 1))
    assert len(steps) <= 8


def test_workers_end_with_the_run(settings, tmp_path, monkeypatch):
    """Rank 0 kept the iterator alive, whose worker ignores SIGTERM, and its interpreter waited for it at exit."""
    settings["data"] |= {"num_workers": 1, "max_tokens_per_batch": 64}
    trainer = trainer_of(settings, tmp_path)
    begin, kept = type(trainer.batches).__iter__, []

    def begin_and_keep(loader):
        kept.append(begin(loader))
        return kept[0]

    monkeypatch.setattr(type(trainer.batches), "__iter__", begin_and_keep)
    trainer.train()
    left = multiprocessing.active_children()
    for worker in left:
        worker.kill()
    assert kept
    assert left == []


class KillWorker(Callback):
    """Kills a process of the dataloader after the first step, and stops the others if they are to wait forever."""

    def __init__(self, stops_others=False):
        self.stops_others = stops_others

    def on_step_end(self, trainer, record):
        if record.step == 1:
            killed, *others = multiprocessing.active_children()
            for worker in others if self.stops_others else ():
                os.kill(worker.pid, signal.SIGSTOP)
            os.kill(killed.pid, signal.SIGKILL)


@pytest.mark.parametrize("packing", [True, False])
def test_killed_worker_raises_and_the_others_end(settings, tmp_path, packing):
    """As where the machine is out of memory. The interpreter waited for the others at exit."""
    settings["data"] |= {"num_workers": 2} | ({"max_tokens_per_batch": 64} if packing else {})
    settings["train"]["max_steps"] = 1000
    trainer = trainer_of(settings, tmp_path)
    trainer.callbacks.append(KillWorker())
    # The traceback keeps the frames alive.
    with pytest.raises(DataError, match=r"a process of the dataloader exited") as caught:
        trainer.train()
    assert caught.value.__traceback__ is not None
    assert multiprocessing.active_children() == []


def test_workers_that_wait_forever_are_killed(settings, tmp_path, monkeypatch):
    """As for a lock of a killed worker; a worker ignores SIGTERM."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    settings["data"]["num_workers"] = 2
    settings["train"]["max_steps"] = 1000
    trainer = trainer_of(settings, tmp_path)
    trainer.callbacks.append(KillWorker(stops_others=True))
    with pytest.raises(DataError, match=r"a process of the dataloader exited"):
        trainer.train()
    left = multiprocessing.active_children()
    for worker in left:
        worker.kill()
    assert left == []
