"""Towers of vision-language models: attention over cu_seqlens, whatever kernel is bound."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForImageTextToText

import opslot
from opslot.verify.architecture import tiny_config
from tests.models.test_host_inputs import TOWERS, batch_of, build


def with_eager(name):
    model = build(name).double()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = "eager"
    return model


def step(model, name):
    torch.manual_seed(0)
    batch = batch_of(name)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.quick("qwen2_vl", "qwen3_vl", "qwen2_5_vl")
@pytest.mark.parametrize("name", TOWERS)
def test_tower_calls_attention_once_per_layer(name):
    """Transformers calls it for each image where the implementation is not FlashAttention."""
    model = with_eager(name)
    expected = step(copy.deepcopy(model), name)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "sdpa"})
    calls = []
    for module in model.model.visual.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_hook(lambda *_: calls.append(len(calls)))
    interface = model.model.visual.config._attn_implementation
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    kernel, seen = functions[interface], []

    def record(*args, **kwargs):
        seen.append(kwargs.get("cu_seq_lens_q"))
        return kernel(*args, **kwargs)

    functions[interface] = record
    try:
        found = step(model, name)
    finally:
        functions[interface] = kernel
    assert seen
    assert all(cu_seqlens is not None for cu_seqlens in seen)
    assert len(seen) == len(calls)
    torch.testing.assert_close(found[0], expected[0])
    for key, gradient in expected[1].items():
        torch.testing.assert_close(found[1][key], gradient, msg=key)


def unpickled(config):
    return pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize("copied", [lambda config: config, copy.deepcopy, unpickled])
def test_config_of_a_bound_model_builds_other_models(copied):
    model = AutoModelForImageTextToText.from_config(tiny_config("qwen2_vl"))
    opslot.apply(model, "auto")
    assert "cu_seqlens" in model.config.vision_config._attn_implementation
    original = AutoModelForImageTextToText.from_config(copied(model.config))
    assert type(original).__module__.startswith("transformers.")
    built = opslot.build_foundation_model(copied(model.config), ops_implementation="auto")
    assert opslot.explain(built).chosen("attention") == opslot.explain(model).chosen("attention")
