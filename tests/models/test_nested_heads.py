"""Fused losses of heads that are more than a linear layer, and of logits with a bias of the model's own."""

import copy

import pytest
import torch
import transformers

import opslot
from opslot._base.errors import KernelError
from opslot.verify.random_model import random_ids, train_step, worst_difference
from opslot.verify.tiny import tiny_config
from tests.models.tiny import with_noise

OPS = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}


def model_of(name, arch):
    config = tiny_config(arch)
    torch.manual_seed(0)
    model = with_noise(getattr(transformers, name)(config).eval())
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def batch_of(model):
    ids = random_ids(model.config)
    labels = ids.clone()
    labels[0, 3:7] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param("BertForMaskedLM", "bert", marks=pytest.mark.quick),
        ("BertLMHeadModel", "bert"),
        ("RobertaForCausalLM", "roberta"),
        pytest.param("ElectraForMaskedLM", "electra", marks=pytest.mark.quick),
        pytest.param("AlbertForMaskedLM", "albert", marks=pytest.mark.quick),
        pytest.param("DistilBertForMaskedLM", "distilbert", marks=pytest.mark.quick),
        ("ModernBertForMaskedLM", "modernbert"),
        ("T5GemmaForConditionalGeneration", "t5gemma"),
        pytest.param("BartForConditionalGeneration", "bart", marks=pytest.mark.quick),
        pytest.param("MarianMTModel", "marian", marks=pytest.mark.quick),
        ("PegasusForConditionalGeneration", "pegasus"),
        pytest.param("MBartForConditionalGeneration", "mbart", marks=pytest.mark.quick),
    ],
)
def test_fused_loss_equals_transformers(name, arch):
    original = model_of(name, arch)
    model = copy.deepcopy(original)
    opslot.apply(model, OPS)
    batch = batch_of(model)
    assert model(**batch).logits is None
    assert worst_difference(train_step(model, [batch]), train_step(original, [batch])) == ""
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, original(**batch).logits)


def test_log_probs_have_the_bias_of_the_model():
    model = model_of("BartForConditionalGeneration", "bart")
    batch = batch_of(model)
    with torch.no_grad():
        wanted = model(**batch).logits.log_softmax(-1)
    wanted = wanted.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0].masked_fill(batch["labels"] == -100, 0)
    for ops in ("eager", OPS):
        applied = copy.deepcopy(model)
        opslot.apply(applied, ops)
        torch.testing.assert_close(applied(**batch, return_log_probs=True).log_probs.view_as(wanted), wanted)


def test_hooks_around_the_head_raise():
    model = model_of("BertForMaskedLM", "bert")
    opslot.apply(model, OPS)
    model.cls.predictions.register_forward_hook(lambda *args: None)
    with pytest.raises(KernelError, match="hooks"):
        model(**batch_of(model))
