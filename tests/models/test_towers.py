"""Towers of vision-language models: attention over cu_seqlens, whatever kernel is bound."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutput

import opslot
from opslot._base.errors import ConfigError
from opslot.models._multimodal.modalities import _zero_of_projections, find_towers
from opslot.models._multimodal.parts import parts_of
from opslot.models._multimodal.probe import count_features
from opslot.verify.media import media_samples
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config
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


class Holder(nn.Module):
    """Computes features and logits in one forward, as the thinker of Qwen2.5-Omni before Transformers 5.23."""

    def __init__(self):
        super().__init__()
        self.decoder, self.projector, self.lm_head = (nn.Linear(2, 2) for _ in range(3))

    def get_decoder(self):
        return self.decoder

    def forward(self, x):
        return self.lm_head(self.decoder(self.projector(x)))


def test_zero_of_projections_leaves_out_an_output_head_with_its_own_parameters():
    """Another rank would not gather them at that point."""
    holder = Holder()
    holder.lm_head.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    _zero_of_projections(holder).backward()
    assert holder.projector.weight.grad is not None
    assert holder.lm_head.weight.grad is None
    assert holder.decoder.weight.grad is None


def test_features_that_layers_alone_read_raise_for_several_ranks():
    from opslot.models._multimodal.modalities import find_towers
    from opslot.verify.random_model import random_model
    from opslot.verify.tiny import tiny_config

    model = random_model(tiny_config("granite4_vision"))
    with pytest.raises(ConfigError, match="Granite4VisionModel cannot train on several ranks"):
        find_towers(model)


@pytest.mark.quick("granite_speech")
@pytest.mark.parametrize("name", ["granite_speech", "nemotron_h_omni"])
def test_dummy_inputs_keep_the_statistics_of_batch_norms(name):
    """A rank with text alone changed those of a Conformer, and raised an error for inputs of one frame."""
    model = random_model(tiny_config(name)).train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    before = [norm.running_mean.clone() for norm in norms]
    find_towers(model).run_on_every_rank(model)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = random_ids(model.config)
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert norms
    assert all(torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True))
    samples = media_samples(random_model(model.config).eval())
    model(**samples.batches["audio"], use_cache=False)
    assert not all(torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True))


@pytest.mark.quick("granite_speech-*")
@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("granite_speech", {"encoder"}),
        ("vibevoice_asr", {"acoustic_tokenizer_encoder", "semantic_tokenizer_encoder"}),
    ],
)
def test_audio_encoders_whose_config_has_another_name(name, paths):
    """They were part of the merger."""
    parts = parts_of(random_model(tiny_config(name)))
    assert {parameter.split(".")[1] for parameter in parts["audio"]} == paths
    assert all("projector" in parameter for parameter in parts["merger"])


@pytest.mark.parametrize(("name", "path"), [("fuyu", "vision_embed_tokens"), ("gemma4_unified", "embed_vision")])
def test_projections_of_patches_without_encoder_are_the_merger(name, path):
    parts = parts_of(random_model(tiny_config(name)))
    assert parts["merger"]
    assert any(path in parameter for parameter in parts["merger"])
    assert not parts["vision"]


def test_projections_of_encoders_inside_the_decoder_are_the_merger():
    parts = parts_of(random_model(tiny_config("phi4_multimodal")))
    inside = [name for name in parts["merger"] if ".embed_tokens_extend." in name]
    assert len(inside) == 14
    assert not any(".embed_tokens_extend." in name for name in parts["language_model"])


def test_features_in_an_attribute_without_a_field_are_counted():
    """The patches of Pixtral's encoder were counted before they are merged, up to Transformers 5.17."""
    outputs = BaseModelOutput(last_hidden_state=torch.ones(1, 8, 4))
    outputs.pooler_output = (torch.ones(2, 4), torch.ones(3, 4))
    assert count_features(outputs) == 5
