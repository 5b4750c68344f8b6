"""Models built from every architecture's config: no module keeps its Transformers class."""

import copy
import json

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import opslot
from opslot._base.errors import ConfigError
from opslot.models._build import auto_class_name
from opslot.models._registry import architecture_of

COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
# With nested models, with classes of other architectures in them, and without either.
REPRESENTATIVE = (
    "aria",
    "gemma3",
    "glm4v",
    "internvl",
    "internlm3",
    "llava",
    "mistral3",
    "paligemma",
    "phi3",
    "qwen2_audio",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)


def shrink(config):
    """At most two layers, in nested configs too."""
    for name in COUNTS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(2, getattr(config, name)))
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    for name in getattr(config, "sub_configs", {}):
        if hasattr(getattr(config, name, None), "sub_configs"):
            shrink(getattr(config, name))


def default_config(model_type):
    """The default config of a model_type, made small; None where Transformers has no usable one."""
    try:
        config = CONFIG_MAPPING[model_type]()
        shrink(config)
    except Exception:
        return None
    return config


def transformers_builds(config):
    """Whether Transformers itself constructs a model from the config."""
    try:
        cls = getattr(transformers, auto_class_name(config))
        with torch.device("meta"), no_init_weights():
            cls._from_config(copy.deepcopy(config))
    except Exception:
        return False
    return True


def unconverted_modules(model):
    """Modules with a Transformers class that has a generated counterpart."""
    found = []
    for path, module in model.named_modules():
        architecture = architecture_of(type(module), generated=False)
        if architecture is not None and architecture.generated_class(type(module).__name__) is not None:
            found.append(path)
    return found


def build(config):
    return opslot.build_foundation_model(config, init_device="meta", run_device="cpu")


@pytest.mark.parametrize("model_type", [name for name in REPRESENTATIVE if name in CONFIG_MAPPING_NAMES])
def test_every_module_has_its_generated_class(model_type):
    model = build(default_config(model_type))
    assert unconverted_modules(model) == []
    assert len(opslot.explain(model)) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_architectures_have_generated_classes():
    built, unusable, wrong = 0, 0, {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        config = default_config(model_type)
        if config is None:
            unusable += 1
            continue
        try:
            model = build(config)
        except Exception as error:
            # Without slots, or without a language model.
            if "found nothing to bind" in str(error) or "names no class" in str(error):
                continue
            if transformers_builds(config):
                wrong[model_type] = repr(error)
            else:
                unusable += 1
            continue
        built += 1
        if found := unconverted_modules(model):
            wrong[model_type] = found[:3]
    assert wrong == {}
    assert built >= 200, f"{built} built, {unusable} without a usable default config"


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_expert_parallelism_finds_nested_experts(model_type):
    from opslot.models.parallelize import parallel_plan

    model = build(default_config(model_type))
    sharded = parallel_plan(model).match(model)
    assert sharded
    assert all(".experts." in name for name in sharded)
    assert any(row.op == "moe_experts" for row in opslot.explain(model))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_config_without_architectures_gets_the_auto_class(model_type, name, tmp_path, monkeypatch):
    config = default_config(model_type)
    assert config.architectures is None
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert type(opslot.build_foundation_model(tmp_path, init_device="meta")).__name__ == name
    monkeypatch.setenv("OPSLOT_BACKEND", "hf")
    theirs = opslot.build_foundation_model(tmp_path, init_device="meta")
    assert type(theirs) is getattr(transformers, name)


def test_config_without_a_language_model_raises():
    with pytest.raises(ConfigError, match=r"names no class for model_type 'siglip', .*\n  hint: give architecture"):
        build(CONFIG_MAPPING["siglip"]())


def test_unknown_class_of_a_model_without_slots_raises():
    config = CONFIG_MAPPING["xlm"](n_layers=1)
    with pytest.raises(ConfigError, match="Transformers has no class 'XLMForImages'"):
        opslot.build_foundation_model(config, architecture="XLMForImages")
