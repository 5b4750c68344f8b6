"""Folders that are not whole checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from opslot._base.errors import CheckpointError
from opslot.checkpoint import load_weights
from tests.equal import assert_equal_tensors

INDEX = "model.safetensors.index.json"


def cut(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[1]
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    return (
        rf"{file.name} is not a whole safetensors file: its header accounts for {size} bytes, the file has {size - 100}"
    )


def remove_shard(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.unlink()
    return rf"shards that the index names and the folder lacks \(1\):\n  - {file.name}"


def break_index(folder: Path) -> str:
    (folder / INDEX).write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    return "is not a valid safetensors index"


def drop_index(folder: Path) -> str:
    (folder / INDEX).unlink()
    return r"found: \d+ shards, e.g. model-00001-of-\d+.safetensors\n  hint: add the index"


def misplace(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["phantom"] = sorted(index["weight_map"].values())[0]
    (folder / INDEX).write_text(json.dumps(index))
    return r"missing from the shard that the index gives \(1\):\n  - phantom"


def repeat(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    tensors = safetensors.torch.load_file(folder / shards[1])
    tensors[name] = safetensors.torch.load_file(folder / shards[0])[name]
    safetensors.torch.save_file(tensors, folder / shards[1])
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    return rf"tensors in two shards \(1\):\n  - {name} \({shards[0]}, {shards[1]}\)"


def only_pickles(folder: Path) -> str:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    return "found: pytorch_model.bin; pickled weights can run code"


def only_a_variant(folder: Path) -> str:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "model.fp16.safetensors")
    return r"found: only variants of the weights: model.fp16.safetensors\n  hint: .*variant='fp16'"


def two_saves(folder: Path) -> str:
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return "holds both model.safetensors and an index of other files"


def empty(folder: Path) -> str:
    for file in folder.iterdir():
        file.unlink()
    return "found: nothing"


def absent(folder: Path) -> str:
    empty(folder)
    folder.rmdir()
    return "is not a folder"


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        remove_shard,
        break_index,
        drop_index,
        misplace,
        repeat,
        only_pickles,
        only_a_variant,
        two_saves,
        empty,
        absent,
    ],
    ids=lambda f: f.__name__,
)
def test_damaged_folders_raise_and_change_nothing(moe_folder, make_model, damage) -> None:
    message = damage(moe_folder)
    model = make_model("qwen3_moe", seed=1)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, moe_folder)
    assert_equal_tensors(model, make_model("qwen3_moe", seed=1))
