"""Checkpoints with values, indexes or configs that must not be loaded, or not without a warning."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import opslot
from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights, save_weights
from opslot.checkpoint.folder import read_folder


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named_in_a_warning(tmp_path: Path, caplog, value: float) -> None:
    weight = torch.ones(3, 2)
    weight[1, 1] = value
    model = nn.Linear(2, 3)
    folder = saved(tmp_path / "x", weight=weight, bias=torch.zeros(3))
    with caplog.at_level(logging.WARNING, logger="opslot"):
        report = load_weights(model, folder)
    assert report.not_finite == ["weight"]
    assert "1 parameters of" in caplog.text
    assert "e.g. weight; the loss" in caplog.text
    assert torch.equal(model.weight.isfinite(), weight.isfinite())


def test_large_finite_values_give_no_warning(tmp_path: Path) -> None:
    """The values are finite, but their sum overflows."""
    folder = saved(tmp_path / "x", weight=torch.full((3, 2), 3e38), bias=torch.zeros(3))
    assert load_weights(nn.Linear(2, 3), folder).not_finite == []


def test_infinities_of_buffers_are_no_problem(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    model.register_buffer("most", torch.tensor(float("inf")))
    folder = save_weights(model, tmp_path / "hf")
    assert load_weights(model, folder).not_finite == []


@pytest.mark.parametrize(
    ("stored", "value", "dtype"), [(torch.float64, 1e300, torch.float32), (torch.float32, -1e5, torch.float16)]
)
def test_overflow_is_an_error_and_changes_nothing(tmp_path: Path, stored, value: float, dtype) -> None:
    weight = torch.zeros(3, 2, dtype=stored)
    weight[2, 0] = value
    folder = saved(tmp_path / "x", weight=weight, bias=torch.zeros(3))
    model = nn.Linear(2, 3).to(dtype)
    before = model.weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=rf"values that overflow \(1\):\n  - weight: {re.escape(f'{abs(value):g}')} in torch"
    ):
        load_weights(model, folder)
    assert torch.equal(model.weight, before)
    weight[2, 0] = 7
    load_weights(model, saved(tmp_path / "x", weight=weight, bias=torch.zeros(3)))
    assert model.weight[2, 0] == 7


def test_quantized_checkpoint_is_an_error(tmp_path: Path, make_model) -> None:
    save_weights(make_model("qwen3"), tmp_path / "x")
    file = tmp_path / "x" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match=r"is quantized(.*\n)+  found: quantization_config .*: awq\n  hint: "):
        load_weights(make_model("qwen3"), tmp_path / "x")


def test_quantization_config_is_not_saved(tmp_path: Path, make_model) -> None:
    model = make_model("qwen3")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(CheckpointError, match=r"the config has a quantization_config.*\n  hint: delete"):
        save_weights(model, tmp_path / "x")
    built = opslot.build_foundation_model(model.config)
    save_weights(built, tmp_path / "x")
    assert "quantization_config" not in json.loads((tmp_path / "x" / "config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"weight_map": ' + "[" * 100_000,
        json.dumps({"weight_map": {"a": "x" * 5000}}),
        json.dumps({"weight_map": {"a": "x\0y"}}),
        json.dumps({"weight_map": {"a": ""}}),
        json.dumps({"weight_map": {"a": "../x"}}),
        json.dumps({"weight_map": {"a": 3}}),
        json.dumps({"weight_map": ["a"]}),
        json.dumps(["a"]),
    ],
)
def test_bad_index_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json is not a valid safetensors index\n  found: .*\n  hint: "):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "x\0y"])
def test_path_that_no_folder_can_have_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_folder(tmp_path / name)


def test_file_in_place_of_a_folder_and_the_reverse(tmp_path: Path, make_model) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_weights(make_model("qwen3"), tmp_path / "file")
    (tmp_path / "x" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds neither"):
        read_folder(tmp_path / "x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_weights(make_model("qwen3"), tmp_path / "x")
