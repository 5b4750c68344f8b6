"""torchdata's StatefulDataLoader over a stream works as the data of a trainer and resumes."""

import pytest
import torch
import yaml
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from opslot.data.collation import collate
from opslot.trainer import TextTrainer, load_config
from opslot.trainer.callbacks.writers import read_metrics


class Counting(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            tokens = (torch.arange(16) * 7 + self.position) % 250
            yield {"input_ids": tokens, "lengths": [16], "padding": 0}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StreamTrainer(TextTrainer):
    def build_data(self):
        super().build_data()
        return StatefulDataLoader(Counting(), batch_size=2, collate_fn=collate)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stream_resumes(settings, tmp_path):
    def run(name, steps, *overrides):
        settings["train"] |= {"output_dir": str(tmp_path / name), "max_steps": steps, "micro_batch_size": 2}
        settings["train"]["lr_scheduler"] = "constant"
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        StreamTrainer(load_config([str(tmp_path / "run.yaml"), "--train.logging.progress=off", *overrides])).train()
        return [(record["loss"], record["grad_norm"]) for record in read_metrics(tmp_path / name)]

    straight = run("straight", 6)
    assert run("halves", 3) == straight[:3]
    assert run("halves", 6, "--train.checkpoint.resume_from=latest") == straight
