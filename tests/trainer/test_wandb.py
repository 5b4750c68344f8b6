import importlib.machinery
import sys
import types

from opslot.trainer.callbacks.writers import read_metrics


def test_wandb_logs_every_step_and_finishes(train, settings, tmp_path, monkeypatch):
    logged, events = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values["loss"]))

        def finish(self):
            events.append("finished")

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **arguments: events.append(arguments["project"]) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("opslot.trainer.validate.has_package", lambda name: True)
    settings["train"]["logging"] |= {"wandb": True, "wandb_project": "mine"}
    assert train()[0] == 0
    assert logged == [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "out")]
    assert events == ["mine", "finished"]


def test_resumed_run_keeps_its_wandb_id_and_trackio_gets_the_name(train, settings, tmp_path, monkeypatch):
    started = []

    class Run:
        def log(self, values, step):
            pass

        def finish(self):
            pass

    for name in ("wandb", "trackio"):
        fake = types.ModuleType(name)
        fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
        fake.init = lambda name=name, **arguments: started.append(arguments | {"run": name}) or Run()
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr("opslot.trainer.validate.has_package", lambda name: True)
    settings["train"]["logging"] |= {"wandb": True, "trackio": True, "wandb_entity": "team", "run_name": "first"}
    assert train()[0] == 0
    assert train("--train.max_steps", "6", "--train.checkpoint.resume_from", "latest")[0] == 0
    first, tracked, resumed, _ = started
    assert first["id"] == resumed["id"]
    assert (first["entity"], first["run"], tracked["run"]) == ("team", "first", "first")
    settings["train"] |= {"output_dir": str(tmp_path / "second"), "max_steps": 1}
    assert train()[0] == 0
    assert started[4]["id"] != first["id"]
