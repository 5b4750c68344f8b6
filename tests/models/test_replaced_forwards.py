"""Forwards of bound modules that other libraries replace, before and after `opslot.apply`."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.models.parallelize import _check_experts, parallel_plan
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.models.sizes import SIZES

NAMED = {"cross_entropy_loss_implementation": "chunk_loss", "rms_norm_implementation": "torch_fused"}
IDS = torch.arange(2, 14).reshape(2, 6)


def made(head=None):
    """A bound model, or one whose head was replaced first."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    if head is None:
        opslot.apply(model, NAMED)
    else:
        head(model)
    return model.train()


def fused_head(model):
    """Computes the loss from the head's weight where `fused` is given, as TRL's trainers do."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused=False, **kwargs):
        if not fused:
            return original(*args, **kwargs)
        kwargs.pop("labels", None)
        return self.model(*args, **kwargs).last_hidden_state.sum() * self.lm_head.weight.sum()

    model.forward = types.MethodType(forward, model)


def loss_row(model):
    return next(row for row in opslot.explain(model) if row.op == "cross_entropy_loss")


def test_named_loss_that_a_replaced_forward_does_not_call_is_logged(caplog):
    model = made()
    assert loss_row(model).why == "named by cross_entropy_loss_implementation"
    fused_head(model)
    by = "tests.models.test_replaced_forwards.fused_head"
    assert f"{by} replaced the module's forward" in loss_row(model).why
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS, fused=True)
    model(input_ids=IDS)
    assert not caplog.records
    for _ in range(2):
        model(input_ids=IDS, labels=IDS, fused=True)
    (record,) = caplog.records
    assert (
        f"chunk_loss, the named kernel of cross_entropy_loss, does not run in Qwen3ForCausalLM: {by}" in record.message
    )
    # The slots are as they were.
    assert type(model._opslot_cross_entropy_loss).__name__ == "BoundKernel"


@pytest.mark.parametrize("calls", [True, False])
def test_forward_that_was_replaced_on_the_class_of_a_bound_module_runs(calls, caplog, monkeypatch):
    model = made()
    norm = model.model.norm
    original = type(norm).forward
    monkeypatch.setattr(type(norm), "forward", lambda self, x: original(self, x) / 2 if calls else x / 2)
    x = torch.randn(2, norm.weight.numel())
    torch.testing.assert_close(norm(x), original(norm, x) / 2 if calls else x / 2)
    why = next(row.why for row in opslot.explain(model) if row.slot == "Qwen3RMSNorm.rms_norm")
    assert "test_forward_that_was_replaced_on_the_class_of_a_bound_module_runs replaced the module's forward" in why
    model(input_ids=IDS, labels=IDS)
    assert [("does not run in Qwen3RMSNorm" in record.message) for record in caplog.records] == [True] * (not calls)


def test_replaced_forward_that_calls_the_original_is_not_logged(caplog):
    model = made()
    fused_head(model)
    model(input_ids=IDS, labels=IDS)
    model(input_ids=IDS, labels=IDS, fused=True)
    assert not caplog.records


def test_kernel_that_another_one_of_the_op_replaces_is_not_logged(caplog):
    """That for norms and rotation of heads runs instead of that for the rotation alone."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES)).train()
    opslot.apply(model, {"rms_norm_implementation": "triton", "rotary_pos_emb_implementation": "triton"})
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = functools.partial(type(attention).forward, attention)
    model(input_ids=IDS)
    assert not caplog.records


def test_modules_with_one_replacement_are_logged_together(caplog):
    model = made()
    for layer in model.model.layers:
        norm = layer.input_layernorm
        norm.forward = types.MethodType(lambda self, x: x, norm)
    model(input_ids=IDS, labels=IDS)
    (record,) = caplog.records
    assert "torch_fused, the named kernel of rms_norm, does not run in Qwen3RMSNorm x2" in record.message


def test_failing_call_leaves_the_slots_as_they_were(caplog):
    model = made()
    fused_head(model)
    with pytest.raises(IndexError):
        model(input_ids=IDS + 1000, labels=IDS, fused=True)
    assert type(model._opslot_cross_entropy_loss).__name__ == "BoundKernel"
    assert not caplog.records


def test_attention_has_a_kernel_where_the_forward_of_its_model_was_replaced_before():
    model = made(fused_head)
    report = opslot.apply(model)
    assert report.chosen("attention") == ("sdpa",)
    assert "by tests.models.test_replaced_forwards.fused_head" in loss_row(model).why
    expected = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(opslot.restore(model)(input_ids=IDS, labels=IDS).loss, expected)


def hooked_by_accelerate(model):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model, hooks.ModelHook())


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize(
    "replace",
    [
        [fused_head],
        [compiled_forward],
        [hooked_by_accelerate],
        [hooked_by_accelerate, fused_head],
        [fused_head, hooked_by_accelerate],
    ],
    ids=["fused_head", "compiled", "hook", "fused_head-on-hook", "hook-on-fused_head"],
)
def test_restored_model_whose_forward_was_replaced_after_apply(replace):
    """As TRL's trainers do; their forward calls the one that the model had then, of the generated class."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    expected = model(input_ids=IDS, labels=IDS)
    opslot.apply(model, NAMED)
    for change in replace:
        change(model)
    opslot.restore(model)
    found = model(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    opslot.apply(model, NAMED)
    assert loss_row(model).kernel == "chunk_loss"
    assert model(input_ids=IDS, labels=IDS).logits is None


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text"])
def test_hooks_of_accelerate_call_the_forward_that_reads_slots(arch):
    """A `device_map` over several devices, or with offloaded weights, replaces the forward of each module.

    The forward of Gemma's embedding calls `super()`, which fails in the original class of a module that was moved.
    """
    hooks = pytest.importorskip("accelerate.hooks")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **SIZES)).eval()
    expected = model(input_ids=IDS).logits
    hooks.add_hook_to_module(model, hooks.ModelHook())
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    assert opslot.apply(model, NAMED).chosen("rms_norm") == ("eager", "torch_fused")
    norm = model.model.norm
    assert norm._old_forward.__func__ is type(norm).forward
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    opslot.restore(model)
    assert norm._old_forward.__func__ is type(norm).forward
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)


def test_replaced_forward_calls_one_with_super():
    """Transformers' tensor parallelism replaces the forward of each module by one that calls the original."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **SIZES)).eval()
    expected = model(input_ids=IDS).logits
    embedding = model.get_input_embeddings()
    cls, original = type(embedding), embedding.forward
    embedding.forward = lambda ids: original(ids)
    for _ in range(2):
        opslot.apply(model, NAMED)
        assert type(embedding).__module__ == "opslot.generated.gemma3"
        torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    opslot.restore(model)
    assert type(embedding) is cls
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)


def test_experts_whose_forward_was_replaced_before_apply_are_not_sharded():
    """Their slot is not read, and so tokens would not be dispatched."""
    model = random_model(tiny_config("qwen3_moe"))
    experts = model.model.layers[0].mlp.experts
    experts.forward = types.MethodType(lambda self, hidden_states, *_: hidden_states, experts)
    opslot.apply(model)
    message = r"layers\.0\.mlp\.experts cannot be sharded over ep ranks: forward was replaced on this instance"
    with pytest.raises(ConfigError, match=message):
        _check_experts(model, SimpleNamespace(ep=2), parallel_plan(model))
