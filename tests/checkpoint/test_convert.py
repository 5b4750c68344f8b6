from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights, save_weights
from opslot.checkpoint.convert import convert_folder
from opslot.checkpoint.experts import LAYOUTS, is_expert_tensor
from opslot.checkpoint.folder import _in_words
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.equal import assert_equal_tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_convert_every_layout_to_every_other(tmp_path, make_model, first: str, second: str) -> None:
    model = make_model("qwen3_moe")
    save_weights(model, tmp_path / "a", layout=first, max_shard_size="10KB")
    convert_folder(tmp_path / "a", tmp_path / "b", layout=second, max_shard_size="10KB")
    other = make_model("qwen3_moe", device="meta")
    assert set(load_weights(other, tmp_path / "b").layouts.values()) == {second}
    assert_equal_tensors(other, model)
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_converting_back_gives_the_same_folder(tmp_path, make_model) -> None:
    save_weights(make_model("qwen3_moe"), tmp_path / "a", layout="per_expert")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    convert_folder(tmp_path / "a", tmp_path / "b", layout="transposed")
    convert_folder(tmp_path / "b", tmp_path / "c", layout="per_expert")
    assert contents(tmp_path / "c") == contents(tmp_path / "a")


def test_home_is_expanded(tmp_path, make_model, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_weights(make_model("qwen3_moe"), tmp_path / "a", layout="per_expert")
    convert_folder("~/a", "~/b", layout="stacked")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_other_files_are_copied(tmp_path, make_model, caplog) -> None:
    """The source index may have wrong sizes; it is not copied."""
    source = tmp_path / "a"
    save_weights(make_model("qwen3_moe"), source, max_shard_size="10KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / "model.safetensors.index.json").write_text(json.dumps(index | {"metadata": {"total_size": "wrong"}}))
    (source / "adapter.safetensors").write_text("none of the checkpoint's")
    (source / "README.md").write_text("read me")
    for folder in ("additional_chat_templates", "original"):
        (source / folder).mkdir()
        (source / folder / "tool.jinja").write_text("{{ tools }}")
    with caplog.at_level("INFO", logger="opslot"):
        convert_folder(source, tmp_path / "b", layout="stacked")
    assert {path.relative_to(tmp_path / "b").as_posix() for path in (tmp_path / "b").rglob("*") if path.is_file()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "README.md",
        "additional_chat_templates/tool.jinja",
    }
    assert "left out, not part of the checkpoint: adapter.safetensors, original" in caplog.text


@pytest.mark.parametrize(
    ("nbytes", "words"), [(0, "0 bytes"), (1500, "1.5 KB"), (2 * 10**6, "2.0 MB"), (1234 * 10**9, "1,234.0 GB")]
)
def test_sizes_as_text(nbytes: int, words: str) -> None:
    assert _in_words(nbytes) == words


def test_convert_checkpoint_saved_by_transformers(tmp_path, moe_folder, make_model) -> None:
    convert_folder(moe_folder, tmp_path / "stacked", layout="stacked")
    tensors = safetensors.torch.load_file(tmp_path / "stacked" / "model.safetensors")
    wanted = make_model("qwen3_moe").state_dict()
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("arch", ["mixtral", "lfm2_moe"])
def test_experts_under_other_names_get_those_of_the_model(tmp_path, arch) -> None:
    model = random_model(tiny_config(arch))
    model.save_pretrained(tmp_path / "a")
    convert_folder(tmp_path / "a", tmp_path / "stacked", layout="stacked")
    tensors, wanted = safetensors.torch.load_file(tmp_path / "stacked" / "model.safetensors"), model.state_dict()
    assert all(torch.equal(tensors[name], wanted[name]) for name in tensors)
    assert any(is_expert_tensor(name) for name in tensors)
    for layout in LAYOUTS:
        convert_folder(tmp_path / "a", tmp_path / layout / "b", layout=layout)
        other = random_model(tiny_config(arch), noise=0.3)
        load_weights(other, tmp_path / layout / "b")
        assert_equal_tensors(other, model)
    convert_folder(tmp_path / "stacked", tmp_path / "back", layout="per_expert")
    for folder in ("stacked", "per_expert/b", "back"):
        found = type(model).from_pretrained(tmp_path / folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items()), folder


@pytest.mark.parametrize(
    ("arch", "layout", "match"),
    [
        ("granitemoe", "per_expert", "reads no experts in the layout 'per_expert'"),
        ("hy_v4_vl", "per_expert", "reads no experts in the layout 'per_expert'"),
        ("ernie4_5_vl_moe", "stacked", "reads no experts in the layout 'stacked'"),
        ("nemotron_h", "per_expert", "experts without gate projections"),
    ],
)
def test_layouts_that_transformers_does_not_read_raise(tmp_path, arch: str, layout: str, match: str) -> None:
    random_model(tiny_config(arch)).save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match=match):
        convert_folder(tmp_path / "a", tmp_path / "b", layout=layout)
    assert not (tmp_path / "b").exists()


def test_square_tensors_are_read_in_the_layout_of_the_others(tmp_path) -> None:
    """Transformers reads each tensor of Qwen3-VL-MoE by its own shape."""
    config = tiny_config("qwen3_vl_moe")
    config.text_config.moe_intermediate_size = config.text_config.hidden_size // 2
    model, other = random_model(config), random_model(config, noise=0.3)
    save_weights(model, tmp_path / "a", layout="transposed")
    assert set(load_weights(other, tmp_path / "a").layouts.values()) == {"transposed"}
    assert_equal_tensors(other, model)


def test_invalid_sources_and_destinations_raise(tmp_path, moe_folder, make_model) -> None:
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        convert_folder(moe_folder, moe_folder, layout="stacked")
    save_weights(make_model("qwen3"), tmp_path / "dense")
    with pytest.raises(CheckpointError, match="holds no experts"):
        convert_folder(tmp_path / "dense", tmp_path / "x", layout="stacked")
    state = make_model("qwen3_moe").state_dict()
    save_weights(state, tmp_path / "part", layout="per_expert")
    tensors = safetensors.torch.load_file(tmp_path / "part" / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(12, 16, dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, tmp_path / "part" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expert 2 lacks up_proj") as caught:
        convert_folder(tmp_path / "part", tmp_path / "x", layout="stacked")
    assert "experts of several dtypes" in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_experts_that_return_their_input_raise(tmp_path: Path) -> None:
    random_model(tiny_config("longcat_flash")).save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match="experts that return their input") as caught:
        convert_folder(tmp_path / "a", tmp_path / "b", layout="stacked")
    assert "model.layers.0.mlp.experts: 6 experts, of which 4 have a down_proj" in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_with_biases_raise(tmp_path, make_model, layout: str) -> None:
    """gpt-oss interleaves gate and up projections, so halves of the stacked tensor are neither."""
    save_weights(make_model("qwen3_moe"), tmp_path / "a", layout="transposed")
    file = tmp_path / "a" / "model.safetensors"
    bias = {"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(4, 16)}
    safetensors.torch.save_file(safetensors.torch.load_file(file) | bias, file)
    with pytest.raises(CheckpointError, match="experts with biases") as caught:
        convert_folder(tmp_path / "a", tmp_path / "b", layout=layout)
    assert "layers.0.mlp.experts.down_proj_bias" in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_missing_last_expert_raises(tmp_path, make_model, layers) -> None:
    """Detected from the other layers, or from the number of experts in config.json."""
    save_weights(make_model("qwen3_moe"), tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    last = make_model("qwen3_moe").config.num_experts - 1
    gone = tuple(f"model.layers.{layer}.mlp.experts.{last}." for layer in layers)
    safetensors.torch.save_file({k: v for k, v in tensors.items() if not k.startswith(gone)}, file)
    with pytest.raises(CheckpointError) as caught:
        convert_folder(tmp_path / "part", tmp_path / "x", layout="stacked")
    for layer in layers:
        assert f"layers.{layer}.mlp.experts: expert {last} lacks gate_proj, up_proj, down_proj" in str(caught.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_the_model_has_transposed_keep_their_layout(tmp_path, layout: str) -> None:
    model = random_model(tiny_config("llama4_text"))
    model.save_pretrained(tmp_path / "a")
    if layout == "transposed":
        convert_folder(tmp_path / "a", tmp_path / "b", layout=layout)
        found = type(model).from_pretrained(tmp_path / "b", dtype=torch.float32).state_dict()
        assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())
        return
    with pytest.raises(CheckpointError, match="experts of Llama4ForCausalLM are transposed in the model"):
        convert_folder(tmp_path / "a", tmp_path / "b", layout=layout)
    assert not (tmp_path / "b").exists()
