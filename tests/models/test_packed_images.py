"""A user's own loop with packed images: equals each document alone."""

import pytest

import opslot
from opslot.data.rope_positions import RopePositions
from opslot.models._modalities import keep_documents_from_towers
from opslot.verify.media import media_samples, packed_samples
from opslot.verify.random_model import random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config


def build(name):
    config = tiny_config(name)
    model = random_model(config).eval()
    samples = media_samples(model)
    return model, packed_samples(RopePositions(config, type(model).__name__), samples)


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_k25", "gemma3", "llava", "glm4v"])
def test_packed_equals_alone(name):
    """kimi_k25 passes cu_seq_lens_q to its tower; gemma3's image tokens see each other in documents alone."""
    model, (packed, alone) = build(name)
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
