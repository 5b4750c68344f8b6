"""Trainers and loss curves of runs."""

import yaml

from opslot.trainer import TextTrainer, load_config
from opslot.trainer.callbacks.writers import read_metrics

TIMELESS = ("step", "loss", "grad_norm", "lr", "epoch", "tokens", "eval_loss")


def curve(folder):
    return [{name: record[name] for name in TIMELESS if name in record} for record in read_metrics(folder)]


def trainer_of(settings, tmp_path, **keywords):
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump(settings))
    return TextTrainer(load_config([str(file), "--train.logging.progress", "off"]), **keywords)
