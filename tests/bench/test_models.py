from pathlib import Path

import pytest
from transformers import AutoConfig

import opslot
from opslot import ConfigError
from opslot.bench.run import read_model
from opslot.models._layers import with_layers
from tests.own_code import ship

MODELS = sorted((Path(__file__).parents[2] / "benchmarks" / "models").glob("*.json"))


@pytest.mark.quick("qwen3_30b_a3b_width", "qwen3.5_9b_width", "qwen3_vl_8b_width", "nemotron_h_8b_width")
@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_benchmark_model_builds_on_meta(file):
    config = AutoConfig.for_model(**read_model(str(file)))
    model = opslot.build_foundation_model(
        config, torch_dtype="bfloat16", init_device="meta", ops_implementation="eager"
    )
    assert type(model).__name__ == config.architectures[0]
    count = sum(p.numel() for p in model.parameters())
    # Parameters, gradients and two AdamW states in bf16 leave half of an H200 for activations.
    assert 0.3e9 < count < 8.5e9
    if "layer_types" in read_model(str(file)):
        assert len(config.layer_types) == config.num_hidden_layers


def test_code_that_ships_with_a_checkpoint_is_not_run(tmp_path):
    with pytest.raises(ConfigError, match="opslot bench does not run it") as caught:
        read_model(str(ship("sparrow", tmp_path / "sparrow")))
    assert "--trust-remote-code" not in str(caught.value)


@pytest.mark.parametrize("model", ["qwen3_8b_width", "qwen3.5_9b_width", "qwen3_vl_8b_width"])
def test_another_number_of_layers(model):
    data = read_model(next(str(file) for file in MODELS if file.stem == model), 3)
    config = AutoConfig.for_model(**data).get_text_config()
    assert config.num_hidden_layers == 3
    assert len(getattr(config, "layer_types", None) or [0] * 3) == 3


@pytest.mark.parametrize("model_type", ["gemma4_text", "laguna", "qwen3_next", "zamba2"])
def test_another_number_of_layers_of_a_default_config(model_type):
    """Also where lists and mappings by layer have other names than `layer_types`."""
    data = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(**{**data, **with_layers(data, 3)})
    assert config.num_hidden_layers == 3


def test_another_number_of_layers_keeps_what_is_not_by_layer():
    config = {
        "num_hidden_layers": 3,
        "eos_token_id": [1, 2, 3],
        "id2label": {0: "no", 5: "yes"},
        "per_layer_config": {"0": {"heads": 1}, "2": {"heads": 2}},
        "intermediate_sizes_by_layer": [8, 16, 24],
    }
    assert with_layers(config, 1) == {
        "num_hidden_layers": 1,
        "per_layer_config": {"0": {"heads": 1}},
        "intermediate_sizes_by_layer": [8],
    }


def test_config_of_an_encoder_without_a_vocabulary(tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    assert "vocab_size" not in read_model(str(tmp_path))
