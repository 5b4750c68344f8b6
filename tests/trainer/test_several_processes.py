"""`opslot train` in several processes: the same losses as in one, checkpoints of any mesh, one error for all ranks."""

import contextlib
import io
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.main import _unused_gpus
from tests.trainer.runs import curve, run_config

SIZES = {
    "fsdp": {},
    "sp": {"sp_size": 2, "fsdp": {"ulysses_overlap": True}},
    "ep": {"ep_size": 2},
    "sp and ep": {"sp_size": 2, "ep_size": 2},
    "ddp": {"data_parallel_mode": "ddp"},
    "ddp and sp": {"data_parallel_mode": "ddp", "sp_size": 2},
}


def assert_same_curve(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-5), f"{name} of step {a['step']}"


@pytest.fixture
def write(settings, tmp_path):
    """Write `settings` with the auxiliary loss and changes to `train`, for an output folder of that name."""
    config = json.loads((Path(settings["model"]["config_path"]) / "config.json").read_text())
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(settings["model"]["config_path"]).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    settings["model"]["config_path"] = str(model)
    settings["train"] |= {"micro_batch_size": 1, "checkpoint.save_steps": 2, "eval_steps": 4}

    def make(name, model=None, **changes):
        file = tmp_path / f"{name}.yaml"
        whole = {**settings, "model": settings["model"] | (model or {})}
        whole["train"] = settings["train"] | {"output_dir": str(tmp_path / name)} | changes
        file.write_text(yaml.safe_dump(whole))
        return str(file)

    return make


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("sp", marks=pytest.mark.slow),
        pytest.param("ep", marks=pytest.mark.slow),
        "sp and ep",
        "ddp",
        pytest.param("ddp and sp", marks=pytest.mark.slow),
    ],
)
def test_two_processes_have_the_losses_of_one(ranks, write, tmp_path, axis):
    assert run_config(write("one")) == 0
    assert ranks.run(run_config, write("two", **SIZES[axis])) == [0, 0]
    assert_same_curve(curve(tmp_path / "two"), curve(tmp_path / "one"))
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    exported = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf").state_dict() for name in ("one", "two")]
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("ep", None, marks=pytest.mark.slow),
        (None, "sp and ep"),
        pytest.param("sp", "fsdp", marks=pytest.mark.slow),
        pytest.param("fsdp", "ddp", marks=pytest.mark.slow),
        ("ddp", None),
    ],
)
def test_resume_with_another_number_of_processes(ranks, write, tmp_path, before, after):
    def run(name, axis, **changes):
        file = write(name, **changes, **(SIZES[axis] if axis else {}))
        assert (ranks.run(run_config, file) == [0, 0]) if axis else (run_config(file) == 0)

    # AdamW's first steps amplify rounding in the smallest gradients to full steps of the learning rate.
    changes = {"eval_steps": None, "lr_scheduler": "constant", "lr": 1e-3}
    run("straight", None, **changes)
    run("split", before, max_steps=2, **changes)
    run("split", after, **{"checkpoint.resume_from": "latest"}, **changes)
    assert_same_curve(curve(tmp_path / "split"), curve(tmp_path / "straight"))


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
def test_resumed_ddp_continues_bit_for_bit(ranks, write, tmp_path, param_dtype):
    changes = {"data_parallel_mode": "ddp", "fsdp": {"param_dtype": param_dtype}, "lr_scheduler": "constant"}
    for name, max_steps, resume in (("straight", 4, None), ("split", 2, None), ("split", 4, "latest")):
        file = write(name, max_steps=max_steps, **{"checkpoint.resume_from": resume}, **changes)
        assert ranks.run(run_config, file) == [0, 0]
    straight, split = (
        [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)] for name in ("straight", "split")
    )
    assert straight == split
    exported = [AutoModelForCausalLM.from_pretrained(tmp_path / n / "hf").state_dict() for n in ("straight", "split")]
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


@pytest.fixture
def by_tokens(settings, write):
    """Batches of whole documents with more tokens per step than fit into one micro batch per rank."""
    settings["data"] |= {"max_tokens_per_batch": 40, "sample_by": "paragraph"}
    settings["train"] |= {"micro_batch_size": None, "global_batch_size": 10, "eval_steps": None, "max_steps": 3}


@pytest.mark.parametrize("axis", [pytest.param("fsdp", marks=pytest.mark.slow), "sp and ep"])
def test_token_batches_have_the_losses_of_one(ranks, write, by_tokens, tmp_path, axis):
    assert run_config(write("one")) == 0
    assert ranks.run(run_config, write("two", **SIZES[axis])) == [0, 0]
    # The auxiliary loss is averaged over micro batches, which differ on two ranks.
    drop = {"aux_loss", "grad_norm"}
    one, two = (
        [{k: v for k, v in row.items() if k not in drop} for row in curve(tmp_path / n)] for n in ("one", "two")
    )
    assert_same_curve(two, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, {"ep_size": 2}), (1, {})), ((2, {}), (4, {"ep_size": 2}))],
)
def test_token_batches_resume_with_other_processes(ranks, write, by_tokens, tmp_path, before, after):
    def run(name, world, **changes):
        file = write(name, **changes)
        codes = [run_config(file)] if world == 1 else ranks.run(run_config, file, world=world)
        assert codes == [0] * world

    changes = {"lr_scheduler": "constant", "lr": 1e-3}
    run("straight", 1, **changes)
    run("split", before[0], max_steps=2, **changes, **before[1])
    run("split", after[0], **{"checkpoint.resume_from": "latest"}, **changes, **after[1])
    straight, split = (read_metrics(tmp_path / name) for name in ("straight", "split"))
    assert [row["tokens"] for row in split] == [row["tokens"] for row in straight]
    assert [row["epoch"] for row in split] == [row["epoch"] for row in straight]
    assert [row["loss"] for row in split] == pytest.approx([row["loss"] for row in straight], rel=1e-5)


def test_weights_are_loaded_and_computed_in_bfloat16(ranks, write, tmp_path):
    assert run_config(write("start")) == 0
    model = {"model_path": str(tmp_path / "start" / "hf")}
    assert run_config(write("one", model=model, max_steps=2)) == 0
    sizes = {"ep_size": 2, "fsdp": {"param_dtype": "bfloat16"}, "activation_checkpointing": "full"}
    assert ranks.run(run_config, write("two", model=model, max_steps=2, **sizes)) == [0, 0]
    for a, b in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
        assert a["loss"] != b["loss"]


def run_and_capture(file):
    from opslot.trainer import cli_train

    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = cli_train([file])
    return code, stderr.getvalue()


def run_with_fewer_kernels_on_the_second(file):
    from opslot.slots import KERNEL_REGISTRY

    missing = KERNEL_REGISTRY.get("rms_norm", "standard", "torch_fused")
    if os.environ["RANK"] == "1":
        KERNEL_REGISTRY.unregister(*missing.key)
    try:
        return run_and_capture(file)
    finally:
        KERNEL_REGISTRY.register(missing, replace=True)


def test_ranks_with_different_kernels_raise(ranks, write, tmp_path):
    answers = ranks.run(run_with_fewer_kernels_on_the_second, write("run", max_steps=2))
    assert all(code for code, _ in answers)
    errors = "".join(text for _, text in answers)
    assert errors.count("the ranks selected different kernels") == 1
    assert "rms_norm is torch_fused on rank 0, eager on rank 1" in errors
    assert not (tmp_path / "run").exists()


def test_damaged_file_of_one_rank_is_reported_once(ranks, write, tmp_path):
    assert ranks.run(run_config, write("run", max_steps=2)) == [0, 0]
    part = tmp_path / "run" / "checkpoints" / "step_00000002" / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    answers = ranks.run(run_and_capture, write("run", **{"checkpoint.resume_from": "latest"}))
    assert sorted(code for code, _ in answers) == [1, 2]
    errors = "".join(text for _, text in answers)
    assert errors.count("opslot: error: ") == 1
    assert "step_00000002 cannot be read" in errors
    assert "__1_0.distcp is not the file that was written" in errors


@pytest.mark.slow
def test_invalid_input_is_reported_once(torchrun, write, settings, tmp_path):
    Path(tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    settings["data"]["train_path"] = str(tmp_path / "bad.jsonl")
    process = torchrun(2, write("bad"))
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert err.count("opslot: error: ") == 1
    assert "bad.jsonl" in err


@pytest.mark.slow
def test_killed_rank_ends_the_run_and_checkpoints_stay(torchrun, write, tmp_path):
    changes = {"eval_steps": None, "lr_scheduler": "constant", "lr": 1e-3, "warmup_steps": 0}
    file = write("killed", max_steps=2000, **changes)
    process = torchrun(2, file)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step_*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    started = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - started < 60
    done = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    # One process resumes from the checkpoint of two.
    last = done + 2
    assert run_config(write("killed", max_steps=last, **{"checkpoint.resume_from": "latest"}, **changes)) == 0
    assert run_config(write("straight", max_steps=last, **changes)) == 0
    assert_same_curve(curve(tmp_path / "killed"), curve(tmp_path / "straight"))


@pytest.mark.parametrize(
    ("device", "gpus", "processes"), [("cuda", 8, 1), ("cuda", 8, 8), ("cuda", 1, 1), ("cpu", 8, 1)]
)
def test_unused_gpus_are_named(device, gpus, processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    trainer = SimpleNamespace(device=torch.device(device), state=SimpleNamespace(world_size=processes))
    lines = list(_unused_gpus(trainer))
    if device == "cuda" and gpus > processes:
        assert lines == ["trains on 1 of 8 GPUs; start it with torchrun --nproc-per-node 8 -m opslot train to use all"]
    else:
        assert not lines


def run_with_a_loss_of_its_own(file):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        patch.setattr("opslot.trainer.prepare.averages_its_own_labels", lambda _: True)
        return run_config(file), error.getvalue()


def test_model_that_averages_its_own_labels_on_shards_of_sequences(write, ranks, tmp_path):
    """Such as Granite Speech; it raised in the first step, and named FSDP's class."""
    answers = ranks.run(run_with_a_loss_of_its_own, write("run", sp_size=2), timeout=60)
    assert {code for code, _ in answers} <= {1, 2}
    assert "Qwen3MoeForCausalLM cannot be trained on shards of sequences" in "".join(error for _, error in answers)
    assert not (tmp_path / "run").exists()


def run_in_folder_of_rank(file, folder):
    from opslot.distributed import shared_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_folder, "_SECONDS", 0.2)
        patch.chdir(Path(folder) / os.environ["RANK"])
        return run_and_capture(file)


def test_output_folder_of_each_rank_raises(ranks, write, tmp_path):
    """As on machines without a shared disk, where each checkpoint would lack the parts of the others."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    file = write("run", output_dir="out", max_steps=2)
    answers = ranks.run(run_in_folder_of_rank, file, str(tmp_path))
    assert sorted(code for code, _ in answers) == [1, 2]
    (error,) = (text for code, text in answers if code == 2)
    assert "train.output_dir=out is not one folder for all processes" in error
    assert "rank 1 on" in error
    assert not (tmp_path / "0" / "out" / "checkpoints").exists()
    assert not list(tmp_path.glob("*/out/.*"))


def test_checkpoint_of_one_rank_raises(ranks, write, tmp_path):
    assert run_config(write("run", output_dir=str(tmp_path / "0" / "out"), max_steps=2)) == 0
    (tmp_path / "1").mkdir()
    file = write("again", output_dir="out", **{"checkpoint.resume_from": "latest"})
    answers = ranks.run(run_in_folder_of_rank, file, str(tmp_path))
    assert sorted(code for code, _ in answers) == [1, 2]
    assert "rank 0 would resume from out/checkpoints/step_00000002, rank 1 from None" in "".join(e for _, e in answers)
