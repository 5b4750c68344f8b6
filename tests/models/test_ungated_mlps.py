"""The slot of MLPs without a gate in models: kernels compute what eager code does, for the activations they have."""

import copy

import pytest
import torch
from transformers import AutoConfig

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.models.discovery import discover
from opslot.slots import walk_slots
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config
from tests.models.sizes import SIZES

# Architecture -> the variant of its MLPs.
MODELS = {
    "apertus": "xielu",
    "arcee": "relu2",
    "jais2": "relu2",
    "nanochat": "relu2",
    "nemotron": "relu2",
    "nemotron_h": "relu2",
}


def original_of(arch):
    torch.manual_seed(0)
    config = tiny_config(arch)
    model = class_of(config)._from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "act_fn" not in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def step(model):
    """Loss and gradients by name."""
    ids = torch.arange(3, 25).reshape(2, 11)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick("apertus", "arcee", "nanochat")
@pytest.mark.parametrize("arch", list(MODELS))
def test_models_train_like_the_original(arch):
    """With eager bit for bit, with the kernel up to rounding."""
    original = original_of(arch)
    models = {kernel: copy.deepcopy(original) for kernel in ("eager", "triton")}
    for kernel, model in models.items():
        opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": kernel})
    slots = [slot for slot in walk_slots(models["triton"]) if slot.op_name == "mlp_activation"]
    assert slots
    assert {slot.variant for slot in slots} == {MODELS[arch]}
    assert set(opslot.explain(models["triton"]).chosen("mlp_activation")) == {"triton"}
    expected, eager, triton = (step(model) for model in (original, models["eager"], models["triton"]))
    assert expected.keys() == eager.keys() == triton.keys()
    if MODELS[arch] == "xielu":
        assert sum("alpha" in name for name in triton) == 2 * len(slots)
    for name, wanted in expected.items():
        assert torch.equal(eager[name], wanted), name
        torch.testing.assert_close(triton[name], wanted, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("arch", ["apertus", "arcee"])
def test_mlp_compiles_with_fullgraph(arch):
    model = original_of(arch)
    opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": "triton"})
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, model.config.hidden_size)
    torch.compiler.reset()
    compiled = torch.compile(mlp.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.parametrize(("arch", "activation"), [("phi", "NewGELUActivation"), ("apertus", "ReLUSquaredActivation")])
def test_other_activations_keep_transformers_code(arch, activation):
    config = AutoConfig.for_model(arch, **SIZES, **({"hidden_act": "relu2"} if arch == "apertus" else {}))
    model = opslot.build_foundation_model(config, ops_implementation="auto")
    (row,) = [row for row in opslot.explain(model) if row.op == "mlp_activation"]
    assert row.chosen == "eager"
    assert f"its activation is {activation}, the kernels compute" in row.why
    with pytest.raises(ConfigError, match=f"mlp_activation_implementation='triton': its activation is {activation}"):
        opslot.apply(model, {"mlp_activation_implementation": "triton"})


def test_activation_with_hooks_runs_them():
    model = original_of("arcee")
    opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": "triton"})
    mlp, x = model.model.layers[0].mlp, torch.randn(3, model.config.hidden_size)
    calls = []
    mlp.act_fn.register_forward_hook(lambda *args: calls.append(args[0]))
    with pytest.raises(KernelError, match="the activation ReLUSquaredActivation has hooks"):
        mlp(x)
    assert calls == []
    opslot.apply(model, "eager")
    mlp(x)
    assert calls == [mlp.act_fn]


def test_activations_of_towers_and_fixed_ones_are_skipped():
    reasons = {skip.symbol: skip.reason for arch in ("qwen3_vl", "aria") for skip in discover(arch).skips}
    assert reasons["Qwen3VLVisionMLP"].startswith("is in an image or audio tower")
    assert reasons["AriaProjectorMLP"].startswith("has a fixed activation")
    assert not any(skip.op == "swiglu_mlp" for skip in discover("arcee").skips)
