"""Unit tests for reading tensors that Transformers renames on loading; full models are in tests/models."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import opslot
from opslot._base.errors import CheckpointError
from opslot.checkpoint import save_weights
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import CheckpointTensorConverter, SlicingConverter
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.checkpoint.hub_names import hub_names
from opslot.checkpoint.mapping import map_tensors
from opslot.checkpoint.model_tensors import ModelTensors
from opslot.checkpoint.safetensors_file import TensorEntry
from opslot.verify.tiny import tiny_config


@pytest.fixture
def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=6,
        pad_token_id=0,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config)


@pytest.fixture
def olmo_hybrid() -> nn.Module:
    if "olmo_hybrid" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no olmo_hybrid")
    config = transformers.CONFIG_MAPPING["olmo_hybrid"](
        vocab_size=20,
        hidden_size=8,
        intermediate_size=6,
        pad_token_id=0,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=3,
        linear_value_head_dim=4,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if "model.layers.0.linear_attn.conv1d.weight" not in model.state_dict():
        pytest.skip("an earlier release, which converts nothing here")
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "seed_oss", "qwen3_moe"])
def test_models_without_renamings(make_model, architecture) -> None:
    model = make_model(architecture, device="meta")
    assert hub_names(model, {"layers.0.anything": (2, 3)}) is None


def test_other_modules_have_no_renamings() -> None:
    assert hub_names(nn.Linear(2, 2), {"weight": (2, 2)}) is None


def test_renamed_tensors_and_experts_are_mapped(mixtral) -> None:
    experts = "model.layers.1.block_sparse_moe.experts"
    shapes = {"model.norm.weight": (8,), f"{experts}.2.w1.weight": (6, 8), f"{experts}.2.w3.weight": (6, 8)}
    names = hub_names(mixtral, {**shapes, "stranger": (1,)})
    problems = Problems("the checkpoint")
    entries = {
        name: TensorEntry(name, Path("a"), torch.float32, shape, 0, 0)
        for name, shape in {**shapes, "stranger": (1,)}.items()
    }
    model = ModelTensors.of(mixtral)
    mapping = map_tensors(entries, model, names.converters, problems, allow_missing=["*"], names=names)
    assert mapping.layouts == {"model.layers.*.mlp.experts": "per_expert"}
    placed = {item.entry.name: item.tensor_slice for item in mapping.slices}
    assert placed.keys() == shapes.keys()
    whole = placed["model.norm.weight"]
    assert (whole.target, whole.region) == ("model.norm.weight", (slice(0, 8),))
    up = placed[f"{experts}.2.w3.weight"]
    assert up.target == "model.layers.1.mlp.experts.gate_up_proj"
    assert up.region == (slice(2, 3), slice(6, 12), slice(0, 8))
    with pytest.raises(CheckpointError) as caught:
        problems.raise_if_any()
    lacking = [line.strip() for line in str(caught.value).splitlines() if experts in line]
    assert lacking == [f"- {experts}.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w3")]
    assert "- stranger" in str(caught.value)


def test_unknown_source_keys_are_those_of_save_pretrained(mixtral) -> None:
    names = hub_names(mixtral, {"model.layers.0.block_sparse_moe.gate.weight": (3, 8)})
    experts = "block_sparse_moe.experts"
    assert names.source_keys_of("model.layers.1.mlp.gate.weight") == ["model.layers.1.block_sparse_moe.gate.weight"]
    assert names.source_keys_of("lm_head.weight") == ["lm_head.weight"]
    assert names.source_keys_of("model.layers.1.mlp.experts.gate_up_proj") == [
        f"model.layers.1.{experts}.*.w1.weight",
        f"model.layers.1.{experts}.*.w3.weight",
    ]


def test_names_that_transformers_does_not_read_again(tmp_path) -> None:
    """ShieldGemma 2's renamings are for its classifier, and Transformers' Auto classes take Gemma 3's class for it."""
    config = tiny_config("shieldgemma2")
    model = transformers.AutoModelForImageTextToText.from_config(config)
    wanted = model.state_dict()
    save_weights(model, tmp_path / "opslot")
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "opslot").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())
    model.save_pretrained(tmp_path / "transformers")
    built = opslot.build_foundation_model(
        config, tmp_path / "transformers", ops_implementation="eager", architecture=type(model).__name__
    ).state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in wanted.items())


def conversion(model: nn.Module) -> tuple[CheckpointTensorConverter, dict[str, torch.Tensor]]:
    """The converter of a tensor that Transformers merges from three, and the three, the largest first."""
    parts = {f"model.layers.0.linear_attn.{name}_conv1d.weight": n for name, n in (("v", 8), ("q", 6), ("k", 6))}
    tensors = {name: torch.randn(n, 1, 4) for name, n in parts.items()}
    names = hub_names(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    converter, _ = names.converters
    return converter, tensors


def test_conversion_returns_with_the_last_input(olmo_hybrid) -> None:
    converter, tensors = conversion(olmo_hybrid)
    assert not isinstance(converter, SlicingConverter)
    v, q, k = tensors.values()
    *collecting, done = [converter.convert(name, tensor) for name, tensor in tensors.items()]
    assert collecting == [None, None]
    ((name, made),) = done
    assert name == "model.layers.0.linear_attn.conv1d.weight"
    assert torch.equal(made, torch.cat([q, k, v]))
    assert converter.finalize() == []


def test_copied_conversion_has_no_inputs(olmo_hybrid) -> None:
    converter, tensors = conversion(olmo_hybrid)
    names = list(tensors)
    converter.convert(names[0], tensors[names[0]])
    twin = copy.deepcopy(converter)
    assert twin._model is converter._model
    assert [twin.convert(name, tensors[name]) is None for name in names] == [True, True, False]
    with pytest.raises(CheckpointError, match=r"k_conv1d\.weight, .*q_conv1d\.weight are missing"):
        converter.finalize()


def test_failed_conversion_names_its_inputs(olmo_hybrid) -> None:
    converter, tensors = conversion(olmo_hybrid)
    *others, last = tensors
    for name in others:
        converter.convert(name, tensors[name])
    with pytest.raises(CheckpointError, match=r"q_conv1d\.weight \[6, 1, 4\].*they make .* \[21, 1, 4\]"):
        converter.convert(last, torch.randn(7, 1, 4))
    for name in others:
        converter.convert(name, tensors[name])
    with pytest.raises(CheckpointError, match="RuntimeError"):
        converter.convert(last, torch.randn(6, 2, 4))


def test_experts_without_gates() -> None:
    """up_proj without gate_proj: all rows of an expert."""
    converter = ExpertTensorConverter({"experts.up_proj": (2, 4, 3)})
    assert converter.target_of("experts.1.up_proj.weight") == "experts.up_proj"
    assert converter.target_of("experts.1.gate_proj.weight") is None
    placement = converter.slice_of("experts.1.up_proj.weight", (4, 3))
    assert placement.region == (slice(1, 2), slice(0, 4), slice(0, 3))
    assert converter.lacking(["experts.1.up_proj.weight"]) == ["experts.0.up_proj.weight"]
    assert converter.missing(["experts.1.up_proj.weight"]) == ["experts: expert 0 lacks up_proj"]
