"""Transformers' name of the cache in forwards: `cache` from 5.24, past_key_values or cache_params before."""

import pytest
import torch
from torch import nn

from opslot._base.errors import ParallelError
from opslot.models._multimodal.conditional import ConditionalLayers
from opslot.models._sequence.packed_documents import _add_positions
from opslot.models._sequence.ulysses import _require_positions
from opslot.models.unlimited_ocr.masks import reference_window_mask
from opslot.ops._common.by_document import add_documents
from opslot.ops._common.documents import CACHE_ARGUMENTS, given_arguments, positions_of_documents

CACHE = object()
named = pytest.mark.parametrize("name", CACHE_ARGUMENTS)
RESTARTING = torch.tensor([[0, 1, 2, 0, 1]])


@named
def test_positions_after_a_cache_are_not_those_of_documents(name):
    assert positions_of_documents({"position_ids": RESTARTING}) is RESTARTING
    assert positions_of_documents({"position_ids": RESTARTING, name: CACHE}) is None
    assert add_documents(nn.Identity(), (), {"position_ids": RESTARTING, name: None}) is not None
    assert add_documents(nn.Identity(), (), {"position_ids": RESTARTING, name: CACHE}) is None


class Decoder(nn.Module):
    """A decoder whose layers may read features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return kwargs


def test_arguments_given_by_position_have_the_names_of_the_forward():
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert given_arguments(Decoder(), (ids, RESTARTING), {"cache": CACHE}) == {
        "input_ids": ids,
        "position_ids": RESTARTING,
        "cache": CACHE,
    }
    assert add_documents(Decoder(), (ids, RESTARTING), {}) is not None
    assert add_documents(Decoder(), (ids, RESTARTING), {"cache": CACHE}) is None


def test_positions_given_by_position_are_found_before_sequences_are_sharded():
    ids = torch.zeros(1, 5, dtype=torch.long)
    _require_positions(Decoder(), (ids, RESTARTING), {})
    with pytest.raises(ParallelError, match="without position_ids"):
        _require_positions(Decoder(), (ids,), {})


@named
def test_positions_are_not_added_after_a_cache(name):
    inputs = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    _, added = _add_positions(Decoder(), (), {**inputs, name: None})
    assert added["position_ids"].tolist() == RESTARTING.tolist()
    assert _add_positions(Decoder(), (), {**inputs, name: CACHE}) is None


@named
def test_layers_that_read_features_from_a_cache_are_not_skipped(name):
    decoder = Decoder()
    layers = ConditionalLayers(decoder, {decoder.layer: {"features"}})
    decoder(**{name: None})
    assert layers.skipped
    decoder(**{name: CACHE})
    assert not layers.skipped


@named
def test_mask_of_reference_windows_is_causal_without_a_cache(name):
    calls = []
    masks = [lambda which=which, **arguments: calls.append((which, arguments)) for which in ("causal", "windowed")]
    reference_window_mask(*masks, **{name: None})
    reference_window_mask(*masks, **{name: CACHE})
    assert calls == [("causal", {name: None, "allow_is_causal_skip": False}), ("windowed", {name: CACHE})]
