"""LoRA adapters on stacked experts: a kernel with the adapters added equals PEFT's parametrization."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import opslot
from opslot.verify.architecture import tiny_config


def loss_and_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_equals_the_parametrization_of_peft(arch, kernel):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(arch))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    names = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=names, init_lora_weights=False)
    expected = get_peft_model(model, lora)
    found = copy.deepcopy(expected)
    opslot.apply(found, {"preset": "eager", "moe_implementation": kernel})
    assert "adapters" not in str(opslot.explain(found))
    opslot.parallelize(found)
    assert "adapters" in str(opslot.explain(found))
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    (loss, gradients), (expected_loss, wanted) = (loss_and_gradients(m, ids) for m in (found, expected))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert len(wanted) > 4
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5)
    with found.disable_adapter(), expected.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)
