"""`lora:` in full runs of `opslot train`: equal to PEFT alone, on any mesh, resumed, and exported."""

import copy
import json
import tomllib
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from opslot import ConfigError, explain
from opslot.checkpoint import save_adapter
from opslot.checkpoint.adapters import adapter_layers
from opslot.cli import main
from opslot.distributed import destroy_parallel_state
from opslot.trainer.config import LoraConfig
from opslot.trainer.lora import add_adapters
from opslot.trainer.lora_settings import _OLDEST_PEFT
from opslot.verify.tiny import tiny_config
from tests.trainer.adapters.runs import SIZES, peft_losses, recorded_steps
from tests.trainer.runs import losses, run_config


@pytest.mark.quick("lora1", "lora3")
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"experts": True},
        {"use_rslora": True, "init": "gaussian", "alpha": 3, "modules_to_save": ["norm"]},
        {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*v_proj": 16}},
        {"dropout": 0.3},
    ],
)
def test_losses_equal_those_of_peft(trainer, tmp_path, lora):
    run = trainer("run", lora, lr_scheduler="constant", micro_batch_size=None)
    start = save_adapter(run.model, tmp_path / "start")
    steps = recorded_steps(run)
    run.train()
    expected = peft_losses(tmp_path / "base", start, steps, run.config.train)
    found = losses(tmp_path / "run")
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] != pytest.approx(found[0], rel=1e-4)


def test_frozen_weights_are_stored_in_the_dtype_of_the_computation(trainer, monkeypatch, request):
    request.addfinalizer(destroy_parallel_state)
    run = trainer("run", fsdp={"param_dtype": "bfloat16"})
    assert {p.requires_grad: p.dtype for p in run.model.parameters()} == {False: torch.bfloat16, True: torch.float32}
    run.train()
    monkeypatch.setattr("opslot.trainer.text.dtype_of_weights", lambda config: "float32")
    cast = trainer("cast", fsdp={"param_dtype": "bfloat16"})
    assert {p.dtype for p in cast.model.parameters()} == {torch.float32}
    cast.train()
    assert losses(run.output_dir) == losses(cast.output_dir)


@pytest.mark.quick("pissa")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_inits_from_the_weights_equal_those_of_peft(trainer, write, tmp_path, init):
    """What is saved are adapters of the unchanged base, and a resumed run continues."""
    lora = {"init": init} | ({"use_rslora": True} if init == "olora" else {"rank_pattern": {"k_proj": 2}})
    run = trainer("run", lora, lr_scheduler="constant", micro_batch_size=None)
    config = copy.deepcopy(run.model.peft_config["default"])
    assert config.init_lora_weights == init
    steps = recorded_steps(run)
    run.train()
    found = losses(tmp_path / "run")
    assert found == pytest.approx(peft_losses(tmp_path / "base", config, steps, run.config.train), rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "hf")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model.eval()(ids).logits, run.model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    assert main(["merge", str(tmp_path / "run" / "hf"), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert run_config(write("split", lora, lr_scheduler="constant", micro_batch_size=None, max_steps=2)) == 0
    resume = {"checkpoint.resume_from": "latest"}
    more = write("split", lora, lr_scheduler="constant", micro_batch_size=None, **resume)
    assert run_config(more) == 0
    assert losses(tmp_path / "split") == pytest.approx(found, rel=1e-5)


def test_dora_on_two_processes_and_merged(ranks, write, tmp_path):
    lora = {"use_dora": True, "merge": True}
    assert run_config(write("one", lora)) == 0
    assert ranks.run(run_config, write("two", lora)) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "two" / "hf").merge_and_unload().state_dict()
    found = load_file(tmp_path / "two" / "hf" / "merged" / "model.safetensors")
    for name in (name for name in expected if "self_attn" in name):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_exports_load_in_peft_and_transformers(trainer, tmp_path):
    run = trainer("run", {"merge": True, "modules_to_save": ["norm"], "experts": True})
    run.train()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        expected = run.model.eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "hf")
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-4, atol=1e-5)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf" / "merged")
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert main(["merge", str(tmp_path / "run" / "hf"), str(tmp_path / "merged")]) == 0
    written, exported = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", run.output_dir / "hf" / "merged")
    )
    assert written.keys() == exported.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in exported.items())
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert not torch.allclose(before, expected, atol=1e-3)
    assert not (tmp_path / "run" / "hf" / "model.safetensors").exists()
    config = json.loads((tmp_path / "run" / "hf" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.quick("True")
@pytest.mark.parametrize("use_dora", [False, True])
def test_generate_takes_adapters(write, tmp_path, capsys, use_dora):
    assert run_config(write("run", {"merge": True, "use_dora": use_dora}, lr=0.1)) == 0
    answers = []
    for folder in ("hf", "hf/merged"):
        capsys.readouterr()
        model = str(tmp_path / "run" / folder)
        assert main(["generate", model, "--prompt", "1 and", "--max-new-tokens", "4", "--device", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_only_adapters_are_trained_and_saved(trainer, tmp_path):
    run = trainer("run", max_steps=2)
    names = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in run.model.parameters() if p.requires_grad}
    assert "of them trained (LoRA)" in run.title
    run.train()
    saved = FileSystemReader(tmp_path / "run" / "checkpoints" / "step_00000002").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == names
    written = load_file(tmp_path / "run" / "hf" / "adapter_model.safetensors")
    assert {f"base_model.model.{name.replace('.default', '')}" for name in names} == written.keys()


@pytest.mark.quick("ep-None")
@pytest.mark.parametrize(("before", "after"), [(None, None), ("ep", None), (None, "fsdp")])
def test_resume_continues_the_loss_curve(ranks, write, tmp_path, before, after):
    def run(name, axis, **changes):
        file = write(name, {"modules_to_save": ["norm"]}, lr_scheduler="constant", **changes, **SIZES.get(axis, {}))
        assert (ranks.run(run_config, file) == [0, 0]) if axis else (run_config(file) == 0)

    run("straight", None)
    run("split", before, max_steps=2)
    run("split", after, **{"checkpoint.resume_from": "latest"})
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


@pytest.mark.quick("ep")
@pytest.mark.parametrize("axis", list(SIZES))
def test_two_processes_have_the_losses_of_one(ranks, write, tmp_path, axis):
    lora = {"merge": True, "experts": axis != "sp"}
    assert run_config(write("one", lora)) == 0
    assert ranks.run(run_config, write("two", lora, **SIZES[axis])) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for file in ("adapter_model.safetensors", "merged/model.safetensors"):
        expected, found = (load_file(tmp_path / name / "hf" / file) for name in ("one", "two"))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("muon")
@pytest.mark.parametrize("optimizer", ["muon", "adamw_torch"])
def test_resume_of_an_optimizer_on_other_ranks(ranks, write, settings, tmp_path, optimizer):
    """fsdp=2 and ep=2 equal one process, and a run of one continues on the other."""
    options = {"lr_scheduler": "constant", "optimizer": {"name": optimizer, "eps": 1e-6}, "lr": 1e-3}

    def run(name, axis, **changes):
        file = write(name, {"r": None, "target_modules": "all-linear"}, **options, **changes, **SIZES.get(axis, {}))
        assert (ranks.run(run_config, file) == [0, 0]) if axis else (run_config(file) == 0)
        return losses(tmp_path / name)

    straight = run("straight", None)
    assert run("fsdp", "fsdp") == pytest.approx(straight, rel=1e-4)
    assert run("ep", "ep", max_steps=2) == pytest.approx(straight[:2], rel=1e-4)
    assert run("ddp", "ddp") == pytest.approx(straight, rel=1e-4)
    assert run("ep", None, **{"checkpoint.resume_from": "latest"}) == pytest.approx(straight, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, "fsdp", "ddp"])
def test_8_bit_adamw_resumes_exactly(ranks, write, tmp_path, axis):
    """torchao compiles its step."""
    pytest.importorskip("torchao")
    whole = {"r": None, "target_modules": "all-linear"}
    options = {"lr_scheduler": "constant", "optimizer": {"name": "adamw_8bit"}} | SIZES.get(axis, {})

    def run(name, **changes):
        file = write(name, whole, **options, **changes)
        assert (ranks.run(run_config, file) == [0, 0]) if axis else (run_config(file) == 0)
        return losses(tmp_path / name)

    straight = run("straight")
    run("split", max_steps=2)
    assert run("split", **{"checkpoint.resume_from": "latest"}) == straight


def test_unmatched_targets_are_one_error(write, capsys):
    targets = ["q_proj", "qproj", "w1"]
    assert run_config(write("bad", {"target_modules": targets, "modules_to_save": ["embed_tokens", "head"]})) == 2
    error = capsys.readouterr().err
    assert error.count("opslot: error: ") == 1
    for line in ("qproj matches no module", "w1 matches no module", "head matches no module", "shares its weight"):
        assert line in error
    assert "hint: modules that can have one: q_proj, k_proj, v_proj, o_proj" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "lora.r=0 must be at least 1"),
        ({"r": 10**12}, "lora.r=1000000000000 must be at most 65536"),
        ({"rank_pattern": {"q_proj": 10**12}}, "lora.rank_pattern.q_proj=1000000000000 must be at most 65536"),
        ({"r": None}, "lora.target_modules needs lora.r"),
        ({"experts": True, "dropout": 0.1}, "weights, which have no dropout"),
        ({"dropout": 1.0}, "lora.dropout=1.0 must be in [0, 1)"),
        ({"target_modules": []}, "lora.target_modules is empty"),
        ({"target_modules": "q_proj("}, "is not a valid regular expression"),
        ({"target_modules": "q_proj"}, "for full names; use [q_proj] for a name"),
        ({"target_modules": "all"}, "; all-linear selects every linear layer but the output head"),
        ({"target_modules": "layers.*q_prj"}, "full names are such as model.layers.0.self_attn.q_proj"),
        ({"quantization": "int4"}, "lora.quantization: expected"),
        ({"rank_pattern": {"q_prj": 2}}, "lora.rank_pattern: q_prj matches no module with an adapter"),
        ({"alpha_pattern": {"q_proj": -1.0}}, "lora.alpha_pattern.q_proj=-1.0 must be above 0 and finite"),
        ({"alpha_pattern": {"up(": 1}}, "lora.alpha_pattern: up( is not a valid regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj has rank 0, which must be at least 1"),
        ({"use_dora": True, "experts": True}, "lora.use_dora cannot be combined with lora.experts"),
        ({"init": "pissa", "use_dora": True}, "lora.init=pissa changes the base weights"),
        ({"init": "eva"}, "lora.init: expected"),
    ],
)
def test_invalid_settings_raise(write, capsys, change, message):
    assert run_config(write("bad", change)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("version", "code"), [("0.19.1", 2), ("0.20.0", 0)])
def test_old_peft_is_a_problem(write, capsys, monkeypatch, version, code):
    monkeypatch.setattr("opslot.trainer.lora_settings.package_version", {"peft": version}.get)
    assert run_config(write("run", {})) == code
    problem = "lora needs peft 0.20 or later, and 0.19.1 is installed; pip install --upgrade peft"
    assert (problem in capsys.readouterr().err) == (code == 2)


def test_oldest_peft_is_that_of_the_package_requirements():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["lora"] == [f"peft>={_OLDEST_PEFT}"]
    assert set(extras["lora"]) < set(extras["examples"])


def test_all_linear_leaves_head_and_experts(trainer):
    run = trainer("run", {"target_modules": "all-linear"})
    adapted = {path.rsplit(".", 1)[-1] for path, _ in adapter_layers(run.model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("arch", "left_out"), [("deepseek_v4", "o_a_proj"), ("llama4_text", "router"), ("nemotron_h", "out_proj")]
)
def test_all_linear_leaves_layers_that_peft_cannot_adapt(arch, left_out):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(arch))
    assert left_out in {path.rsplit(".", 1)[-1] for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    add_adapters(model, LoraConfig(r=2), None)
    adapted = {path.rsplit(".", 1)[-1] for path, _ in adapter_layers(model)}
    assert adapted
    assert left_out not in adapted


def test_linear_layers_with_their_own_forward_get_adapters():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("falcon"))
    add_adapters(model, LoraConfig(r=2), None)
    assert "query_key_value" in {path.rsplit(".", 1)[-1] for path, _ in adapter_layers(model)}


def test_named_layers_that_are_not_linear_raise():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))
    lora = LoraConfig(r=2, target_modules=["o_a_proj", "o_b_proj"])
    with pytest.raises(ConfigError, match=r"o_a_proj is a DeepseekV4GroupedLinear, which computes something else"):
        add_adapters(model, lora, None)


def test_targets_that_mean_stacked_experts_raise(write, capsys):
    assert run_config(write("bad", {"target_modules": ["gate_proj"]})) == 2
    assert "gate_proj matches no module" in capsys.readouterr().err
    assert run_config(write("bad", {"target_modules": ["q_proj", "experts"]})) == 2
    assert "PEFT cannot add adapters" in capsys.readouterr().err


def test_merge_without_a_base_raises(tmp_path, capsys):
    assert main(["merge", str(tmp_path / "no"), str(tmp_path / "merged")]) == 2
    assert "is not a folder of adapters\n  found: no such folder\n  hint: give the folder hf" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["merge", str(tmp_path), str(tmp_path / "merged")]) == 2
    assert "the base model of" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    assert main(["merge", str(tmp_path), str(tmp_path / "merged"), "--base", str(tmp_path)]) == 2
    assert "has the adapters of a classifier" in capsys.readouterr().err


def test_merge_leaves_an_existing_folder(write, tmp_path, capsys):
    adapter, base = tmp_path / "run" / "hf", tmp_path / "base"
    assert run_config(write("run", max_steps=1)) == 0
    for folder in (adapter, base):
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert main(["merge", str(adapter), str(folder)]) == 2
        assert "exists and is not an empty folder" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert main(["explain", str(adapter)]) == 2
    assert "it has LoRA adapters: give the folder of their base model" in capsys.readouterr().err


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_classifier_heads_are_trained_whole(settings, write, tmp_path, capsys, quantization):
    if quantization:
        pytest.importorskip("bitsandbytes")
    settings["task"] = "classification"
    file = tmp_path / "labelled.jsonl"
    rows = [{"text": f"{'abc'[i % 3]} {i}", "label": "abc"[i % 3]} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings["data"] |= {"train_path": str(file)}
    assert run_config(write("run", {"quantization": quantization}, max_steps=2)) == 0
    written = load_file(tmp_path / "run" / "hf" / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in written
    assert json.loads((tmp_path / "run/hf/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    out = capsys.readouterr().out
    assert "opslot merge" not in out
    # The command that is printed loads the adapters with the names of the labels.
    command = out.split("load it with: ")[1].splitlines()[0]
    assert eval(command, {"peft": peft}).config.id2label == {0: "a", 1: "b", 2: "c"}
    assert main(["merge", str(tmp_path / "run" / "hf"), str(tmp_path / "merged")]) == 2
    assert "set lora.merge: true" in capsys.readouterr().err


@pytest.mark.quick("lora0")
@pytest.mark.parametrize("lora", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapted_head_keeps_the_fused_loss(ranks, trainer, settings, write, dense_base, tmp_path, lora):
    """Equal to PEFT's losses, in one process and in two."""
    settings["model"]["ops_implementation"] = {"cross_entropy_loss_implementation": "chunk_loss"}
    run = trainer("run", lora, lr_scheduler="constant", micro_batch_size=None)
    (row,) = [row for row in explain(run.model) if row.op == "cross_entropy_loss" and row.variant == "causal"]
    assert row.chosen == "chunk_loss"
    start = save_adapter(run.model, tmp_path / "start")
    steps = recorded_steps(run)
    run.train()
    found = losses(tmp_path / "run")
    assert found == pytest.approx(peft_losses(dense_base, start, steps, run.config.train), rel=1e-5)
    assert ranks.run(run_config, write("two", lora, lr_scheduler="constant")) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(found, rel=1e-5)


def test_other_adapters_of_a_head_say_why_they_compute_logits(trainer, dense_base):
    run = trainer("run", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}, max_steps=1)
    (row,) = [row for row in explain(run.model) if row.op == "cross_entropy_loss" and row.variant == "causal"]
    assert row.chosen == "eager"
    assert "adapter of the kind DoraLinearVariant" in row.why


def test_no_warning_of_frozen_adapters(trainer, capsys):
    trainer("run", freeze=["model.layers.0.*"]).train()
    assert "no gradient" not in capsys.readouterr().out


def test_warning_of_adapters_that_the_forward_does_not_run(trainer, capsys):
    run = trainer("run")
    for path, layer in adapter_layers(run.model):
        if path.endswith("o_proj"):
            layer.forward = layer.get_base_layer().forward
    run.train()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "no gradient in step 1 for the adapters of model.layers.*.self_attn.o_proj;" in warnings[0]
