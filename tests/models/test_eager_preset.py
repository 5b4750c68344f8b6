"""The preset `eager` leaves what Transformers runs, attention and experts included."""

import copy

import pytest
import torch

import opslot
from opslot.slots import OpsImplementationConfig
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config

ARCHITECTURES = (
    "qwen3",
    "llama",
    "qwen3_moe",
    "gemma3_text",
    "mistral",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5",
)
PRESETS = ("eager", {"preset": "eager"}, OpsImplementationConfig("eager"))


def config_of(arch):
    config = tiny_config(arch)
    if arch == "mistral":
        config.sliding_window = 4
    return config


def step(model, ids):
    torch.manual_seed(0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal_bits(found, wanted):
    assert list(found) == list(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def implementations(model):
    return {
        (path, name): getattr(config, name, None)
        for path, module in model.named_modules()
        if (config := module.__dict__.get("config")) is not None
        for name in ("_attn_implementation", "_experts_implementation")
    }


@pytest.mark.quick("qwen3", "qwen3_moe")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loss_and_gradients_equal_the_unpatched_model_bit_for_bit(arch):
    original = random_model(config_of(arch))
    model = copy.deepcopy(original)
    report = opslot.apply(model, "eager")
    assert {row.chosen for row in report} == {"eager"}
    assert implementations(model) == implementations(original)
    ids = random_ids(original.config, 17)
    assert_equal_bits(step(model, ids), step(original, ids))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("ops", PRESETS, ids=["name", "mapping", "config"])
def test_the_preset_keeps_the_implementation_that_the_model_has(attention, ops):
    model = random_model(tiny_config("qwen3_moe"))
    model.set_attn_implementation(attention)
    report = opslot.apply(model, ops)
    assert model.config._attn_implementation == attention
    assert model.config._experts_implementation == "grouped_mm"
    runs = {row.op: (row.kernel, row.why) for row in report}
    assert runs["attention"] == (f"eager (Transformers' {attention})", "preset eager")
    assert runs["moe_experts"] == ("eager (Transformers' grouped_mm)", "preset eager")


@pytest.mark.parametrize("preset", [{}, {"preset": "eager"}], ids=["auto", "preset"])
def test_fields_that_name_eager_select_transformers_eager(preset):
    original = random_model(tiny_config("qwen3_moe"))
    model = copy.deepcopy(original)
    opslot.apply(model, {**preset, "attn_implementation": "eager", "moe_experts_implementation": "eager"})
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "eager")
    opslot.bind(model, {**preset, "overrides": {"*": {"attn_implementation": "eager", "moe_implementation": "eager"}}})
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "eager")
    opslot.bind(model, "eager")
    assert implementations(model) == implementations(original)


def test_a_field_that_names_eager_for_one_model_leaves_the_experts_of_another():
    pair = torch.nn.ModuleDict({name: random_model(tiny_config("qwen3_moe")) for name in ("student", "teacher")})
    opslot.apply(pair, {"preset": "eager", "overrides": {"teacher.*": {"moe_implementation": "eager"}}})
    assert [pair[name].config._experts_implementation for name in pair] == ["grouped_mm", "eager"]


@pytest.mark.parametrize("fields", [{}, {"attn_implementation": "eager"}, {"rms_norm_implementation": "auto"}])
def test_plain_data_of_the_preset_gives_an_equal_config(fields):
    config = OpsImplementationConfig(preset="eager", **fields)
    assert OpsImplementationConfig.make(config.to_dict()) == config
    assert config.to_dict() == {"preset": "eager", **fields}
    assert config != OpsImplementationConfig(**{f: "eager" for f, _ in config.named_fields()})
    assert config == copy.deepcopy(config)
    assert repr(config).startswith("OpsImplementationConfig(preset='eager'")
