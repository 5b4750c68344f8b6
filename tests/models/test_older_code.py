"""Layers as they were written for Transformers 4, which many checkpoints ship: the same slots, and the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot.checkpoint.initialize import initialize_weights
from opslot.models._own_loss import call_with_share_of_loss
from opslot.models.discovery import discover
from opslot.models.parallelize import _warn_of_local_means, _warn_once
from opslot.patchgen.names import architecture_from
from opslot.slots import walk_slots
from opslot.verify import check_architecture
from tests.own_code import ship

ROTARY = """\
def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
"""
BY_POSITION = """\
def apply_rotary_pos_emb(q, k, cos, sin, position_ids{options}):
    cos = cos{index}.unsqueeze({dim})
    sin = sin{index}.unsqueeze({dim})
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
CALL = "apply_rotary_pos_emb(q, k, cos, sin, position_ids)"
# What the function looks like, and how it is called.
ROTATIONS = {
    "positions select rows": (
        BY_POSITION.format(options=", unsqueeze_dim=1", index="[position_ids]", dim="unsqueeze_dim"),
        CALL,
    ),
    "positions by keyword": (
        BY_POSITION.format(options=", unsqueeze_dim=1", index="[position_ids]", dim="unsqueeze_dim"),
        "apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1, position_ids=position_ids)",
    ),
    "positions are ignored": (
        BY_POSITION.format(options="=None, unsqueeze_dim=1", index="", dim="unsqueeze_dim"),
        "apply_rotary_pos_emb(q, k, cos[position_ids], sin[position_ids], None)",
    ),
    "positions are left out": (
        BY_POSITION.format(options="=None, unsqueeze_dim=1", index="", dim="unsqueeze_dim"),
        "apply_rotary_pos_emb(q, k, cos[position_ids], sin[position_ids])",
    ),
    "four dimensions": (
        "def apply_rotary_pos_emb(q, k, cos, sin, position_ids):\n"
        "    cos = cos.squeeze(1).squeeze(0)\n"
        "    sin = sin.squeeze(1).squeeze(0)\n"
        + BY_POSITION.format(options="", index="[position_ids]", dim="1").partition("\n")[2],
        "apply_rotary_pos_emb(q, k, cos[None, None], sin[None, None], position_ids)",
    ),
}
# Neighboring channels are rotated and leave as halves (DeepSeek-V2); the first channels are rotated (Phi-3).
TO_HALVES = """\
def apply_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos = cos[position_ids].unsqueeze(unsqueeze_dim)
    sin = sin[position_ids].unsqueeze(unsqueeze_dim)
    rows, heads, length, width = q.shape
    q = q.view(rows, heads, length, width // 2, 2).transpose(4, 3).reshape(rows, heads, length, width)
    rows, heads, length, width = k.shape
    k = k.view(rows, heads, length, width // 2, 2).transpose(4, 3).reshape(rows, heads, length, width)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
OF_FIRST_CHANNELS = """\
def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_first, q_rest = q[..., :width], q[..., width:]
    k_first, k_rest = k[..., :width], k[..., width:]
    q_embed = torch.cat([(q_first * cos) + (rotate_half(q_first) * sin), q_rest], dim=-1)
    k_embed = torch.cat([(k_first * cos) + (rotate_half(k_first) * sin), k_rest], dim=-1)
    return q_embed, k_embed
"""
CHUNKS = "    x1, x2 = x.chunk(2, dim=-1)\n"
SLICES = "    x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]\n"
MLP = "        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
SPLIT_MLP = """\
        if self.config.pretraining_tp > 1:
            parts = self.gate_proj.weight.shape[0] // self.config.pretraining_tp
            gate_proj = torch.cat([F.linear(x, w) for w in self.gate_proj.weight.split(parts)], dim=-1)
            up_proj = torch.cat([F.linear(x, w) for w in self.up_proj.weight.split(parts)], dim=-1)
            states = (self.act_fn(gate_proj) * up_proj).split(parts, dim=2)
            down_proj = sum(F.linear(s, w) for s, w in zip(states, self.down_proj.weight.split(parts, dim=1)))
        else:
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj
"""
HEAD = "        logits = self.lm_head(hidden_states)\n"
SPLIT_HEAD = """\
        if self.config.pretraining_tp > 1:
            parts = self.lm_head.weight.split(self.config.vocab_size // self.config.pretraining_tp, dim=0)
            logits = torch.cat([F.linear(hidden_states, part) for part in parts], dim=-1)
        else:
            logits = self.lm_head(hidden_states)
"""
HOLDS_CONFIG = ("class WrenMLP(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n",) * 2
SPLIT = [
    (HOLDS_CONFIG[0], HOLDS_CONFIG[0] + "        self.config = config\n"),
    (MLP, SPLIT_MLP),
    (HEAD, SPLIT_HEAD),
]
# The same layers, with a function instead of a module.
FUNCTION = [("        self.act_fn = nn.SiLU()\n", ""), ("self.act_fn(self.gate_proj(x))", "F.silu(self.gate_proj(x))")]
FUSED = {"cross_entropy_loss_implementation": "chunk_loss"}
EPSILON = "self.variance_epsilon"


@pytest.fixture
def make(tmp_path, modules_cache):
    """`make(changes)`: the model of a checkpoint whose code has them."""

    def made(changes, name="wren", **config):
        path = ship(name, tmp_path / "shipped", changes, vocab_size=64, **config)
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=True)

    return made


def step(model):
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, position_ids=torch.arange(9).flip(0).expand_as(ids)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(model, ops="auto"):
    """Names of its slots; with kernels it computes what its own code does."""
    expected = step(model)
    applied = copy.deepcopy(model)
    opslot.apply(applied, "eager")
    torch.testing.assert_close(step(applied), expected, rtol=0, atol=0)
    opslot.apply(applied, ops)
    torch.testing.assert_close(step(applied), expected)
    return {f"{type(module).__name__}.{op}/{variant}" for _, module, _, op, variant in walk_slots(applied)}


@pytest.mark.parametrize("form", ROTATIONS)
@pytest.mark.parametrize("half", [SLICES, CHUNKS], ids=["slices", "chunks"])
def test_rotation_by_position(make, form, half):
    function, call = ROTATIONS[form]
    model = make([(ROTARY, function), (CALL + "\n        output", call + "\n        output"), (SLICES, half)])
    assert "WrenAttention.rotary_pos_emb/full" in check(model, {"rotary_pos_emb_implementation": "torch_fused"})


@pytest.mark.parametrize(
    ("function", "call", "variant"),
    [
        (TO_HALVES, CALL, "gptj_to_neox"),
        (
            OF_FIRST_CHANNELS,
            "apply_rotary_pos_emb(q, k, cos[position_ids], sin[position_ids], position_ids)",
            "partial",
        ),
    ],
    ids=["to halves", "of the first channels"],
)
def test_other_rotations_by_position(make, function, call, variant):
    model = make([(ROTARY, function), (CALL, call)])
    found = check(model, {"rotary_pos_emb_implementation": "triton"})
    assert any(slot.endswith(f"/{variant}") and "rotary" in slot for slot in found), found


def test_rotation_without_its_positions_has_no_slot(make):
    """The kernel needs those that the function reads."""
    function, _ = ROTATIONS["positions select rows"]
    assert not any(
        "rotary" in slot for slot in check(make([(ROTARY, function), (CALL, CALL.replace("position_ids", "None"))]))
    )


@pytest.mark.parametrize("split", [1, 2])
def test_branches_for_split_weights(make, split):
    """The branch of whole weights has slots; where the config selects the other one, it computes what it did."""
    model = make(SPLIT, pretraining_tp=split)
    found = check(model, FUSED if split == 1 else "auto")
    assert {"WrenMLP.swiglu_mlp/standard", "WrenForCausalLM.cross_entropy_loss/causal"} <= found
    if split == 1:
        opslot.apply(model, FUSED)
        ids = torch.ones(1, 4, dtype=torch.int64)
        assert model(input_ids=ids, labels=ids).logits is None


def test_function_as_activation(make):
    model = make(FUNCTION)
    assert "WrenMLP.swiglu_mlp/standard" in check(model)


@pytest.mark.parametrize("name", ["eps", "epsilon", "norm_eps"])
def test_epsilon_of_another_name(make, name):
    model = make([(EPSILON, f"self.{name}")])
    found = check(model, {"rms_norm_implementation": "torch_fused"})
    assert {"WrenRMSNorm.rms_norm/standard", "WrenDecoderLayer.rms_norm/fused_add"} <= found


def test_forward_without_further_arguments(make, caplog):
    """The loss of a call is its share of the step's, of a model that takes neither the number of labels nor a cache."""
    model = make([("labels=None, **kwargs", "labels=None")])
    ids = torch.arange(3, 11).reshape(2, 4)
    calls = [{"input_ids": row, "labels": row} for row in ids.split(1)]
    _warn_once.cache_clear()
    # On several ranks, where the number is missing in calls that others make.
    model.register_forward_pre_hook(_warn_of_local_means, with_kwargs=True)
    found = sum(call_with_share_of_loss(model, call, num_items_in_batch=6).loss for call in calls)
    assert "num_items_in_batch" not in caplog.text
    torch.testing.assert_close(found, model(input_ids=ids, labels=ids).loss)
    assert "num_items_in_batch" in caplog.text


def test_buffers_of_a_constructor_on_meta(make, tmp_path):
    """Frequencies that only the constructor computes, as in code that leaves its buffers to it."""
    fill = [("        elif isinstance(module, WrenRotary):\n            module.fill()\n", "")]
    buffers = [("torch.empty(longest, width)", "torch.zeros(longest, width)")]
    expected = make([*fill, *buffers])
    model = opslot.build_foundation_model(
        tmp_path / "shipped", init_device="meta", run_device="cpu", trust_remote_code=True
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    initialize_weights(model, 0)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=0, atol=0)


def test_attention_with_a_mask_cut_to_the_keys(make):
    added = "        scores = scores + attention_mask\n"
    cut = "        cut = attention_mask[:, :, :, : keys.shape[-2]]\n        scores = scores + cut\n"
    model = make([(added, cut)], name="sparrow")
    found = discover(architecture_from(type(model).__module__))
    assert "SparrowAttention" in {match.symbol for match in found.matches if match.op == "attention"}
    check(model)


def test_compiled_model_is_not_given_packed_documents_that_it_mixes(make):
    """Masks of its own cannot separate them, compiled or not."""
    found = check_architecture(make([]).config, checks=["compiled"])
    assert found.ok, found.problems
