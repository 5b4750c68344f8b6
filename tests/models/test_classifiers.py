"""Classifiers built from the checkpoints of other heads."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import opslot
from opslot._base.errors import CheckpointError
from opslot.verify.tiny import tiny_config

BERT = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}


@pytest.mark.parametrize("source", ["BertForPreTraining", "BertForMaskedLM", "BertModel"])
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_classifier_from_a_checkpoint_with_other_heads(source, kind, tmp_path):
    """Also with the names of the first BERT checkpoints, which Transformers still reads."""
    getattr(transformers, source)(transformers.BertConfig(**BERT)).save_pretrained(tmp_path)
    wanted = getattr(transformers, f"BertFor{kind}Classification").from_pretrained(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    model = opslot.build_foundation_model(
        tmp_path, weights_path=tmp_path, architecture=f"BertFor{kind}Classification", torch_dtype="float32"
    )
    stored = {name: tensor for name, tensor in wanted.items() if not name.startswith(("classifier", "bert.pooler"))}
    if kind == "Sequence" and source != "BertForMaskedLM":
        stored |= {name: tensor for name, tensor in wanted.items() if name.startswith("bert.pooler")}
    torch.testing.assert_close({name: model.state_dict()[name] for name in stored}, stored, rtol=0, atol=0)
    assert model.classifier.weight.abs().sum() > 0


def test_classifier_from_a_checkpoint_of_another_model_raises(tmp_path):
    transformers.BertModel(transformers.BertConfig(**{**BERT, "num_hidden_layers": 2})).save_pretrained(tmp_path)
    config = transformers.BertConfig(**BERT)
    with pytest.raises(CheckpointError, match=r"(?s)does not have.*encoder.layer.1"):
        opslot.build_foundation_model(config, weights_path=tmp_path, architecture="BertForSequenceClassification")


def test_fused_loss_notes_the_problem_type_in_the_config():
    config = tiny_config("qwen3")
    config.pad_token_id, config.num_labels = 0, 3
    model = transformers.Qwen3ForSequenceClassification(config)
    opslot.apply(model, {"cross_entropy_loss_implementation": "chunk_loss"})
    ids, labels = torch.arange(2 * 8).view(2, 8) + 1, torch.tensor([2, 0])
    model(input_ids=ids, labels=labels)
    assert model.config.problem_type == "single_label_classification"
    with pytest.raises(ValueError, match="batch_size"):
        # As in Transformers: labels for several classes do not change the kind of problem.
        model(input_ids=ids, labels=torch.rand(2, 3))
    assert torch.isfinite(model(input_ids=ids, labels=labels).loss)
