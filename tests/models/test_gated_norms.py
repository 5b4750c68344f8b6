"""Gated norms of hybrids: kernels in whole models."""

import copy

import pytest
import torch

import opslot
from opslot.verify.random_model import random_ids, random_model, train_step, whole_batch, worst_difference
from opslot.verify.tiny import tiny_config


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on the CPU")
@pytest.mark.parametrize(
    ("arch", "variant", "changes"),
    [
        ("bamba", "gated_groups", {}),
        ("falcon_h1", "gated_groups", {"mamba_rms_norm": True}),
        ("falcon_h1", "gated_groups", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("kimi_linear", "gated_groups", {}),
        ("lara_mini", "gated_groups", {}),
        ("nemotron_h", "gated_groups", {}),
        ("qwen3_next", "gated", {}),
    ],
)
def test_gated_norms_compute_what_the_model_does(arch, variant, changes):
    config = tiny_config(arch)
    for name, value in changes.items():
        setattr(config, name, value)
    original = random_model(config)
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", "rms_norm_gated_implementation": "triton"})
    rows = [row for row in opslot.explain(model) if row.op == "rms_norm" and row.variant == variant]
    assert rows
    assert {row.chosen for row in rows} == {"triton"}
    batch = [whole_batch(random_ids(config))]
    assert worst_difference(train_step(model, batch), train_step(original, batch)) == ""
