"""Adapters (LoRA) of models with kernels."""

import pytest
import torch

import opslot
from tests.models.plain import original


def test_lora_matches_plain_peft():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)

    def wrapped(bind_first):
        model = original("qwen3")
        if bind_first is True:
            opslot.apply(model)
        torch.manual_seed(5)
        peft = get_peft_model(model, lora)
        if bind_first is False:
            opslot.apply(peft)
        return peft

    plain, before, after = wrapped(None), wrapped(True), wrapped(False)
    assert opslot.explain(after).chosen("attention") == opslot.explain(before).chosen("attention") == ("sdpa",)
    assert after.base_model.model.config._attn_implementation == "opslot_sdpa"

    def step(model):
        ids = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(2))
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    (a, ga), (b, gb), (c, gc) = step(plain), step(before), step(after)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    for name in ga:
        torch.testing.assert_close(ga[name], gb[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ga[name], gc[name], rtol=1e-4, atol=1e-5)


def test_lora_on_the_head_is_applied():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    ids = torch.randint(1, 97, (1, 7))
    torch.manual_seed(5)
    plain = get_peft_model(original("qwen3"), lora)
    expected = plain(input_ids=ids, labels=ids).loss
    for ops in ("auto", {"cross_entropy_loss_implementation": "chunk_loss"}):
        opslot.apply(plain, ops)
        torch.testing.assert_close(plain(input_ids=ids, labels=ids).loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ops", ["auto", {"cross_entropy_loss_implementation": "chunk_loss"}], ids=str)
def test_head_wrapped_after_binding(ops):
    from peft import LoraConfig, get_peft_model

    ids = torch.randint(1, 97, (1, 7))
    model = original("qwen3")
    opslot.apply(model, ops)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    found = peft(input_ids=ids, labels=ids).loss
    opslot.restore(peft)
    torch.testing.assert_close(peft(input_ids=ids, labels=ids).loss, found, rtol=1e-5, atol=1e-6)


def test_model_out_of_lora_shows_the_kernels_that_were_bound_inside():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(original("qwen3"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    opslot.apply(wrapped, {"rms_norm_implementation": "torch_fused", "cross_entropy_loss_implementation": "eager"})
    report = opslot.explain(wrapped.merge_and_unload())
    assert "torch_fused" in report.chosen("rms_norm")
    assert report.chosen("cross_entropy_loss") == ("eager",)


def test_attention_of_a_model_inside_lora_is_bound_and_restored():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    wrapped = peft.get_peft_model(original("qwen3_moe"), lora)
    inner = wrapped.base_model.model
    inner.config._experts_implementation = "grouped_mm"
    before = (inner.config._attn_implementation, "grouped_mm")
    opslot.apply(wrapped, {"attn_implementation": "sdpa", "moe_implementation": "eager"})
    assert (inner.config._attn_implementation, inner.config._experts_implementation) == ("opslot_sdpa", "eager")
    assert wrapped.config is inner.config
    assert inner.model.layers[0].self_attn.config is inner.config
    opslot.restore(wrapped)
    assert (inner.config._attn_implementation, inner.config._experts_implementation) == before
    assert inner.model.layers[0].mlp.experts.config._experts_implementation == before[1]
