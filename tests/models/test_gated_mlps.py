"""The slot of gated MLPs in models: each upstream form calls the kernel, and computes what eager code does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

import opslot
from opslot._base.device import DeviceFacts
from opslot.slots import KERNEL_REGISTRY, KernelRequest, walk_slots
from tests.models.sizes import SIZES

# model type -> (further fields, the variant of its MLPs, the launches of each)
MODELS = {
    "gemma": ({}, "standard"),
    "gemma3_text": ({}, "standard"),
    "gemma3n_text": (
        {
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0],
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
        },
        "standard",
    ),
    "llama": ({}, "standard"),
    "llama4_text": ({"intermediate_size_mlp": 48, "moe_layers": [], "num_local_experts": 2}, "standard"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "standard"),
    "bitnet": ({}, "standard"),
    "phi3": ({}, "fused_gate_up"),
    "glm4": ({}, "fused_gate_up"),
    "granitemoehybrid": (
        {
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "layer_types": ["attention"] * 2,
            "mamba_n_heads": 4,
        },
        "fused_gate_up",
    ),
    "modernbert-decoder": ({}, "fused_gate_up"),
    "t5": (
        {
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": 2,
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "standard",
    ),
}


def build(model_type, kernel):
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type][0])
    torch.manual_seed(0)
    return opslot.build_foundation_model(config, ops_implementation={"swiglu_mlp_implementation": kernel})


def run(model):
    ids = torch.arange(2, 16).reshape(2, 7)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    """Launches of the forward kernel."""
    from opslot.ops.swiglu_mlp import triton

    seen = []
    inner = triton._forward_launcher
    monkeypatch.setattr(triton, "_forward_launcher", lambda *args: (seen.append(args[4][0]), inner(*args)))
    return seen


@pytest.mark.quick("llama", "gemma3n_text", "granitemoehybrid", "modernbert-decoder", "llama4_text", "t5")
@pytest.mark.parametrize("model_type", list(MODELS))
def test_kernel_computes_what_eager_does(model_type, calls):
    model = build(model_type, "triton")
    variants = {slot.variant for slot in walk_slots(model) if slot.op_name == "swiglu_mlp"}
    assert MODELS[model_type][1] in variants
    found = run(model)
    layers = 4 if model.config.is_encoder_decoder else 2
    assert len(calls) == layers
    expected = run(build(model_type, "eager"))
    assert len(calls) == layers
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=5e-4, atol=5e-6, msg=name)


@pytest.mark.parametrize(
    ("model_type", "activation"), [("gemma3_text", "gelu_tanh"), ("llama", "silu"), ("phi3", "silu")]
)
def test_kernel_gets_the_models_activation(model_type, activation, calls):
    run(build(model_type, "triton"))
    assert calls == [activation] * 2


@pytest.mark.parametrize("model_type", ["gemma3_text", "phi3"])
def test_mlp_compiles_with_fullgraph(model_type):
    mlp = build(model_type, "triton").model.layers[0].mlp
    x = torch.randn(3, 32)
    torch.compiler.reset()
    compiled = torch.compile(mlp.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.parametrize("hidden_act", ["gelu_pytorch_tanh", "silu", "gelu", "relu2"])
def test_auto_selects_triton_on_a_gpu_for_each_activation(hidden_act, monkeypatch):
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: True)
    config = AutoConfig.for_model("llama", **SIZES | {"intermediate_size": 4096}, hidden_act=hidden_act)
    with torch.device("meta"):
        mlp = opslot.build_foundation_model(config, ops_implementation="eager").model.layers[0].mlp
    request = KernelRequest("swiglu_mlp", "standard", DeviceFacts("gpu", (9, 0)), torch.bfloat16, mlp)
    assert KERNEL_REGISTRY.resolve(request).chosen == "triton"


def test_activation_without_a_kernel_keeps_transformers_code():
    config = AutoConfig.for_model("llama", **SIZES, hidden_act="mish")
    model = opslot.build_foundation_model(config, ops_implementation="auto")
    (row,) = [row for row in opslot.explain(model) if row.op == "swiglu_mlp"]
    assert row.chosen == "eager"
    assert "its activation is MishActivation" in row.why
