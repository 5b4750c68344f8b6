import importlib.machinery
import sys
import types

from opslot.trainer.callbacks import read_metrics


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
