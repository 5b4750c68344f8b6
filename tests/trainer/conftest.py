import json

import pytest
import yaml

from opslot.trainer import cli_train

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.fixture
def picture():
    """Draw the loss curves in this test."""


@pytest.fixture(autouse=True)
def empty_picture(request):
    """Leave loss.png empty unless the test requests `picture`: drawing it takes as long as the run."""
    with pytest.MonkeyPatch.context() as patch:
        if "picture" not in request.fixturenames:
            patch.setattr("opslot.trainer.loss_curve.draw_loss_curve", lambda records, path, **_: path.touch())
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """config.json of a tiny Qwen3-MoE and a tokenizer with one token per byte."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Twenty short documents that a model can learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i:02}.txt").write_text("".join(f"{i + j} and {i + j + 1}, " for j in range(20 + i)))
    return folder


@pytest.fixture
def settings(model_folder, text_folder, tmp_path):
    """A valid configuration that tests change."""
    return {
        "model": {"config_path": str(model_folder)},
        "data": {"train_path": f"{text_folder}/*.txt", "max_seq_len": 32, "cache_dir": str(tmp_path / "cache")},
        "train": {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 4,
            "global_batch_size": 4,
            "lr": 1e-2,
            "logging": {"tensorboard": False},
        },
    }


@pytest.fixture
def train(settings, tmp_path, capsys):
    """Run `opslot train` on `settings` with overrides; returns (exit code, standard output, standard error)."""

    def run(*overrides):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings))
        capsys.readouterr()
        code = cli_train([str(file), *overrides])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def torchrun(forks, tmp_path):
    """Start `torchrun -m opslot train` on a configuration; torchrun is a fork, its ranks are new processes."""
    script = tmp_path / "torchrun.py"
    script.write_text("from torch.distributed.run import main\n\nmain()\n")

    def start(processes, file):
        options = ["--standalone", "--nproc-per-node", str(processes), "-m", "opslot"]
        return forks.start(script, *options, "train", file)

    return start
