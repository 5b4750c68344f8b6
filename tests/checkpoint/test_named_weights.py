"""Weights by the hub's names, from a model in memory: what `save_pretrained` writes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.errors import CheckpointError
from opslot.distributed import init_parallel_state
from opslot.verify.tiny import tiny_config


def model_of(arch):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(arch))


@pytest.mark.parametrize("arch", ["qwen3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_equal_the_saved_checkpoint(tmp_path, arch):
    model = model_of(arch)
    opslot.apply(model)
    model.save_pretrained(tmp_path)
    expected, found = load_file(tmp_path / "model.safetensors"), dict(opslot.named_weights(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_adapters_are_merged_and_the_model_stays(tmp_path):
    model = get_peft_model(model_of("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="has adapters"):
        dict(opslot.named_weights(model))
    found = dict(opslot.named_weights(model, merge_adapters=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = model.merge_and_unload().state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])


def names_and_sums(arch):
    init_parallel_state(device_type="cpu")
    model = model_of(arch)
    opslot.apply(model)
    opslot.parallelize(model)
    weights = list(opslot.named_weights(model))
    assert not any(isinstance(tensor, DTensor) for _, tensor in weights)
    return {name: tensor.double().sum().item() for name, tensor in weights}


def test_sharded_weights_are_gathered_on_every_rank(ranks):
    expected = {name: t.double().sum().item() for name, t in opslot.named_weights(model_of("mixtral"))}
    assert ranks.run(names_and_sums, "mixtral") == [pytest.approx(expected)] * 2
