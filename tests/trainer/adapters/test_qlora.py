"""Adapters on quantized weights."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import opslot
from opslot import ConfigError, explain
from opslot.checkpoint import save_adapter
from opslot.cli import main
from opslot.ops.linear.nf4 import dequantize
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.trainer.adapters.runs import peft_losses, recorded_steps
from tests.trainer.runs import losses, run_config


def train_as_peft(run, model, folder):
    """Train, and compare the losses with those of PEFT on `model`, which has the dequantized weights."""
    model.save_pretrained(folder / "dequantized")
    start = save_adapter(run.model, folder / "start")
    steps = recorded_steps(run)
    run.train()
    expected = peft_losses(folder / "dequantized", start, steps, run.config.train)
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-5)


def test_qlora_trains_on_quantized_weights(trainer, dense_base, write, tmp_path):
    """As a model whose linear layers hold the dequantized values, with what PEFT trains and saves."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    nf4 = {"quantization": "nf4", "target_modules": "all-linear"}
    run = trainer("run", nf4, lr_scheduler="constant", micro_batch_size=None)
    layers = {path: m for path, m in run.model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert len(layers) == 14
    assert all(layer.weight.dtype == torch.uint8 for layer in layers.values())
    model = AutoModelForCausalLM.from_pretrained(dense_base)
    with torch.no_grad():
        for path, layer in layers.items():
            values = dequantize(layer.weight)
            target = model.get_submodule(path.removesuffix(".base_layer")).weight
            assert not torch.equal(target, values)
            target.copy_(values)
    train_as_peft(run, model, tmp_path)
    assert "14 linear layers compute with nf4 (bitsandbytes) weights" in str(explain(run.model))
    assert run_config(write("split", nf4, lr_scheduler="constant", micro_batch_size=None, max_steps=2)) == 0
    resumed = write(
        "split", nf4, lr_scheduler="constant", micro_batch_size=None, **{"checkpoint.resume_from": "latest"}
    )
    assert run_config(resumed) == 0
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    assert main(["merge", str(tmp_path / "run" / "hf"), str(tmp_path / "merged")]) == 0


def test_modules_that_are_trained_whole_are_not_quantized(trainer):
    """Also the layers and the experts in them."""
    pytest.importorskip("bitsandbytes")
    whole = ["layers.1.mlp", "layers.1.self_attn"]
    run = trainer("run", {"quantization": "nf4", "modules_to_save": whole}, max_steps=1)
    quantized = {path for path, module in run.model.named_modules() if hasattr(module, "load_weight")}
    quantized |= {path for path, module in run.model.named_modules() if hasattr(module, "quantized_experts")}
    assert {"layers.0.mlp.experts", "layers.0.self_attn.q_proj"} <= {
        path.removeprefix("model.").removesuffix(".base_layer") for path in quantized
    }
    assert not any("layers.1." in path for path in quantized)
    run.train()


def test_nf4_without_bitsandbytes_raises(write, dense_base, capsys, monkeypatch):
    from opslot.models._adapters import nf4

    monkeypatch.setattr(nf4, "has_package", lambda name: False)
    assert run_config(write("bad", {"quantization": "nf4", "merge": True})) == 2
    error = capsys.readouterr().err
    assert "lora.quantization: nf4 needs bitsandbytes; pip install bitsandbytes" in error
    assert "lora.merge needs unquantized weights" in error


@pytest.mark.quick("False-none-grouped_mm", "False-full-eager", "True-selective-grouped_mm")
@pytest.mark.parametrize("kernel", ["grouped_mm", "eager"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("adapters_on_experts", [False, True])
def test_qlora_quantizes_experts(trainer, settings, tmp_path, kernel, checkpointing, adapters_on_experts):
    """As a model with the dequantized values; autograd keeps no dequantized weight."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    settings["model"]["ops_implementation"] = {"moe_implementation": kernel}
    run = trainer(
        "run",
        {"quantization": "nf4", "experts": adapters_on_experts},
        lr_scheduler="constant",
        micro_batch_size=None,
        activation_checkpointing=checkpointing,
    )
    assert "the weights of experts are nf4 (bitsandbytes) too" in str(explain(run.model))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    quantized = {n: p for n, p in run.model.named_parameters() if isinstance(p, bitsandbytes.nn.Params4bit)}
    assert sum("experts" in name for name in quantized) == 4
    assert not quantized.keys() & run.model.state_dict().keys()
    values = {n: dequantize(p) for n, p in quantized.items()}
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name.replace(".base_layer", "")).copy_(value)
    train_as_peft(run, model, tmp_path)
    assert not run.meter.uncounted_lines()
    if adapters_on_experts:
        assert main(["merge", str(tmp_path / "run" / "hf"), str(tmp_path / "merged")]) == 0
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "hf").merge_and_unload().state_dict()
        torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


def test_more_values_than_can_be_quantized_raises():
    pytest.importorskip("bitsandbytes")
    from opslot.models._adapters.nf4 import quantize_experts

    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.empty(256, 4096, 7168, device="meta"))
    quantize_experts(experts)
    with pytest.raises(ConfigError, match="more values than bitsandbytes quantizes"):
        experts.load_weights["weight"](experts.weight, "cpu")


def test_quantized_experts_are_dequantized_again_in_backward(monkeypatch):
    """So autograd keeps no dequantized weight."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from opslot.models._adapters import nf4

    packed = bitsandbytes.nn.Params4bit(torch.randn(4, 64, 64), requires_grad=False, quant_type="nf4").to("cpu")
    value = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    calls, dequantize = [], nf4.dequantize
    monkeypatch.setattr(nf4, "dequantize", lambda packed: calls.append(1) or dequantize(packed))
    x = torch.randn(4, 5, 64, requires_grad=True)
    call = nf4._Dequantized(lambda x, w: torch.bmm(x, w.transpose(1, 2)))
    out = call(x, packed)
    assert len(calls) == 1
    (found,) = torch.autograd.grad(out.square().sum(), x)
    assert len(calls) == 2
    (expected,) = torch.autograd.grad(torch.bmm(x, value.transpose(1, 2)).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.quick("experts-sizes2")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("dense", {}),
        ("experts", {}),
        ("experts", {"ep_size": 2}),
        ("dense", {"data_parallel_mode": "ddp"}),
        ("experts", {"data_parallel_mode": "ddp"}),
    ],
)
def test_qlora_on_two_processes_equals_one(ranks, write, request, tmp_path, kind, sizes):
    pytest.importorskip("bitsandbytes")
    if kind == "dense":
        request.getfixturevalue("dense_base")
    nf4 = {"quantization": "nf4", "target_modules": "all-linear", "modules_to_save": ["norm"]}
    nf4["experts"] = kind == "experts"
    assert run_config(write("one", nf4)) == 0
    assert ranks.run(run_config, write("two", nf4, **sizes)) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    expected, found = (load_file(tmp_path / name / "hf" / "adapter_model.safetensors") for name in ("one", "two"))
    assert expected.keys() == found.keys()
    assert any("experts" in name for name in found) == nf4["experts"]
    # The constants of a rank's experts are quantized with an offset of their own.
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 0.1 * tensor.norm()


def experts_held(file):
    from opslot.trainer.main import _trainer_class
    from opslot.trainer.parse import load_config

    config = load_config(file)
    model = _trainer_class(config.task)(config).model
    return {p.quant_state.shape[0] for n, p in model.named_parameters() if "experts" in n and hasattr(p, "quant_state")}


def test_ranks_hold_their_own_quantized_experts(ranks, write):
    pytest.importorskip("bitsandbytes")
    assert ranks.run(experts_held, write("two", {"quantization": "nf4"}, ep_size=2)) == [{2}, {2}]


def test_experts_without_weights_raise():
    from opslot.models._adapters.nf4 import quantize_layers

    model = random_model(tiny_config("longcat_flash"))
    opslot.apply(model, "eager")
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts cannot be quantized: some of its experts have no"):
        quantize_layers(model)


def test_unsupported_combinations_with_nf4_raise(write, settings, capsys, monkeypatch):
    from opslot.models._adapters import nf4

    monkeypatch.setattr(nf4, "has_package", lambda name: True)
    assert run_config(write("bad", {"quantization": "nf4"}, fsdp={"cpu_offload": True})) == 2
    assert "weights in nf4 cannot be offloaded" in capsys.readouterr().err
