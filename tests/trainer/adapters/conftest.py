import json

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture
def write(settings, tmp_path, model_folder):
    """Write `settings` with `lora`, for an output folder of that name; the base is a random Qwen3-MoE."""
    # Not above: PEFT imports Triton, and pytest may load this file before the interpreter is selected.
    from tests.trainer.adapters.runs import LORA

    torch.manual_seed(0)
    config = json.loads((model_folder / "config.json").read_text())
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(base)
    for file in model_folder.glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())
    settings["model"] = {"model_path": str(base)}
    settings["train"] |= {"micro_batch_size": 1, "checkpoint.save_steps": 2}

    def make(name, lora=None, **changes):
        file = tmp_path / f"{name}.yaml"
        whole = {**settings, "lora": LORA | (lora or {})}
        whole["train"] = settings["train"] | {"output_dir": str(tmp_path / name)} | changes
        file.write_text(yaml.safe_dump(whole))
        return str(file)

    return make


@pytest.fixture
def dense_base(settings, write, tmp_path):
    """Replaces the base by a random Qwen3 without experts."""
    from tests.trainer.adapters.runs import DENSE

    torch.manual_seed(0)
    folder = tmp_path / "dense"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**DENSE)).save_pretrained(folder)
    for file in (tmp_path / "base").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    settings["model"] = {"model_path": str(folder)}
    return folder


@pytest.fixture
def trainer(write):
    """A trainer of `settings` with `lora`, without the command line."""
    from opslot.trainer.main import _trainer_class
    from opslot.trainer.parse import load_config

    def make(name, lora=None, **changes):
        config = load_config(write(name, lora, **changes))
        return _trainer_class(config.task)(config)

    return make
