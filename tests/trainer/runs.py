"""Trainers, runs of `opslot train` and their loss curves."""

import yaml

from opslot.trainer import cli_train, load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.main import _trainer_class

TIMELESS = ("step", "loss", "grad_norm", "lr", "epoch", "tokens", "eval_loss", "aux_loss")


def curve(folder):
    return [{name: record[name] for name in TIMELESS if name in record} for record in read_metrics(folder)]


def losses(folder):
    return [record["loss"] for record in read_metrics(folder)]


def run_config(file):
    """`opslot train`, on a rank."""
    return cli_train([file])


def trainer_of(settings, tmp_path, *options, cls=None, **keywords):
    """The trainer of `settings` and of options such as "--train.lr=0.1", by default of the class for its task."""
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump(settings))
    config = load_config([str(file), "--train.logging.progress", "off", *options])
    return (cls or _trainer_class(config.task))(config, **keywords)
