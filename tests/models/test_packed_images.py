"""A user's own loop with packed images: equals each document alone."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import opslot
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models._multimodal.modalities import (
    computes_features_inside,
    decoder_of,
    features_of,
    keep_documents_from_towers,
)
from opslot.verify.media import media_samples, packed_samples
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config


def build(name):
    config = tiny_config(name)
    model = random_model(config).eval()
    samples = media_samples(model)
    return model, packed_samples(RopePositions(config, type(model).__name__), samples)


@pytest.mark.quick("qwen3_vl", "kimi_k25", "gemma3", "llava", "glm4v", "instructblipvideo")
@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", "kimi_k25", "gemma3", "llava", "glm4v", "instructblipvideo", "deepseek_ocr2", "granite4_vision"],
)
def test_packed_equals_alone(name):
    """kimi_k25 passes cu_seq_lens_q to its tower; gemma3's image tokens see each other in documents alone.

    instructblipvideo passes position_ids to its Q-Former, which has position embeddings of its own text.
    """
    model, (packed, alone) = build(name)
    assert any("pixel_values" in row for row in packed)
    assert all(len(row["cu_seq_lens_q"]) > 2 for row in packed[:1])
    opslot.apply(model, "auto")
    assert worst_difference(train_step(model, packed), train_step(model, alone)) == ""


def test_restore_removes_hooks_of_towers():
    model, _ = build("llava")
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    opslot.apply(model, "auto")
    keep_documents_from_towers(model)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) > sum(hooks)
    opslot.restore(model)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


class _Features(nn.Module):
    """A model whose head is beside its encoder, as that of Qwen2.5-Omni in Transformers 5.9."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.language_model, self.lm_head = _Encoder(), _Encoder(), nn.Linear(4, 8)

    def get_decoder(self) -> nn.Module:
        return self.language_model

    def get_image_features(self, pixel_values, **kwargs):
        return self.encoder(pixel_values, **kwargs)

    def forward(self, pixel_values, **kwargs):
        return self.lm_head(self.language_model(self.get_image_features(pixel_values, **kwargs), **kwargs))


class _Encoder(nn.Module):
    def forward(self, x, **kwargs):
        return x


class _Thinker(_Features):
    """A model whose `get_decoder` returns itself, as those of Qwen's Omni models in Transformers 5.9."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.language_model
        self.model.get_decoder = lambda: self.model
        del self.language_model

    def get_decoder(self) -> nn.Module:
        return self

    def forward(self, pixel_values, **kwargs):
        return self.lm_head(self.model(self.get_image_features(pixel_values, **kwargs), **kwargs))


def test_language_model_of_a_model_that_returns_itself():
    """Such models could not be packed, and the tokens of their samples were not compared with their features."""
    model = _Thinker()
    assert decoder_of(model) is model.model
    assert not computes_features_inside(model)


def test_output_head_beside_encoders_has_no_hooks():
    """The fused loss does not run where it has."""
    model = _Features()
    keep_documents_from_towers(model)
    assert [len(child._forward_pre_hooks) for child in model.children()] == [1, 0, 0]


def test_features_that_are_an_attribute_of_the_outputs():
    """As those of Pixtral's encoder up to Transformers 5.17: without them its projector got no gradient on a rank."""
    outputs = BaseModelOutput(last_hidden_state=torch.zeros(1), hidden_states=(torch.zeros(1),))
    outputs.pooler_output = torch.ones(2)
    assert features_of(outputs) == {"pooler_output": outputs.pooler_output}
    del outputs.pooler_output
    assert features_of(outputs) == {"last_hidden_state": outputs.last_hidden_state}
