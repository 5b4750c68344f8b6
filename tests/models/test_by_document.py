"""Modules that mix tokens without a kernel that knows documents run once for each packed document."""

import ast
import copy

import pytest
import torch
from torch import nn

import opslot
from opslot._base.errors import ConfigError
from opslot.models._hooks import remove_hooks
from opslot.models.discovery import discover
from opslot.models.discovery.sequences import _mixing_expression
from opslot.models.parallelize import _check_experts, parallel_plan
from opslot.ops._common.by_document import PerDocument, by_document
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.packed_documents import pass_documents_to
from opslot.patchgen.source import installed_release
from opslot.patchgen.upstream import UpstreamModule
from opslot.slots.protocol import BY_DOCUMENT, keeps_sequences, why_by_document
from opslot.verify import check_architecture
from opslot.verify.isolated import Processes
from opslot.verify.random_model import packed_batches, random_ids, random_model, train_step, worst_difference
from opslot.verify.tiny import tiny_config
from opslot.verify.two_processes import two_process_step


@pytest.mark.quick("bloom", "deepseek_v4")
@pytest.mark.parametrize(
    "arch",
    [
        "bloom",
        "deepseek_v4",
        "doge",
        "glm5_next",
        "inkling",
        "inkling2_text",
        "inkling2",
        "mpt",
        "qwen4_exp",
        "recurrent_gemma",
        "xglm",
        "zaya",
    ],
)
def test_packed_documents_equal_the_documents_alone(arch):
    found = check_architecture(arch, checks=["packed"])["packed"]
    assert found.result == "passed", found.detail


@pytest.mark.parametrize("source", [6, 12])
def test_cross_attention_takes_the_encoder_states_of_the_row(source):
    """Also where there are as many of them as tokens, which they are not parts of."""
    config = tiny_config("xglm")
    config.add_cross_attention = True
    original = random_model(config).eval()
    model = copy.deepcopy(original)
    opslot.apply(model)
    ids = torch.arange(3, 27).reshape(2, 12)
    states, mask = torch.randn(2, source, config.d_model), torch.ones(2, source, dtype=torch.long)
    mask[:, -2:] = 0
    given = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 5, 12, 17, 24], dtype=torch.int32), "max_length_q": 7}
    with torch.no_grad():
        alone = torch.cat([original(part, **given).logits for part in ids.split([5, 7], 1)], 1)
        for packed in ({}, boundaries):
            found = model(ids, position_ids=positions, **given, **packed).logits
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def test_alibi_of_several_rows():
    """It comes as [rows * heads, 1, tokens]."""
    config = tiny_config("bloom")
    original = random_model(config).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    ids = torch.arange(3, 36).reshape(3, 11)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).expand(3, -1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [original(input_ids=document, use_cache=False).logits for document in ids.split([6, 5], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", ["auto", "eager"])
def test_positions_that_restart_separate_documents_without_naming_use_cache(ops):
    """Transformers' masks ignore such positions where there is a cache, which models make by default."""
    config = tiny_config("qwen3")
    model = random_model(config).eval()
    assert model.config.use_cache
    opslot.apply(model, ops)
    ids = random_ids(config)
    positions = torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions)
        alone = [model(input_ids=document).logits for document in ids.split([12, 8], 1)]
        whole = model(input_ids=ids, position_ids=torch.arange(20).expand(2, -1))
    assert packed.past_key_values is None
    assert whole.past_key_values.get_seq_length() == 20
    torch.testing.assert_close(packed.logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    opslot.restore(model)
    assert model(input_ids=ids, position_ids=positions).past_key_values is not None


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5_text"])
def test_positions_that_skip_numbers_are_one_document(arch):
    """As for longer contexts that are trained on short rows; Transformers makes a cache of them."""
    config = tiny_config(arch)
    model = random_model(config).eval()
    ids = random_ids(config)
    positions = (torch.arange(20) + 30 * (torch.arange(20) >= 12)).expand(2, -1)
    expected = model(input_ids=ids, position_ids=positions)
    opslot.apply(model)
    found = model(input_ids=ids, position_ids=positions)
    assert found.past_key_values.get_seq_length() == 20
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def deepseek_v4():
    config = tiny_config("deepseek_v4")
    model = random_model(config).eval()
    opslot.apply(model)
    return config, model


def test_explain_names_the_modules_that_run_for_each_document(deepseek_v4):
    note = opslot.explain(deepseek_v4[1]).note
    assert "DeepseekV4Attention" in note
    assert "one call for each packed document, since DeepseekV4" in note


def test_documents_are_known_by_positions_alone_and_with_gradient_checkpointing(deepseek_v4):
    config, model = deepseek_v4
    (packed,), _ = packed_batches(random_ids(config))
    wanted = train_step(model, [packed])
    positions = {name: x for name, x in packed.items() if not name.startswith(("cu_seq_lens", "max_length"))}
    assert not worst_difference(train_step(model, [positions]), wanted)
    checkpointed = copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable()
    assert not worst_difference(train_step(checkpointed, [packed, packed]), train_step(model, [packed, packed]))
    without_hooks = copy.deepcopy(model)
    remove_hooks(without_hooks)
    assert worst_difference(train_step(without_hooks, [positions]), wanted)


def test_sequence_parallelism_is_not_supported_for_the_reason():
    model = random_model(tiny_config("inkling")).eval()
    opslot.apply(model, "eager")
    assert keeps_sequences(model) is None
    assert "InklingAttention counts" in keeps_sequences(model, by_kernel=True)


def test_attention_that_takes_earlier_tokens_needs_no_whole_sequences(deepseek_v4):
    assert keeps_sequences(deepseek_v4[1], by_kernel=True) is None


@pytest.mark.parametrize(
    ("product", "mixes"),
    [
        ("inv_freq.float() @ position_ids_expanded.float()", False),
        ("scores @ values", True),
        ("x @ self.weight", False),
    ],
)
def test_matmuls_that_mix_tokens(product, mixes):
    """Frequencies times positions, as the rotary embedding of DeepSeek-V4 before 5.23, mix none."""
    assert bool(_mixing_expression(None, ast.parse(product, mode="eval").body, frozenset())) is mixes


class Mixer(nn.Module):
    """Each token gets the sum of the tokens before it; takes no boundaries of documents."""

    _opslot_by_document = True
    _opslot_keeps_sequences = "Mixer sums tokens"

    def forward(self, hidden_states, attention_mask=None, scale=None, last=None, distance=None):
        out = hidden_states.cumsum(1)
        if distance is not None:
            out = out * distance.sum(-1)[..., None]
        if scale is not None:
            out = out * scale[0]
        if attention_mask is not None:
            out = out + attention_mask.sum((1, 3))[..., None]
        return out, torch.full((hidden_states.shape[1],) * 2, float(hidden_states.shape[1])), last

    forward_by_document = by_document(forward)


@pytest.mark.parametrize("rows", [1, 2])
def test_each_call_gets_the_parts_of_one_document(rows):
    """Also where sizes of other dims equal the number of tokens."""
    mixer, length, documents = Mixer(), 6, [4, 2, 5, 1] if rows == 2 else [4, 2]
    states = torch.randn(rows, length, length)
    mask = torch.randn(rows, 1, length, length)
    scale = (torch.randn(1, length, 1), None)
    cu_seqlens = torch.tensor([0, *documents]).cumsum(0)
    found, scores, _ = mixer.forward_by_document(
        states, attention_mask=mask, scale=scale, cu_seq_lens_q=cu_seqlens, max_length_q=4
    )
    assert found.shape == states.shape
    assert isinstance(scores, PerDocument)
    for index, (start, size) in enumerate(zip(cu_seqlens.tolist(), documents, strict=False)):
        row, tokens = start // length, slice(start % length, start % length + size)
        alone = mixer.forward(
            states[row : row + 1, tokens], mask[row : row + 1, :, tokens, tokens], (scale[0][:, tokens], None)
        )
        torch.testing.assert_close(found[row : row + 1, tokens], alone[0])
        assert torch.equal(scores[index], alone[1])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    found, _, _ = mixer.forward_by_document(states, distance=distance, cu_seq_lens_q=cu_seqlens)
    for start, size in zip(cu_seqlens.tolist(), documents, strict=False):
        row, tokens = start // length, slice(start % length, start % length + size)
        alone, _, _ = mixer.forward(states[row : row + 1, tokens], distance=distance[tokens, tokens])
        torch.testing.assert_close(found[row : row + 1, tokens], alone)
    _, _, again = mixer.forward_by_document(states, last=scores, cu_seq_lens_q=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(again, scores, strict=True))


def test_modules_that_do_not_mix_tokens_run_once():
    mixer = Mixer()
    assert why_by_document(mixer) == "Mixer sums tokens"

    class PerToken(Mixer):
        _opslot_keeps_sequences = None

    states = torch.randn(1, 6, 2)
    found = PerToken().forward_by_document(states, cu_seq_lens_q=torch.tensor([0, 4, 6]))[0]
    assert torch.equal(found, states.cumsum(1))


def test_experts_inside_raise_with_expert_parallelism():
    model = random_model(tiny_config("mixtral"))
    opslot.apply(model)
    plan = parallel_plan(model)
    layer = type(model.model.layers[0])
    model.model.layers[0].__class__ = type(layer.__name__, (layer, Mixer), {"forward": layer.forward})
    with pytest.raises(ConfigError, match=r"model\.layers\.0 runs once for each packed document"):
        _check_experts(model, type("State", (), {"ep": 2}), plan)


@pytest.mark.usefixtures("forked_workers")
def test_ranks_with_different_numbers_of_documents_equal_one_process():
    config = tiny_config("deepseek_v4")
    ids = random_ids(config)
    batches = [[documents_of(ids[:1], (12, 8))], [documents_of(ids[1:], (3, 5, 9, 3))]]
    model = random_model(config).eval()
    opslot.apply(model)
    wanted = train_step(model, [batch for own in batches for batch in own])
    with Processes(2) as processes:
        found = two_process_step("fsdp", config, "auto", processes, batches)
    assert found.values is not None, found.error
    assert not worst_difference({name: torch.as_tensor(value) for name, value in found.values.items()}, wanted)


def documents_of(ids, lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "num_items_in_batch": torch.tensor(40)}


def test_modules_compile_without_documents_as_one_graph():
    compiled = torch.compile(Mixer().forward_by_document, fullgraph=True, backend="eager")
    states = torch.randn(1, 6, 3)
    assert torch.equal(compiled(states)[0], states.cumsum(1))


def test_call_of_a_module_that_takes_no_boundaries_is_unchanged():
    text = generate(discover("sapiens2").patch, installed_release())
    assert "self.drop_path(hidden_states)" in text
    assert "documents_for(self.drop_path" not in text


def test_module_whose_forward_takes_no_keywords_gets_the_boundaries():
    """In Transformers 5.9, the convolution of LFM2 takes none, and has no slot."""
    upstream = """
import torch
from torch import nn


class ToyConv(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        return hidden_states


class ToyDecoderLayer(nn.Module):
    def __init__(self, config):
        self.conv = ToyConv()

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.conv(hidden_states=hidden_states, attention_mask=attention_mask)
"""
    module = ModuleView(UpstreamModule("toy", "5.9.0", upstream))
    patch = PatchConfig("transformers.models.toy.modeling_toy")
    pass_documents_to(module, patch, "ToyConv")
    assert patch.edits == []
    patch.set_attribute("ToyConv", BY_DOCUMENT, True)
    pass_documents_to(module, patch, "ToyConv")
    assert "documents_for(self.conv, (), kwargs)" in str(patch.edits[-1])
