"""Global names that Transformers' constructors assign."""

from __future__ import annotations

import sys
import types

from opslot.patchgen import PatchConfig
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.upstream import UpstreamModule

GLOBAL_IN_CONSTRUCTOR = """
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel


known = None


class ToyMixer(nn.Module):
    def __init__(self):
        super().__init__()
        global is_fast, known
        is_fast = known = 3

    def forward(self, x):
        return x * is_fast


class ToyPreTrainedModel(PreTrainedModel):
    pass
"""


def test_globals_that_constructors_assign_reach_the_generated_module(monkeypatch):
    """Before 5.15 a Mamba mixer's forward reads what only its constructor defines."""
    from opslot.models.discovery.common_edits import add_common_edits
    from opslot.slots.protocol import copy_upstream_globals

    upstream = types.ModuleType("toy.upstream")
    exec(GLOBAL_IN_CONSTRUCTOR, vars(upstream))
    patch = PatchConfig("toy.upstream")
    source = UpstreamModule("toy.upstream", "5.9.0", GLOBAL_IN_CONSTRUCTOR)
    add_common_edits(patch, ModuleView(source))
    generated = types.ModuleType("toy.generated")
    exec(GLOBAL_IN_CONSTRUCTOR, vars(generated))
    for block in patch.final_blocks:
        if "upstream_globals" in block:
            exec(block, vars(generated))
    monkeypatch.setitem(sys.modules, "toy.upstream", upstream)
    monkeypatch.setitem(sys.modules, "toy.generated", generated)
    upstream.ToyMixer.__module__, generated.ToyMixer.__module__ = "toy.upstream", "toy.generated"
    assert generated.is_fast is None
    mixer = upstream.ToyMixer()
    copy_upstream_globals("toy.upstream", "toy.generated")
    mixer.__class__ = generated.ToyMixer
    assert mixer(2) == 6
    assert generated.known is None
