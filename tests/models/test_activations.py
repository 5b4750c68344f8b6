"""Kernels for activations of Transformers in models: they compute what eager code does."""

import copy

import pytest
import torch
from transformers import activations

import opslot
from opslot._base.errors import ConfigError
from opslot.bench.ops import call_sites_of
from opslot.models._apply import bind_everywhere
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config

# Architecture -> the variant of its activations, and its kernel.
MODELS = {
    "apertus": ("xielu", "triton"),
    "arcee": ("relu2", "triton"),
    "gpt2": ("gelu_tanh", "torch_fused"),
    "jais2": ("relu2", "triton"),
    "nanochat": ("relu2", "triton"),
    "nemotron": ("relu2", "triton"),
    "nemotron_h": ("relu2", "triton"),
    "phi": ("gelu_tanh", "torch_fused"),
}


def original_of(arch):
    torch.manual_seed(0)
    config = tiny_config(arch)
    model = class_of(config)._from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "act_fn" not in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model.eval()


def step(model):
    """Loss and gradients by name."""
    ids = torch.arange(3, 25).reshape(2, 11)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick("apertus", "arcee", "nanochat", "phi")
@pytest.mark.parametrize("arch", list(MODELS))
def test_models_train_like_the_original(arch):
    """With eager bit for bit, with the kernel up to rounding."""
    variant, kernel = MODELS[arch]
    original = original_of(arch)
    models = {name: copy.deepcopy(original) for name in ("eager", kernel)}
    for name, model in models.items():
        opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": name})
    rows = [row for row in opslot.explain(models[kernel]) if row.op == "mlp_activation"]
    assert {(row.variant, row.chosen) for row in rows} == {(variant, kernel)}
    expected, eager, computed = (step(model) for model in (original, models["eager"], models[kernel]))
    assert expected.keys() == eager.keys() == computed.keys()
    if variant == "xielu":
        assert sum("alpha" in name for name in computed) == 2 * len(rows[0].modules)
    for name, wanted in expected.items():
        assert torch.equal(eager[name], wanted), name
        torch.testing.assert_close(computed[name], wanted, rtol=1e-4, atol=1e-6, msg=name)
    model = models[kernel]
    opslot.restore(model)
    model.zero_grad()
    restored = step(model)
    assert all(torch.equal(restored[name], wanted) for name, wanted in expected.items())


def test_activations_that_all_models_share_keep_their_class():
    """OpenAI GPT's models hold one instance of Transformers' module `activations`."""
    config = tiny_config("openai-gpt")
    first, second = (class_of(config)._from_config(config) for _ in range(2))
    assert first.transformer.h[0].mlp.act is second.transformer.h[1].mlp.act
    opslot.apply(first, {"mlp_activation_implementation": "torch_fused"})
    assert type(second.transformer.h[0].mlp.act).__module__ == "transformers.activations"
    assert "torch_fused" in str(opslot.explain(first))
    assert first.transformer.h[0].mlp.act is first.transformer.h[1].mlp.act


def test_shared_activations_of_models_without_slots_keep_their_class():
    shared = activations.gelu_new
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), shared)
    ops = opslot.OpsImplementationConfig.make({"mlp_activation_implementation": "torch_fused"})
    bind_everywhere(model, ops, device="cpu", dtype=torch.float32)
    assert "torch_fused" in str(opslot.explain(model))
    assert model[1] is not shared
    assert type(shared) is activations.NewGELUActivation


def test_apply_that_raises_leaves_the_activations():
    model = torch.nn.Sequential(activations.gelu_new)
    with pytest.raises(ConfigError, match="found nothing to bind"):
        opslot.apply(model, "eager")
    assert model[0] is activations.gelu_new


def test_towers_have_the_kernel():
    """Qwen2-VL's tower has quick_gelu, the decoder's SiLU belongs to a gated MLP."""
    config = tiny_config("qwen2_vl")
    model = class_of(config)._from_config(config)
    opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": "triton"})
    rows = [row for row in opslot.explain(model) if row.op == "mlp_activation"]
    assert rows
    assert all((row.variant, row.chosen) == ("quick_gelu", "triton") for row in rows)


@pytest.mark.parametrize("arch", ["apertus", "arcee"])
def test_mlp_compiles_with_fullgraph(arch):
    model = original_of(arch)
    opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": "triton"})
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, model.config.hidden_size)
    torch.compiler.reset()
    compiled = torch.compile(mlp.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mlp(x))


def test_hooks_of_an_activation_run_around_the_kernel():
    model = original_of("arcee")
    opslot.apply(model, {"preset": "eager", "mlp_activation_implementation": "triton"})
    mlp, x = model.model.layers[0].mlp, torch.randn(3, model.config.hidden_size)
    calls = []
    mlp.act_fn.register_forward_hook(lambda *args: calls.append(args[0]))
    with_kernel = mlp(x)
    opslot.apply(model, "eager")
    torch.testing.assert_close(with_kernel, mlp(x))
    assert calls == [mlp.act_fn] * 2


def test_replaced_forward_of_an_activation_is_kept():
    model = original_of("arcee")
    act = model.model.layers[0].mlp.act_fn
    act.forward = torch.sigmoid
    with pytest.raises(ConfigError, match="the forward of the module was replaced"):
        opslot.apply(model, {"mlp_activation_implementation": "triton"})
    opslot.apply(model, "auto")
    assert act.forward is torch.sigmoid
    opslot.restore(model)
    assert act.forward is torch.sigmoid


def test_tuning_measures_activations_at_the_width_of_the_mlp():
    model = original_of("arcee")
    (site,) = [site for site in call_sites_of(model, torch.device("cpu"), torch.float32) if site.op == "mlp_activation"]
    assert site.variant == "relu2"
    assert dict(site.shape) == {"width": model.config.intermediate_size}
