"""float16 parameters are rejected; float16 compute scales the loss, so that gradients do not underflow."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from opslot._base.errors import ConfigError
from opslot.distributed import destroy_parallel_state
from opslot.trainer import TextTrainer
from opslot.trainer.loss_scaling import LossScaler
from tests.trainer.runs import trainer_of


@pytest.fixture
def float16(settings):
    """`settings` for float16 compute with float32 parameters."""
    settings["train"] |= {"max_steps": 1, "fsdp": {"param_dtype": "float16"}}
    settings["model"]["ops_implementation"] = "eager"
    yield settings
    destroy_parallel_state()


def test_float16_parameters_raise(train, settings, tmp_path):
    settings["model"]["torch_dtype"] = "float16"
    code, _, err = train()
    assert code == 2
    assert "float16 parameters cannot be trained" in err
    assert "train.fsdp.param_dtype: float16 or bfloat16" in err
    assert not (tmp_path / "out").exists()


def test_float16_parameters_of_a_subclass_raise(settings, tmp_path):
    class Half(TextTrainer):
        def build_model(self):
            return super().build_model().half()

    with pytest.raises(ConfigError, match=r"float16 parameters cannot be trained.*\n  found: .* is float16\n  hint: "):
        trainer_of(settings, tmp_path, cls=Half)


def test_float16_checkpoint_trains_in_float32(train, settings, tmp_path, model_folder):
    settings["train"] |= {"max_steps": 1, "output_dir": str(tmp_path / "start")}
    assert train()[0] == 0
    folder = tmp_path / "start" / "hf"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))
    weights = load_file(folder / "model.safetensors")
    save_file({name: value.half() for name, value in weights.items()}, folder / "model.safetensors")
    settings["model"] = {"model_path": str(folder)}
    settings["train"]["output_dir"] = str(tmp_path / "out")
    trainer = trainer_of(settings, tmp_path)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


class HugeBatch(TextTrainer):
    """Divides the loss as if the step had 2**20 times as many tokens."""

    def forward(self, batch, num_items_in_batch):
        return super().forward(batch, num_items_in_batch << 20)


def grad_norm(settings, tmp_path, name):
    settings["train"]["output_dir"] = str(tmp_path / name)
    return trainer_of(settings, tmp_path, cls=HugeBatch).train().record.grad_norm


def test_gradients_do_not_underflow_in_float16(float16, tmp_path, monkeypatch):
    scaled = grad_norm(float16, tmp_path, "scaled")
    monkeypatch.setattr("opslot.trainer.loss_scaling._INITIAL_SCALE", 1.0)
    unscaled = grad_norm(float16, tmp_path, "unscaled")
    float16["train"]["fsdp"] = {}
    exact = grad_norm(float16, tmp_path, "exact")
    assert scaled == pytest.approx(exact, rel=0.02)
    assert unscaled < 0.5 * exact


def test_overflow_repeats_the_step_with_half_the_scale(float16, tmp_path, monkeypatch):
    monkeypatch.setattr("opslot.trainer.loss_scaling._INITIAL_SCALE", 2.0**40)
    trainer = trainer_of(float16, tmp_path)
    record = trainer.train().record
    assert 1 < trainer.loss_scaler.scale < 2.0**40
    assert record.grad_norm < 100
    assert trainer.batches.consumed == 4


def test_loss_scale_is_restored(float16, tmp_path):
    trainer = trainer_of(float16, tmp_path)
    trainer.loss_scaler.scale = 2.0**7
    trainer.train()
    float16["train"] |= {"max_steps": 2, "checkpoint.resume_from": "latest"}
    assert trainer_of(float16, tmp_path).loss_scaler.scale == 2.0**7


def test_scale_grows_after_steps_without_overflow(monkeypatch):
    monkeypatch.setattr("opslot.trainer.loss_scaling._GROWTH_INTERVAL", 3)
    scaler = LossScaler(torch.float16)
    before = scaler.scale
    for _ in range(3):
        scaler.step()
    assert scaler.scale == 2 * before
    unused = LossScaler(torch.bfloat16)
    unused.step()
    assert unused.scale == 1.0
    assert not unused.back_off()
