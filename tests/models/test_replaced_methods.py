"""Methods that were replaced on a class of Transformers: instances have them from the next `opslot.apply` on."""

import copy
import functools
import importlib
import pickle

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.models._registry import find_architecture
from opslot.slots.replaced_methods import replaced_methods
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config

NORMS = {"preset": "eager", "rms_norm_implementation": "torch_fused"}


def half(method):
    """A method whose result is half of that of another one."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        out = method(self, *args, **kwargs)
        return (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2

    return call


def half_of_tuple(function):
    return lambda *args, **kwargs: tuple(x / 2 for x in function(*args, **kwargs))


def doubled_loss(method):
    def call(self, *args, **kwargs):
        out = method(self, *args, **kwargs)
        out.loss = out.loss * 2
        return out

    return call


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        (llama.LlamaRMSNorm, "forward", half),
        (llama.LlamaMLP, "forward", half),
        (llama.LlamaAttention, "forward", half),
        (llama.LlamaDecoderLayer, "forward", half),
        (llama.LlamaForCausalLM, "forward", doubled_loss),
        (llama, "apply_rotary_pos_emb", half_of_tuple),
        (llama, "rotate_half", half_of_tuple),
    ],
)
def test_replaced_methods_and_functions_run(owner, name, change, monkeypatch):
    config = tiny_config("llama")
    model, ids = random_model(config), random_ids(config)
    if name == "rotate_half":
        monkeypatch.setattr(owner, name, lambda x: x / 2)
    else:
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    original = copy.deepcopy(model)
    report = opslot.apply(model)
    assert "was replaced" in str(report)
    assert "torch_fused" in str(report)
    expected = loss_and_gradients(original, ids)
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        torch.testing.assert_close(loss_and_gradients(each, ids), expected)
    opslot.apply(model, "eager")
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(model, ids), expected, strict=True))
    opslot.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


class Own(llama.LlamaRMSNorm):
    """A class of a user, which has the forward of Transformers' class."""


@pytest.mark.parametrize(
    ("owner", "name", "change", "method"),
    [
        (llama.LlamaRMSNorm, "forward", half, "LlamaRMSNorm.forward"),
        (llama, "apply_rotary_pos_emb", half_of_tuple, "LlamaAttention.forward"),
    ],
)
def test_methods_replaced_after_apply_are_reported_and_run_after_the_next(
    owner, name, change, method, monkeypatch, caplog
):
    config = tiny_config("llama")
    model, ids = random_model(config), random_ids(config)
    model.model.norm.__class__ = Own
    original = copy.deepcopy(model)
    opslot.apply(model)
    before = loss_and_gradients(model, ids)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    expected = loss_and_gradients(original, ids)
    text = f"{method}, or a function that it calls, was replaced after opslot.apply"
    assert not caplog.records
    assert text in str(opslot.explain(model))
    opslot.bind(model, "auto")
    assert text in caplog.text
    torch.testing.assert_close(loss_and_gradients(model, ids), before)
    opslot.apply(model)
    assert text not in str(opslot.explain(model))
    torch.testing.assert_close(loss_and_gradients(model, ids), expected)
    monkeypatch.undo()
    opslot.apply(model)
    torch.testing.assert_close(loss_and_gradients(model, ids), before)
    opslot.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_named_kernel_of_a_replaced_forward_raises(monkeypatch):
    model = random_model(tiny_config("llama"))
    opslot.apply(copy.deepcopy(model), NORMS)
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", half(llama.LlamaRMSNorm.forward))
    with pytest.raises(ConfigError, match=r"LlamaRMSNorm\.forward, or a function that it calls, was replaced"):
        opslot.apply(model, NORMS)
    assert type(model) is llama.LlamaForCausalLM


def test_added_method_stays(monkeypatch):
    model = random_model(tiny_config("llama"))
    monkeypatch.setattr(llama.LlamaForCausalLM, "answer", lambda self: 42, raising=False)
    opslot.apply(model)
    assert model.answer() == 42


def test_subclass_of_a_changed_class_keeps_its_methods(monkeypatch):
    class Own(llama.LlamaRMSNorm):
        pass

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", half(llama.LlamaRMSNorm.forward))
    model, ids = random_model(tiny_config("llama")), random_ids(tiny_config("llama"))
    model.model.norm.__class__ = Own
    expected = loss_and_gradients(copy.deepcopy(model), ids)
    opslot.apply(model)
    torch.testing.assert_close(loss_and_gradients(model, ids), expected)


@pytest.mark.parametrize(
    ("arch", "name"), [("mamba2", "Mamba2Mixer"), ("bloom", "BloomAttention"), ("gpt_oss", "GptOssModel")]
)
def test_packed_documents_that_a_replaced_forward_may_mix_raise(arch, name, monkeypatch):
    cls = getattr(importlib.import_module(f"transformers.models.{arch}.modeling_{arch}"), name)
    config = tiny_config(arch)
    model, ids = random_model(config), random_ids(config)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    opslot.apply(model)
    positions = torch.arange(ids.shape[1]) % 5
    with pytest.raises(KernelError, match=rf"{name}\.forward, or a function that it calls, was replaced"):
        model(input_ids=ids, position_ids=positions.expand_as(ids), use_cache=False)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "udop", "gemma4", "mamba2", "bert"])
def test_classes_as_installed_have_no_replaced_methods(arch):
    architecture = find_architecture(arch)
    for name, cls in vars(importlib.import_module(architecture.upstream)).items():
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and cls.__module__ == architecture.upstream:
            assert not replaced_methods(cls, architecture.generated_class(name)), name
