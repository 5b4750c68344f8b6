"""`build_foundation_model` reads checkpoints whose tensor names differ from the model's, as Transformers saves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.errors import CheckpointError
from opslot.checkpoint import save_weights
from tests.equal import assert_equal_tensors

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 12, "num_experts_per_tok": 2}
# For each architecture: its sizes, a source key in its checkpoint, and its FQN in the model.
ARCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "mixtral": (MOE, "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
    "gpt_neox": ({"intermediate_size": 48}, "embed_out.weight", "lm_head.weight"),
    "granitemoe": (
        MOE,
        "model.layers.1.block_sparse_moe.router.layer.weight",
        "model.layers.1.block_sparse_moe.router.weight",
    ),
    "minimax_m2": (
        {**MOE, "head_dim": 8, "rotary_dim": 4},
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
        "model.layers.1.mlp.e_score_correction_bias",
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "num_hidden_layers": 3},
        "model.layers.2.mlp.moe_statics.e_score_correction_bias",
        "model.layers.2.mlp.gate.moe_statics.e_score_correction_bias",
    ),
    # Experts without gates; one layer of each kind, so that each name occurs once.
    "nemotron_h": (
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "moe", "attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 12,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 8,
        },
        "backbone.layers.0.mixer.D",
        "model.layers.0.mixer.D",
    ),
    # Other architectures use the router's name for another module.
    "phimoe": (MOE, "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight"),
    # Three tensors are merged into one.
    "olmo_hybrid": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
        },
        "model.layers.0.attention_layer_norm.weight",
        "model.layers.0.input_layernorm.weight",
    ),
    # One tensor is split into four.
    "hrm_text": (
        {"num_key_value_heads": 4, "head_dim": 8},
        "model.H_module.layers.1.attn.o_proj.weight",
        "model.H_module.layers.1.self_attn.o_proj.weight",
    ),
    # More gates than down projections: the last experts are the identity.
    "longcat_flash": (
        {
            "num_key_value_heads": 4,
            "num_layers": 1,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 12,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
        },
        "model.layers.0.mlp.experts.3.down_proj.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight",
    ),
}


pytestmark = pytest.mark.usefixtures("restored_registries")


def config_of(arch: str, **more: object) -> transformers.PreTrainedConfig:
    if arch not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {arch}")
    sizes = {**SIZES, **ARCHES[arch][0], **more}
    if arch == "longcat_flash":
        del sizes["num_hidden_layers"]
    return AutoConfig.for_model(arch, **sizes)


def original(arch: str, **more: object) -> nn.Module:
    """A small model of Transformers' class whose tensors all have different values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(arch, **more))
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def edit(folder: Path, drop: str | None = None, add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if drop is not None:
        del tensors[drop]
    save_file({**tensors, **(add or {})}, folder / "model.safetensors", metadata={"format": "pt"})


def checkpoint_error(config: transformers.PreTrainedConfig, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opslot.build_foundation_model(config, weights_path=folder, ops_implementation="eager")
    return str(caught.value)


@pytest.mark.parametrize("arch", ARCHES)
def test_checkpoint_of_transformers_is_read_bit_for_bit(arch, tmp_path) -> None:
    wanted = original(arch)
    wanted.save_pretrained(tmp_path, max_shard_size="20KB")
    _, stored, own = ARCHES[arch]
    index = (tmp_path / "model.safetensors.index.json").read_text()
    assert f'"{stored}"' in index
    assert stored == own or f'"{own}"' not in index
    found = opslot.build_foundation_model(tmp_path, weights_path=tmp_path, ops_implementation="eager")
    assert type(found).__module__ == f"opslot.generated.{arch}"
    assert_equal_tensors(found, type(wanted).from_pretrained(tmp_path))
    assert_equal_tensors(found, wanted)


@pytest.mark.parametrize("arch", ARCHES)
def test_missing_tensor_is_named_as_in_the_checkpoint(arch, tmp_path) -> None:
    wanted = original(arch)
    wanted.save_pretrained(tmp_path)
    _, stored, own = ARCHES[arch]
    edit(tmp_path, drop=stored)
    message = checkpoint_error(config_of(arch), tmp_path)
    assert message.count("hint:") == 1
    problem = message.splitlines()[2].strip().removeprefix("- ")
    if ".experts." in stored:
        assert problem == stored
    elif stored in wanted.state_dict():  # an earlier release names its modules as in the checkpoint
        assert re.fullmatch(rf"{re.escape(stored)} \[[\d, ]+\]", problem)
    else:
        assert re.fullmatch(rf"{re.escape(own)} \[[\d, ]+\] \(in the checkpoint: {re.escape(stored)}\)", problem)


@pytest.mark.parametrize("arch", ARCHES)
def test_extra_tensor_is_named_as_in_the_checkpoint(arch, tmp_path) -> None:
    original(arch).save_pretrained(tmp_path)
    _, stored, _ = ARCHES[arch]
    extra = stored.replace(".weight", ".stranger") if ".weight" in stored else f"{stored}.stranger"
    edit(tmp_path, add={extra: torch.zeros(2)})
    message = checkpoint_error(config_of(arch), tmp_path)
    assert message.count("hint:") == 1
    assert message.splitlines()[1:3] == ["  tensors that the model does not have (1):", f"  - {extra}"]


@pytest.mark.parametrize(
    ("arch", "dropped"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.10.w3.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.2.up_proj.weight"),
    ],
)
def test_missing_expert_is_named_as_in_the_checkpoint(arch, dropped, tmp_path) -> None:
    original(arch).save_pretrained(tmp_path)
    edit(tmp_path, drop=dropped)
    message = checkpoint_error(config_of(arch), tmp_path)
    assert message.splitlines()[1:3] == ["  incomplete experts (1):", f"  - {dropped}"]
    assert message.count("hint:") == 1


def test_missing_part_of_a_converted_tensor(tmp_path) -> None:
    wanted = original("olmo_hybrid")
    if "model.layers.0.linear_attn.conv1d.weight" not in wanted.state_dict():
        pytest.skip("an earlier release, which converts nothing here")
    wanted.save_pretrained(tmp_path)
    edit(tmp_path, drop="model.layers.0.linear_attn.k_conv1d.weight")
    message = checkpoint_error(config_of("olmo_hybrid"), tmp_path)
    assert message.count("hint:") == 1
    assert message.splitlines()[2].endswith("the checkpoint lacks model.layers.0.linear_attn.k_conv1d.weight")


def test_missing_tensor_that_is_split(tmp_path) -> None:
    original("hrm_text").save_pretrained(tmp_path)
    edit(tmp_path, drop="model.L_module.layers.0.attn.gqkv_proj.weight")
    message = checkpoint_error(config_of("hrm_text"), tmp_path)
    assert message.count("hint:") == 1
    assert message.count("(in the checkpoint: model.L_module.layers.0.attn.gqkv_proj.weight)") == 4


def test_experts_of_another_size_raise(tmp_path) -> None:
    original("mixtral").save_pretrained(tmp_path)
    message = checkpoint_error(config_of("mixtral", intermediate_size=20), tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert f"{name}: found [24, 32], expected [20, 32]" in message
    message = checkpoint_error(config_of("mixtral", num_local_experts=11), tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.11.w1.weight: the model has 11 experts" in message


@pytest.mark.parametrize("arch", ["mixtral", "gpt_neox", "minimax_m2", "olmo_hybrid"])
def test_base_model_checkpoint(arch, tmp_path) -> None:
    wanted = original(arch, tie_word_embeddings=True)
    wanted.base_model.save_pretrained(tmp_path)
    config = config_of(arch, tie_word_embeddings=True)
    assert_equal_tensors(
        opslot.build_foundation_model(config, weights_path=tmp_path, ops_implementation="eager"), wanted
    )
    assert_equal_tensors(type(wanted).from_pretrained(tmp_path, config=config), wanted)


@pytest.mark.parametrize("layout", ["stacked", "per_expert", "transposed"])
@pytest.mark.parametrize("arch", ["mixtral", "ernie4_5_moe"])
def test_names_of_the_model_are_read_too(arch, layout, tmp_path) -> None:
    wanted = original(arch)
    save_weights(wanted, tmp_path / "own", layout=layout)
    found = opslot.build_foundation_model(config_of(arch), weights_path=tmp_path / "own", ops_implementation="eager")
    assert_equal_tensors(found, wanted)


def test_experts_in_two_layouts_raise(tmp_path) -> None:
    wanted = original("mixtral")
    wanted.save_pretrained(tmp_path)
    own = "model.layers.0.mlp.experts.down_proj"
    edit(tmp_path, add={own: wanted.state_dict()[own]})
    message = checkpoint_error(config_of("mixtral"), tmp_path)
    assert re.search(r"mixed layouts \(1\):\n +- model\.layers\.\*\.mlp\.experts: per_expert \(", message)
    assert f", stacked ({own})" in message


def test_classifier_ignores_the_lm_head(tmp_path) -> None:
    wanted = original("mixtral", num_labels=3)
    wanted.save_pretrained(tmp_path)
    found = opslot.build_foundation_model(
        wanted.config,
        weights_path=tmp_path,
        architecture="MixtralForSequenceClassification",
        ops_implementation="eager",
    )
    assert_equal_tensors(found.model, wanted.model)


def load_sharded(folder: str) -> dict[str, Any]:
    """On a rank: the full tensors, and the number of bytes read and kept."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from opslot.models import load_foundation_weights

    model = opslot.build_foundation_model(folder, init_device="meta", ops_implementation="eager")
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = load_foundation_weights(model, folder)
    state = model.state_dict()
    return {
        "whole": {n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy() for n, t in state.items()},
        "bytes_read": report.bytes_read,
        "kept": sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in state.values()),
        "layouts": report.layouts,
    }


@pytest.mark.quick("olmo_hybrid", "gpt_neox")
@pytest.mark.parametrize("arch", ["mixtral", "gpt_neox", "olmo_hybrid"])
def test_two_ranks_load_a_sharded_model(ranks, arch, tmp_path) -> None:
    wanted = original(arch)
    wanted.save_pretrained(tmp_path)
    for answer in ranks.run(load_sharded, str(tmp_path)):
        assert answer["whole"].keys() == wanted.state_dict().keys()
        for name, tensor in wanted.state_dict().items():
            assert np.array_equal(answer["whole"][name], tensor.numpy()), name
        if arch != "olmo_hybrid":
            assert answer["bytes_read"] == answer["kept"]
        if arch == "mixtral":
            assert answer["layouts"] == {"model.layers.*.mlp.experts": "per_expert"}
