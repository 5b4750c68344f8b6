from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import opslot
from opslot._base.errors import ParallelError
from opslot.models._own_loss import (
    averages_its_own_labels,
    call_with_share_of_loss,
    compares_labels_in_place,
    keeps_labels_in_place,
    why_not_causal,
)
from opslot.models._sequence.ulysses import _require_positions
from opslot.models.parallelize import _warn_of_local_means, _warn_once
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config


class OwnForCausalLM(nn.Module):
    config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = torch.randn(*input_ids.shape, 8)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BartForCausalLM", True),
        ("BertForMaskedLM", True),
        ("DistilBertForMaskedLM", True),
        ("GPT2LMHeadModel", False),
        ("MarianMTModel", True),
        ("SeamlessM4TForTextToText", True),
        ("EuroBertForMaskedLM", False),
        ("LlamaForCausalLM", False),
        ("Qwen3VLForConditionalGeneration", False),
    ],
)
def test_losses_of_transformers(name, expected):
    cls = getattr(transformers, name)
    assert averages_its_own_labels(cls.__new__(cls)) is expected


def test_generated_class_passes_the_number_of_labels_on():
    import opslot.generated.llama as generated

    cls = generated.LlamaForCausalLM
    assert not averages_its_own_labels(cls.__new__(cls))


def test_losses_of_micro_batches_add_up():
    """The loss of a call is its share in the mean over the labels of the step; 0 for a call without labels."""
    torch.manual_seed(0)
    model = OwnForCausalLM()
    parts = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-100, 5, -100, -100]]), torch.full((1, 4), -100)]
    calls = [{"input_ids": labels.clamp(min=0), "labels": labels} for labels in parts]
    outputs = [call_with_share_of_loss(model, call, num_items_in_batch=4) for call in calls]
    logits = torch.cat([output.logits[:, :-1] for output in outputs]).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, torch.cat(parts)[:, 1:].flatten())
    torch.testing.assert_close(sum(output.loss for output in outputs), expected)
    assert outputs[-1].loss == 0


@pytest.mark.parametrize("arch", ["bart", "distilbert", "t5"])
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_losses_that_do_not_shift_labels(arch, ops):
    """A causal model learns to predict the next token; others predict the labels in place."""
    name = {"bart": "BartForCausalLM", "distilbert": "DistilBertForMaskedLM", "t5": "T5ForConditionalGeneration"}[arch]
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(arch)).eval()
    opslot.apply(model, ops)
    labels = torch.randint(3, 60, (2, 6))
    calls = [{"input_ids": labels, "labels": labels.masked_fill(torch.rand(2, 6) < 0.4, -100)} for _ in range(2)]
    calls.append({"input_ids": labels, "labels": torch.full_like(labels, -100)})
    shifted = [call["labels"][:, 1:] if name.endswith("CausalLM") else call["labels"] for call in calls]
    items = sum(int((own != -100).sum()) for own in shifted)
    found = sum(call_with_share_of_loss(model, call, num_items_in_batch=items).loss for call in calls)
    expected = 0.0
    for call, own in zip(calls, shifted, strict=True):
        if model.config.is_encoder_decoder:
            call = {**call, "decoder_input_ids": model._shift_right(call["labels"])}
        logits = model(**{k: v for k, v in call.items() if k != "labels"}).logits[:, : own.shape[1]]
        expected += nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / items
    torch.testing.assert_close(found, expected)
    found.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_z_loss_is_not_added_once_for_each_call():
    config = tiny_config("bamba")
    config.z_loss_coefficient = 0.5
    model = transformers.BambaForCausalLM(config).eval()
    labels = torch.randint(3, 60, (3, 6))
    calls = [{"input_ids": own, "labels": own} for own in (labels[:1], labels[1:])]
    found = sum(call_with_share_of_loss(model, call, num_items_in_batch=15).loss for call in calls)
    torch.testing.assert_close(found, call_with_share_of_loss(model, {"input_ids": labels, "labels": labels}, 15).loss)
    torch.testing.assert_close(found, model(input_ids=labels, labels=labels).loss)
    assert model.z_loss_coefficient == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BartForCausalLM", True),
        ("BertForMaskedLM", True),
        ("GraniteSpeechForConditionalGeneration", False),
        ("T5ForConditionalGeneration", True),
    ],
)
def test_own_losses_with_labels_in_place(name, expected):
    cls = getattr(transformers, name)
    assert compares_labels_in_place(cls.__new__(cls)) is expected


def test_sharded_sequences_raise():
    labels = torch.zeros(1, 4, dtype=torch.long)
    call = {"position_ids": labels, "labels": labels, "shift_labels": labels, "num_items_in_batch": 4}
    with pytest.raises(ParallelError, match="computes the loss from its own labels"):
        _require_positions(OwnForCausalLM(), (), call)
    _require_positions(OwnForCausalLM(), (), {"position_ids": labels})


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [
        ("EuroBertForMaskedLM", "eurobert", True),
        ("LlamaForTokenClassification", "llama", True),
        ("LlamaForCausalLM", "llama", False),
        ("LlamaModel", "llama", False),
    ],
)
def test_losses_with_labels_in_place(name, arch, expected):
    with torch.device("meta"):
        model = getattr(transformers, name)(tiny_config(arch))
    assert keeps_labels_in_place(model) is expected


@pytest.mark.parametrize(
    ("name", "arch", "options", "expected"),
    [
        ("BertLMHeadModel", "bert", {}, "BertLayer attends to later tokens, since is_decoder is false in its config"),
        ("BertLMHeadModel", "bert", {"is_decoder": True}, None),
        ("T5ForConditionalGeneration", "t5", {}, "its encoder reads the tokens that its decoder predicts"),
        (
            "ModernBertForMaskedLM",
            "modernbert",
            {},
            "ModernBertForMaskedLM predicts masked tokens, from earlier and later ones",
        ),
        ("ModernBertDecoderForCausalLM", "modernbert-decoder", {}, None),
        ("BartForCausalLM", "bart", {}, None),
        ("GPTNeoXForCausalLM", "gpt_neox", {}, None),
        ("LlamaForCausalLM", "llama", {}, None),
    ],
)
def test_models_that_are_not_causal(name, arch, options, expected):
    config = tiny_config(arch)
    for option, value in options.items():
        setattr(config, option, value)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    assert why_not_causal(model) == expected


@pytest.mark.parametrize("arch", ["qwen2_audio", "qwen3"])
def test_warning_on_several_ranks_where_the_loss_ignores_the_number_of_labels(arch, caplog):
    model = random_model(tiny_config(arch)).eval()
    model.register_forward_pre_hook(_warn_of_local_means, with_kwargs=True)
    ids = random_ids(model.config)
    _warn_once.cache_clear()
    call_with_share_of_loss(model, {"input_ids": ids, "labels": ids}, num_items_in_batch=80)
    assert not caplog.text
    model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(80))
    assert ("ignores num_items_in_batch" in caplog.text) == (arch == "qwen2_audio")
