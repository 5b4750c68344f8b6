"""Experts whose activation is not SiLU, or that compute more than gated experts in [E, 2I, H] and [E, H, I]."""

import copy

import pytest
import torch

import opslot
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config


@pytest.mark.quick("*-grouped_mm", "qwen3_moe-*-fused_triton", "nemotron_h-*-fused_triton")
@pytest.mark.parametrize("kernel", ["grouped_mm", "fused_triton"])
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
        ("qwen3_moe", {"hidden_act": "relu2"}),
        ("aria_text", {}),
        ("dbrx", {}),
        ("llama4_text", {"num_experts_per_tok": 2}),
        ("longcat_flash", {}),
        ("nemotron_h", {}),
        ("step3p7", {}),
    ],
)
def test_experts_compute_what_the_model_does(arch, changes, kernel):
    if kernel == "fused_triton" and torch.cuda.is_available():
        pytest.skip("the model is on the CPU")
    torch.manual_seed(0)
    config = tiny_config(arch)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    original = class_of(config)._from_config(config)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", "moe_implementation": kernel})
    assert set(opslot.explain(model).chosen("moe_experts")) == {kernel}
    ids = torch.randint(3, config.get_text_config().vocab_size, (2, 11))
    losses = [m(input_ids=ids, labels=ids).loss for m in (original, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    experts = [name for name, _ in original.named_parameters() if "experts" in name]
    assert experts
    for name in experts:
        wanted, found = original.get_parameter(name).grad, model.get_parameter(name).grad
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
