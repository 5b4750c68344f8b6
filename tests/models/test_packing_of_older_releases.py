"""Packed documents with code as older releases of Transformers have it, which is not installed here."""

from __future__ import annotations

import types
from itertools import pairwise

import pytest
import torch

import opslot
from opslot._base.errors import KernelError
from opslot.models.discovery import discover
from opslot.models.discovery.sequences import find_unsplit_sequences
from opslot.ops.causal_conv1d import forms
from opslot.patchgen.engine import generate
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.source import Release
from opslot.patchgen.upstream import UpstreamModule
from opslot.slots.protocol import KEEPS_SEQUENCES, MASKS_WITHOUT_POSITIONS
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config

CONVOLUTION = '''
def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    """Depthwise, causal."""
    padded = nn.functional.pad(hidden_states, (weight.shape[-1] - 1, 0))
    return nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
'''
# From 5.15 to 5.17: LFM2's convolution takes the index of documents, which its layer gets, and no keyword arguments.
WITH_INDEX = """
class ToyMixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.conv = nn.Conv1d(config, config, 3, groups=config)

    def forward(self, hidden_states, attention_mask=None, seq_idx=None):
        mixed = hidden_states.transpose(-1, -2)
        mixed = causal_conv1d_fn(mixed, self.conv.weight.squeeze(1), self.conv.bias, seq_idx=seq_idx)
        return mixed.transpose(-1, -2)
"""
# Before 5.15: no function, and a module that takes neither.
WITHOUT = """
class ToyMixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.conv = nn.Conv1d(config, config, 3, groups=config, padding=2)

    def forward(self, hidden_states, attention_mask=None):
        length = hidden_states.shape[1]
        return self.conv(hidden_states.transpose(-1, -2))[..., :length].transpose(-1, -2)
"""
# In 5.13 and 5.14 LFM2's takes the index of documents, but has no function.
INDEX_WITHOUT_FUNCTION = WITHOUT.replace("attention_mask=None", "attention_mask=None, seq_idx=None")
# Before 5.15: a recurrence over time, one token after another, as Jamba's without its kernels.
RECURRENT = """
class ToyMixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(config))

    def forward(self, hidden_states, attention_mask=None):
        state, states = torch.zeros_like(hidden_states[:, 0]), []
        for step in range(hidden_states.shape[1]):
            state = self.decay * state + hidden_states[:, step, :]
            states.append(state)
        return torch.stack(states, dim=1)
"""
MODEL = """
class GradientCheckpointingLayer(nn.Module):
    pass


class PreTrainedModel(nn.Module):
    _can_record_outputs = {}


class ToyDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.mixer = ToyMixer(config)
        self.mlp = nn.Linear(config, config)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        mixed = self.mixer(hidden_states=hidden_states, attention_mask=attention_mask{seq_idx})
        return hidden_states + self.mlp(hidden_states + mixed)


class ToyPreTrainedModel(PreTrainedModel):
    pass


class ToyModel(ToyPreTrainedModel):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([ToyDecoderLayer(config) for _ in range(2)])

    def forward(self, hidden_states, position_ids=None, **kwargs):
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states
"""
SEQ_IDX = ", seq_idx=kwargs.get('seq_idx')"


@pytest.mark.parametrize(
    ("mixer", "seq_idx", "slots"),
    [
        (WITH_INDEX, SEQ_IDX, ["ToyMixer"]),
        (INDEX_WITHOUT_FUNCTION, SEQ_IDX, []),
        (WITHOUT, "", []),
        (RECURRENT, "", []),
    ],
    ids=["index of documents", "index of documents, convolution", "convolution", "recurrence"],
)
def test_packed_documents_equal_the_documents_alone(tmp_path, monkeypatch, mixer, seq_idx, slots):
    # Any function that computes it: the reviewed one is Transformers'.
    monkeypatch.setattr(forms, "_REVIEWED", fingerprint(CONVOLUTION.strip()))
    text = f"import torch\nfrom torch import nn\n{CONVOLUTION}\n{mixer}\n{MODEL.replace('{seq_idx}', seq_idx)}"
    (tmp_path / "models/toy").mkdir(parents=True)
    (tmp_path / "models/toy/modeling_toy.py").write_text(text)
    release = Release("5.9.0", tmp_path)
    found = discover("toy", release)
    assert [match.symbol for match in found.matches] == slots
    module = types.ModuleType("toy")
    torch.manual_seed(0)
    exec(generate(found.patch, release), vars(module))
    model = module.ToyModel(8)
    bounds = [0, 5, 6, 12]
    x = torch.randn(1, bounds[-1], 8)
    alone = torch.cat([model(x[:, a:b]) for a, b in pairwise(bounds)], dim=1)
    assert not torch.allclose(model(x), alone)
    torch.testing.assert_close(model(x, cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32)), alone)


# Up to 5.17 Moshi makes a mask only of padding, and its attention is causal by itself without one.
MASKS = """
class ToyDecoderLayer(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        return self.attention(hidden_states, attention_mask)


class ToyPreTrainedModel(PreTrainedModel):
    pass


class ToyModel(ToyPreTrainedModel):
    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        causal_mask = None
        {condition}
            causal_mask = create_causal_mask(attention_mask=attention_mask, position_ids=position_ids)
        return self.layer(hidden_states, causal_mask)
"""


@pytest.mark.parametrize(("condition", "kept"), [("if attention_mask is not None:", True), ("if True:", False)])
def test_masks_made_of_padding_only_keep_sequences(condition, kept):
    module = ModuleView(UpstreamModule("toy", "5.9.0", MASKS.replace("{condition}", condition)))
    facts = [(fact.name, fact.attribute) for fact in find_unsplit_sequences(module)]
    assert (("ToyPreTrainedModel", KEEPS_SEQUENCES) in facts) == kept


CHUNKS = """
class ToyAttention(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, hidden_states, attention_mask)


class ToyDecoderLayer(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        return self.attention(hidden_states, attention_mask)


class ToyPreTrainedModel(PreTrainedModel):
    pass


class ToyModel(ToyPreTrainedModel):
    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        mask_kwargs = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.layer(hidden_states, create_chunked_causal_mask(**mask_kwargs))
"""


@pytest.mark.parametrize(("release", "ignored"), [("5.9.0", True), ("5.21.0", True), ("5.23.0", False)])
def test_chunks_of_older_releases_are_counted_from_the_start_of_the_row(release, ignored):
    facts = [*find_unsplit_sequences(ModuleView(UpstreamModule("toy", release, CHUNKS)))]
    reasons = [fact.value for fact in facts if fact.attribute == MASKS_WITHOUT_POSITIONS]
    assert reasons == (["its masks count chunks from the start of the row, not from that of each document"] * ignored)


def test_positions_that_restart_raise_where_masks_ignore_them(monkeypatch):
    config = tiny_config("llama")
    model = random_model(config).eval()
    opslot.apply(model, "eager")
    ids, positions = torch.arange(3, 11)[None], torch.cat([torch.arange(5), torch.arange(3)])[None]
    model(input_ids=ids, position_ids=positions)
    monkeypatch.setattr(type(model), MASKS_WITHOUT_POSITIONS, "its masks ignore them", raising=False)
    opslot.bind(model, "eager")
    with pytest.raises(KernelError, match=r"keep packed documents \(position_ids that restart\) apart"):
        model(input_ids=ids, position_ids=positions)
    model(input_ids=ids, position_ids=torch.arange(8)[None])
