"""Omni models: the thinker trains, from the published top-level config."""

import json

import pytest
import torch
import transformers

import opslot
from opslot._base.errors import CheckpointError, ConfigError
from opslot.checkpoint import export_hf
from opslot.models import build_foundation_model
from tests.omni import CONFIGS, inputs

KINDS = [(), ("image",), ("audio",), ("video",), ("audio", "image", "video", "audio")]
names = pytest.mark.parametrize("name", CONFIGS)


def build(name, ops="eager", **options):
    torch.manual_seed(0)
    return build_foundation_model(CONFIGS[name](), ops_implementation=ops, **options)


def theirs_of(model):
    """Transformers' own sub-model with the same weights."""
    cls = getattr(transformers, type(model.thinker).__name__)
    config = model.thinker.config
    found = cls._from_config(config, attn_implementation=config._attn_implementation)
    found.load_state_dict(model.thinker.state_dict())
    return found.train()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@names
def test_speech_parts_are_not_built(name):
    model = build(name)
    assert type(model).__name__ == CONFIGS[name]().__class__.__name__.replace("Config", "ForConditionalGeneration")
    assert [child for child, _ in model.named_children()] == ["thinker"]
    assert not model.config.enable_audio_output
    with pytest.raises(NotImplementedError, match="not built for training"):
        model.enable_talker()
    kernels = str(opslot.explain(model))
    assert all(f"{part}  " in kernels for part in ("AudioEncoder", "VisionEncoder", "TextModel"))


@pytest.mark.quick("audio-image-video-audio-*", "-qwen2_5_omni")
@names
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_eager_equals_transformers(name, kinds):
    model = build(name)
    theirs = theirs_of(model)
    batch = inputs(name, kinds)
    loss = model(**batch, use_cache=False).loss
    expected = theirs(**batch, use_cache=False).loss
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    found, wanted = gradients(model.thinker), gradients(theirs)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in found)


@names
def test_auto_is_within_tolerance(name):
    model, eager = build(name, ops="auto"), build(name)
    eager.load_state_dict(model.state_dict())
    batch = inputs(name, KINDS[-1])
    outputs = [m(**batch, use_cache=False).loss for m in (model, eager)]
    torch.testing.assert_close(*outputs)
    for loss in outputs:
        loss.backward()
    found, wanted = gradients(model), gradients(eager)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-6, msg=key)


@names
def test_published_class_name_that_transformers_lacks(name):
    """The config of Qwen2.5-Omni-7B names a class of an early release."""
    config = CONFIGS[name]()
    config.architectures = [type(config).__name__.replace("Config", "Model")]
    built = type(build_foundation_model(config, init_device="meta")).__name__
    assert built == type(config).__name__.replace("Config", "ForConditionalGeneration")


def test_hooks_of_the_thinker_run():
    """Those of encoders on ranks without images are there, where Transformers has no module in it for the features."""
    model, calls = build("qwen2_5_omni"), []
    model.thinker.register_forward_pre_hook(lambda *_: calls.append("thinker"))
    model(input_ids=torch.arange(4)[None])
    assert calls == ["thinker"]


@names
def test_text_generation_goes_to_the_sub_model(name):
    model = build(name).eval()
    batch = {key: value for key, value in inputs(name, ("audio",)).items() if key != "labels"}
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.thinker.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, generation_mode="text"), expected)
    assert torch.equal(model.generate(**batch, thinker_max_new_tokens=3, do_sample=False, pad_token_id=0), expected)


def test_generation_runs_the_hooks_of_the_model():
    model, calls = build("qwen2_5_omni").eval(), []
    model.register_forward_pre_hook(lambda *_: calls.append("model"))
    model.thinker.register_forward_pre_hook(lambda *_: calls.append("thinker"))
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert calls.count("model") == 2
    assert "forward" not in vars(model.thinker)


@names
@pytest.mark.parametrize("asked", [{"return_audio": True}, {"generation_mode": "audio"}, {"talker_top_k": 5}])
def test_audio_generation_raises(name, asked):
    with pytest.raises(ConfigError, match=r"generates text only: talker and .* are not built"):
        build(name).generate(torch.tensor([[1]]), **asked)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    """Written by Transformers, with the speech parts."""
    torch.manual_seed(1)
    config = CONFIGS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    cls(config).save_pretrained(folder)
    if request.param == "qwen2_5_omni":
        torch.save({"Chelsie": {}}, folder / "spk_dict.pt")
    return folder


def stored(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_load_skips_the_speech_parts(checkpoint, caplog):
    with caplog.at_level("INFO"):
        model = build_foundation_model(checkpoint, checkpoint)
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "left out: " in line
    assert "talker (" in line
    weights = stored(checkpoint)
    theirs = getattr(transformers, type(model.thinker).__name__).from_pretrained(checkpoint)
    found = model.thinker.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in theirs.state_dict().items())
    assert any(key.startswith("talker.") for key in weights)


def test_export_without_the_speech_parts(checkpoint, tmp_path):
    model = build_foundation_model(checkpoint, checkpoint)
    export_hf(model, tmp_path / "out", source=checkpoint)
    weights, given = stored(tmp_path / "out"), stored(checkpoint)
    assert weights.keys() == {key for key in given if key.startswith("thinker.")}
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["enable_audio_output"]
    theirs = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "out")
    assert not theirs.has_talker


def same_bytes(first, second):
    """Also for NaN, which some releases leave in the speech parts."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_speech_parts_are_read_from_the_hub(checkpoint, hub, tmp_path):
    hub.repositories["models/org/omni"] = checkpoint
    model = build_foundation_model("org/omni", weights_path="org/omni")
    export_hf(model, tmp_path / "out", source="org/omni", keep_excluded=True)
    assert stored(tmp_path / "out").keys() == stored(checkpoint).keys()
    assert (tmp_path / "out" / "spk_dict.pt").is_file() == (checkpoint / "spk_dict.pt").is_file()


def test_export_excluded_keeps_the_speech_parts(checkpoint, tmp_path):
    model = build_foundation_model(checkpoint, checkpoint)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    export_hf(model, tmp_path / "out", source=checkpoint, keep_excluded=True)
    weights, given = stored(tmp_path / "out"), stored(checkpoint)
    assert weights.keys() == given.keys()
    changed = {key for key, value in given.items() if not same_bytes(weights[key], value)}
    assert changed == {key for key in given if "thinker.lm_head" in key}
    theirs = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "out")
    assert theirs.has_talker
    assert (tmp_path / "out" / "spk_dict.pt").is_file() == (checkpoint / "spk_dict.pt").is_file()


def test_keeping_parts_of_no_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match="no excluded weights to keep"):
        export_hf(build("qwen2_5_omni"), tmp_path / "out", keep_excluded=True)


@names
def test_forward_and_backward_without_synchronization(name):
    """On the meta device, reading a value raises."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from opslot.models._multimodal.host_inputs import keep_inputs_on_host

    def attend(module, query, key, value, attention_mask=None, **kwargs):
        key_and_value = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (query + key_and_value).transpose(1, 2), None

    AttentionInterface.register("omni_flash", attend)
    AttentionMaskInterface.register("omni_flash", lambda *args, **kwargs: None)
    model = theirs_of(build(name))
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = "omni_flash"
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            # Transformers' experts read on the device which of them have tokens.
            module.forward = lambda hidden_states, *_: hidden_states
    batch = inputs(name, KINDS[-1])
    arguments = {"image_grid_thw": batch["image_grid_thw"], "video_grid_thw": batch["video_grid_thw"]}
    arguments |= {"audio_seqlens": batch["feature_attention_mask"].sum(-1), "attention_mask": batch["attention_mask"]}
    arguments["second_per_grids"] = batch.pop("video_second_per_grid")
    positions, _ = model.get_rope_index(batch["input_ids"], **arguments)
    del batch["attention_mask"]
    model.to("meta")
    on_device = {key: value.to("meta") if value.is_floating_point() else value for key, value in batch.items()}
    call = on_device | {"position_ids": positions.to("meta"), "labels": batch["labels"].to("meta")}
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**call, use_cache=False)
    keep_inputs_on_host(model)
    model(**call, use_cache=False).loss.backward()
