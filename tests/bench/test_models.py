from pathlib import Path

import pytest
from transformers import AutoConfig

import opslot
from opslot.bench.run import read_model

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


@pytest.mark.parametrize("model", ["qwen3_8b_width", "qwen3.5_9b_width", "qwen3_vl_8b_width"])
def test_another_number_of_layers(model):
    data = read_model(next(str(file) for file in MODELS if file.stem == model), 3)
    config = AutoConfig.for_model(**data).get_text_config()
    assert config.num_hidden_layers == 3
    assert len(getattr(config, "layer_types", None) or [0] * 3) == 3
