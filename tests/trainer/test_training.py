"""Full runs of `opslot train`: their output, and resumed runs equal uninterrupted ones."""

import errno
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from opslot import KERNEL_REGISTRY, KernelSpec, explain
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.distributed import destroy_parallel_state
from opslot.models import ARCHITECTURES
from opslot.models._registry import find_architecture
from opslot.trainer import TextTrainer, load_config
from opslot.trainer.callbacks.writers import MetricsCallback, read_metrics
from opslot.trainer.checkpointing import find_checkpoints
from opslot.trainer.saver import CheckpointSaver
from opslot.trainer.setup import num_workers, with_defaults
from tests.trainer.runs import trainer_of


def test_evaluation_materializes_no_logits_with_chunk_loss(settings, tmp_path):
    settings["model"]["ops_implementation"] = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}
    settings["train"] |= {"max_steps": 1, "eval_steps": 1}
    trainer = trainer_of(settings, tmp_path)
    logits = []
    trainer.model.register_forward_hook(lambda module, arguments, output: logits.append(output.logits))
    trainer.train()
    assert len(logits) > 1
    assert logits == [None] * len(logits)


def test_config_that_asks_for_tuples_is_trained(settings, tmp_path, model_folder):
    """Transformers' generic heads raise AttributeError for it."""
    config = json.loads((model_folder / "config.json").read_text()) | {"return_dict": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings["model"] = {"config_path": str(tmp_path / "config.json"), "tokenizer_path": str(model_folder)}
    settings["train"] |= {"max_steps": 1, "eval_steps": 1}
    assert trainer_of(settings, tmp_path).train().completed


def test_hf_backend_trains_without_a_kernel_table(settings, train, monkeypatch):
    monkeypatch.setenv("OPSLOT_BACKEND", "hf")
    settings["train"]["max_steps"] = 1
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "Transformers' own" in out
    assert "step: 1/1" in out
    assert "kernels on" not in out


@pytest.mark.usefixtures("picture")
def test_files_in_the_output_folder(train, settings, tmp_path):
    settings["train"] |= {
        "max_steps": 30,
        "checkpoint.save_steps": 10,
        "eval_steps": 10,
        "checkpoint.save_total_limit": 2,
        "lr": 3e-2,
    }
    settings["train"]["logging"] = {"tensorboard": True}
    code, out, err = train()
    assert (code, err) == (0, "")
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "exports.json",
        "hf",
        "kernels.json",
        "kernels.txt",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in rows] == list(range(1, 31))
    assert all({"loss", "grad_norm", "lr", "tokens_per_s"} <= record.keys() for record in rows)
    assert [record["step"] for record in rows if "eval_loss" in record] == [10, 20, 30]
    assert rows[0]["loss"] == pytest.approx(5.56, abs=0.05)  # log(260), the loss of an untrained model
    assert rows[-1]["loss"] < 3.0
    assert rows[-1]["tokens"] == 30 * 4 * 32
    assert [path.name for path in find_checkpoints(folder / "checkpoints")] == ["step_00000020", "step_00000030"]
    with Image.open(folder / "loss.png") as picture:
        assert picture.size[0] > 1000
    assert list((folder / "tensorboard").glob("events.*"))
    chosen = {record["op"]: record["chosen"] for record in json.loads((folder / "kernels.json").read_text())["rows"]}
    assert {"rms_norm", "rotary_pos_emb", "moe_experts", "cross_entropy_loss", "attention"} <= chosen.keys()
    table = (folder / "kernels.txt").read_text()
    assert all(f"{op}/" in table and name in table for op, name in chosen.items())
    assert "step: 30/30" in out
    assert load_config(folder / "config.yaml").train.max_steps == 30


def test_transformers_loads_the_exported_model(settings, tmp_path):
    trainer = trainer_of(settings, tmp_path)
    trainer.train()
    folder = tmp_path / "out" / "hf"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(reloaded).__module__.startswith("transformers.")
    inputs = AutoTokenizer.from_pretrained(folder)("12 and 13, ", return_tensors="pt", return_token_type_ids=False)
    trainer.model.eval()
    with torch.no_grad():
        ours, plain = trainer.model(**inputs).logits, reloaded(**inputs).logits
    # The same weights with other kernels.
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    exported = reloaded.state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in trainer.model.state_dict().items())


class Renaming:
    """Reads a checkpoint with another name for the final norm."""

    def can_handle(self, name):
        return name == "model.final_norm.weight"

    def convert(self, name, tensor):
        return [("model.norm.weight", tensor)]

    def finalize(self):
        return []


@pytest.mark.parametrize("fsdp", [{}, {"param_dtype": "float32"}], ids=["whole", "sharded"])
def test_weights_are_loaded_through_the_architecture_converters(settings, tmp_path, monkeypatch, fsdp):
    monkeypatch.setattr("opslot.distributed.fsdp.can_copy_parameters", lambda parameters, dtype, device: False)
    settings["train"] |= {"max_steps": 1, "output_dir": str(tmp_path / "start")}
    trainer_of(settings, tmp_path).train()
    file = tmp_path / "start" / "hf" / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight") + 1
    save_file({**tensors, "model.final_norm.weight": norm}, file)
    settings["model"]["model_path"] = str(tmp_path / "start" / "hf")
    settings["train"] |= {"output_dir": str(tmp_path / "out"), "fsdp": fsdp}
    known = find_architecture("qwen3_moe")
    renaming = replace(known, converters=lambda model: [Renaming(), ExpertTensorConverter.for_model(model)])
    monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", renaming)
    try:
        found = trainer_of(settings, tmp_path).model.model.norm.weight.detach()
        assert torch.equal(found.full_tensor() if fsdp else found, norm)
    finally:
        destroy_parallel_state()


def test_named_kernel_for_the_compute_dtype_only(settings, tmp_path):
    right = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")
    half = KernelSpec("half", "rms_norm", "standard", lambda: right, dtypes=frozenset({torch.bfloat16}))
    KERNEL_REGISTRY.register(half)
    settings["model"]["ops_implementation"] = {"rms_norm_implementation": "half"}
    try:
        with pytest.raises(ConfigError, match="takes bfloat16, not float32"):
            trainer_of(settings, tmp_path)
        settings["train"] |= {"max_steps": 1, "fsdp": {"param_dtype": "bfloat16"}}
        trainer = trainer_of(settings, tmp_path)
        rows = [
            record for record in explain(trainer.model).rows if (record.op, record.variant) == ("rms_norm", "standard")
        ]
        assert {record.chosen for record in rows} == {"half"}
        assert trainer.model.model.norm.weight.dtype == torch.float32
        trainer.train()
    finally:
        destroy_parallel_state()
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "half")


@pytest.mark.quick("extra1")
@pytest.mark.parametrize("extra", [{}, {"output_router_logits": True}])
def test_accumulated_micro_batches_equal_one_batch(settings, tmp_path, model_folder, extra):
    config = json.loads((model_folder / "config.json").read_text())
    settings["model"] = {
        "config_path": str(tmp_path / "config.json"),
        "tokenizer_path": str(model_folder),
        "ops_implementation": "eager",
    }
    # The auxiliary loss of a batch is not a sum over its samples, so losses are compared without its gradient.
    (tmp_path / "config.json").write_text(json.dumps({**config, **extra, "router_aux_loss_coef": 0.0}))
    # AdamW's first steps amplify rounding in the smallest gradients to full steps of the learning rate.
    settings["train"]["lr"] = 1e-3
    curves = []
    for micro in (4, 1, 2):
        settings["train"] |= {"micro_batch_size": micro, "output_dir": str(tmp_path / f"out{micro}")}
        trainer_of(settings, tmp_path).train()
        curves.append([(record["loss"], record["grad_norm"]) for record in read_metrics(tmp_path / f"out{micro}")])
    for other in curves[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(curves[0]), rtol=1e-5, atol=1e-6)


def test_aux_loss_of_a_step_is_the_mean_of_its_micro_batches(settings, tmp_path, model_folder):
    config = json.loads((model_folder / "config.json").read_text()) | {"output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "router_aux_loss_coef": 0.5}))
    settings["model"] = {"config_path": str(tmp_path / "config.json"), "tokenizer_path": str(model_folder)}
    settings["train"] |= {"max_steps": 1, "micro_batch_size": 1}
    trainer = trainer_of(settings, tmp_path)
    batches = iter(trainer.batches)
    micro = [next(batches) for _ in range(4)]
    with torch.no_grad():
        expected = sum(0.5 * trainer.forward(batch, 1).aux_loss.item() for batch in micro) / 4
        cross_entropy = sum(trainer.split_loss(trainer.forward(batch, 31 * 4))[0].item() for batch in micro)
    trainer.batches.consumed = 0
    record = trainer.train().record
    assert record.extra["aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert record.loss == pytest.approx(cross_entropy, rel=0.1)
    assert record.loss == pytest.approx(5.56, abs=0.05)


def test_nan_loss_stops_the_run_and_keeps_checkpoints(train, settings, tmp_path, monkeypatch):
    settings["train"] |= {"checkpoint.save_steps": 1, "max_steps": 5}
    original = TextTrainer.split_loss

    def broken(self, outputs):
        loss, router = original(self, outputs)
        return (loss * float("nan") if self.step == 2 else loss), router

    monkeypatch.setattr(TextTrainer, "split_loss", broken)
    code, _, err = train()
    assert code == 1
    assert "step 3: the loss is nan" in err
    assert "the last checkpoint is" in err
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")][-1] == "step_00000002"
    monkeypatch.undo()
    assert train("--train.checkpoint.resume_from", "latest")[0] == 0
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("moment", ["on_train_start", "on_step_end", "close"])
def test_full_disk_is_one_error_and_callbacks_are_closed(train, settings, monkeypatch, moment):
    settings["train"] |= {"checkpoint.save_steps": 2, "max_steps": 3}
    closed, really = [], getattr(MetricsCallback, moment)

    def full(self, trainer, *record):
        really(self, trainer, *record)
        if moment == "on_train_start" or trainer.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsCallback, moment, full)
    monkeypatch.setattr(CheckpointSaver, "close", lambda self: closed.append(self))
    code, _, err = train()
    assert code == 1
    assert err.startswith(f"opslot: error: the run's files cannot be written to {settings['train']['output_dir']}: No ")
    assert "free disk space, then continue with train.checkpoint.resume_from: latest" in err
    assert "Traceback" not in err
    assert len(closed) == 1


def test_other_os_errors_are_not_disk_errors(settings, tmp_path, monkeypatch):
    def raise_connection_error(self, trainer, record):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(MetricsCallback, "on_step_end", raise_connection_error)
    with pytest.raises(ConnectionRefusedError):
        trainer_of(settings, tmp_path).train()


def test_activation_checkpointing_changes_no_loss(settings, tmp_path):
    curves = []
    for mode, offload in (("none", False), ("full", True), ("selective", False)):
        out = tmp_path / mode
        options = {"activation_checkpointing": mode, "activation_offload": offload, "output_dir": str(out)}
        settings["train"] |= options
        trainer_of(settings, tmp_path).train()
        curves.append([record["loss"] for record in read_metrics(out)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def test_steps_of_epochs(settings, tmp_path):
    del settings["train"]["max_steps"]
    settings["train"]["num_epochs"] = 2.5
    trainer = trainer_of(settings, tmp_path)
    assert trainer.max_steps == -(-2.5 * trainer.train_set.samples_per_epoch // 4)


@pytest.mark.slow
def test_torchrun_with_one_process(settings, torchrun, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    process = torchrun(1, str(tmp_path / "run.yaml"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3, 4]


def test_compile_compiles_each_layer(settings, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: compiled.append(type(self).__name__))
    settings["train"] |= {"compile": True, "output_dir": str(tmp_path / "out"), "max_steps": 1}
    trainer = trainer_of(settings, tmp_path)
    trainer.train()
    assert len(compiled) == trainer.model.config.num_hidden_layers
    assert len(set(compiled)) == 1


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [
        ((9, 0), [], "bfloat16"),
        ((9, 0), ["--train.fsdp.param_dtype", "float32"], "float32"),
        ((9, 0), ["--model.torch_dtype", "bfloat16"], None),
        ((9, 0), ["--model.device", "cpu"], None),
        ((9, 0), ["--lora.r", "4", "--lora.init", "pissa"], None),
        ((7, 5), [], None),
        (None, [], None),
    ],
)
def test_default_precision(capability, changes, expected, monkeypatch):
    facts = DeviceFacts("cpu" if capability is None else "gpu", capability)
    monkeypatch.setattr("opslot.trainer.setup.best_device", lambda: facts)
    assert with_defaults(load_config(["--train.output_dir", "out", *changes])).train.fsdp.param_dtype == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--model.config_path", "model"], 3e-4),
        (["--model.model_path", "model"], 1e-5),
        (["--model.model_path", "model", "--lora.r", "4"], 2e-4),
        (["--model.model_path", "model", "--train.lr", "0.1"], 0.1),
    ],
)
def test_default_learning_rate(changes, expected):
    assert with_defaults(load_config(["--train.output_dir", "out", *changes])).train.lr == expected


@pytest.mark.parametrize(
    ("changes", "cores", "processes", "shared", "expected"),
    [
        ([], 16, 1, 64 << 20, 2),
        (["--data.num_workers", "0"], 16, 1, 1 << 30, 0),
        (["--model.device", "cpu"], 16, 1, 1 << 30, 0),
        ([], 1, 1, 1 << 30, 0),
        (["--task", "vlm"], 16, 1, 8 << 30, 8),
        (["--task", "vlm"], 16, 4, 8 << 30, 3),
        (["--task", "vlm"], 128, 8, 8 << 30, 4),
        (["--task", "vlm"], 16, 1, 64 << 20, 0),
    ],
)
def test_default_workers_beside_a_gpu(changes, cores, processes, shared, expected, monkeypatch, caplog):
    monkeypatch.setattr("opslot.trainer.setup.best_device", lambda: DeviceFacts("gpu", (9, 0)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=shared))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert num_workers(load_config(["--train.output_dir", "out", *changes])) == expected
    warned = "data.num_workers is 0, since /dev/shm has 64 MiB" in caplog.text
    assert warned == ("vlm" in changes and shared < 1 << 30)
