from __future__ import annotations

import errno
import json
import os
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.utils import logging as transformers_logging

from opslot._base.errors import CheckpointError, ConfigError
from opslot.checkpoint import export_hf, load_weights, save_weights
from opslot.checkpoint.save import parse_size
from tests.equal import assert_equal_tensors


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in safetensors.torch.load_file(file)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "seed_oss", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_saved_weights(tmp_path, make_model, architecture: str, tied: bool) -> None:
    model = make_model(architecture, tie_word_embeddings=tied)
    save_weights(model, tmp_path / "ours", max_shard_size=6000)
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info.values()), info
    assert_equal_tensors(loaded, model)
    ours, theirs = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("ours", "theirs"))
    assert ours == theirs


@pytest.mark.parametrize("layout", ["per_expert", "stacked", "transposed"])
def test_each_layout_round_trips(tmp_path, make_model, layout: str) -> None:
    save_weights(make_model("qwen3_moe"), tmp_path / "x", layout=layout)
    model = make_model("qwen3_moe", device="meta")
    assert set(load_weights(model, tmp_path / "x").layouts.values()) == {layout}
    assert_equal_tensors(model, make_model("qwen3_moe"))


def test_transformers_loads_the_stacked_layout(tmp_path, make_model) -> None:
    save_weights(make_model("qwen3_moe"), tmp_path / "x", layout="stacked")
    assert_equal_tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x"), make_model("qwen3_moe"))


def test_dtype_is_saved(tmp_path, make_model) -> None:
    save_weights(make_model("qwen3").to(torch.bfloat16), tmp_path / "x")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, make_model("qwen3").lm_head.weight.to(torch.bfloat16))


def test_shards_have_at_most_max_shard_size(tmp_path, make_model) -> None:
    model = make_model("qwen3_moe")
    save_weights(model, tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = sum(p.nbytes for p in model.parameters())
    assert index["metadata"] == {"total_parameters": total // 4, "total_size": total}
    assert set(index["weight_map"].values()) == {file.name for file in tmp_path.glob("*.safetensors")}
    for file in tmp_path.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 5000 or len(tensors) == 1


def test_state_dict_with_strided_and_shared_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    save_weights({"a": base.T, "b": base[:, 1:3], "c": base, "tied": base, "scalar": torch.tensor(3)}, tmp_path)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"a", "b", "c", "scalar"}
    assert torch.equal(found["a"], base.T)
    assert torch.equal(found["b"], base[:, 1:3])
    assert found["scalar"].shape == ()


def test_replacing_an_older_checkpoint_leaves_no_stale_shard(tmp_path, make_model) -> None:
    folder = tmp_path / "x"
    save_weights(make_model("qwen3_moe", seed=1), folder, max_shard_size="5KB")
    (folder / "notes.txt").write_text("mine")
    save_weights(make_model("qwen3_moe"), folder, max_shard_size="15KB")
    shards = {file.name for file in folder.glob("*.safetensors")}
    assert len(shards) == 3
    assert all(name.endswith("-of-00003.safetensors") for name in shards)
    model = make_model("qwen3_moe", device="meta")
    load_weights(model, folder)
    assert_equal_tensors(model, make_model("qwen3_moe"))
    save_weights(model, folder)
    assert {file.name for file in folder.glob("*.safetensors*")} == {"model.safetensors"}
    assert (folder / "notes.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [folder]


def test_full_disk_keeps_the_old_checkpoint(tmp_path, make_model, monkeypatch) -> None:
    folder = tmp_path / "x"
    save_weights(make_model("qwen3_moe", seed=1), folder, max_shard_size="10KB")
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device\n  found: [\d,.]+ \w+ free"):
        save_weights(make_model("qwen3_moe"), folder, max_shard_size="10KB")
    assert list(tmp_path.iterdir()) == [folder], "nothing half-written is left behind"
    model = make_model("qwen3_moe", device="meta")
    load_weights(model, folder)
    assert_equal_tensors(model, make_model("qwen3_moe", seed=1))


def test_too_little_space_raises_before_writing(tmp_path, make_model, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="more than the disk has left"):
        save_weights(make_model("qwen3_moe"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_kill_while_replacing_shards_leaves_an_unreadable_folder(tmp_path, make_model, monkeypatch) -> None:
    folder = tmp_path / "x"
    save_weights(make_model("qwen3_moe", seed=1), folder, max_shard_size="10KB")
    replace, count = os.replace, []

    def killed(source: Path, destination: Path) -> None:
        count.append(source)
        if len(count) == 3:
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_weights(make_model("qwen3_moe"), folder, max_shard_size="10KB")
    with pytest.raises(CheckpointError, match="holds neither"):
        load_weights(make_model("qwen3_moe"), folder)


def test_next_save_removes_leftovers(tmp_path, make_model) -> None:
    (tmp_path / ".x.k1ll3d.tmp").mkdir()
    (tmp_path / ".x.k1ll3d.tmp" / "model.safetensors").write_bytes(b"half")
    save_weights(make_model("qwen3"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_unwritable_folder_raises(tmp_path, make_model) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/x' cannot be written: (File exists|Not a directory)"):
        save_weights(make_model("qwen3"), tmp_path / "file" / "x")


def test_meta_models_and_invalid_arguments_raise(tmp_path, make_model) -> None:
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight is on the meta device"):
        save_weights(make_model("qwen3", device="meta"), tmp_path / "x")
    model = make_model("qwen3")
    model.model.norm.weight.data = model.model.norm.weight.data.to(torch.complex128)
    with pytest.raises(CheckpointError, match=r"model.norm.weight is torch.complex128, which safetensors cannot hold"):
        save_weights(model, tmp_path / "x")
    with pytest.raises(ConfigError, match="'experts' is unknown"):
        save_weights(make_model("qwen3"), tmp_path / "x", layout="experts")
    with pytest.raises(ConfigError, match="'5 apples' is not a valid size"):
        save_weights(make_model("qwen3"), tmp_path / "x", max_shard_size="5 apples")
    assert list(tmp_path.iterdir()) == []


def test_adapters_raise_and_merged_models_are_saved(tmp_path, make_model) -> None:
    """Transformers would not find weights under PEFT's names and would initialize all of them."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(make_model("qwen3"), lora)
    with pytest.raises(CheckpointError, match=r"PeftModel has adapters \(default\).*\n  hint: save model"):
        save_weights(model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    merged = model.merge_and_unload()
    save_weights(merged, tmp_path / "x")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in merged.state_dict().items())
    assert not torch.equal(
        loaded["model.layers.0.self_attn.q_proj.weight"], make_model("qwen3").model.layers[0].self_attn.q_proj.weight
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [(7, 7), ("7", 7), ("1.5GB", 1_500_000_000), ("2 MiB", 2 << 20), ("3kb", 3000), ("1TB", 10**12)]
)
def test_parse_size(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_export_leaves_out_padding_of_the_last_call(tmp_path, make_model, tokenizer) -> None:
    """Processors took its length, none, for audio too: Gemma 4's raised that truncation needs one."""
    tokenizer.save_pretrained(tmp_path / "source")
    used, own = (transformers.AutoTokenizer.from_pretrained(tmp_path / "source") for _ in range(2))
    used.pad_token = used.eos_token
    used(["a", "abc"], padding=True, truncation=True, max_length=2)
    export_hf(make_model("qwen3"), tmp_path / "used", processors=[used])
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "used")
    assert loaded.backend_tokenizer.padding is None
    assert loaded.backend_tokenizer.truncation is None
    assert "max_length" not in loaded.init_kwargs
    # Those of the checkpoint's own tokenizer.json are kept.
    own.backend_tokenizer.enable_padding(length=8)
    own.backend_tokenizer.enable_truncation(8)
    own.backend_tokenizer.save(str(tmp_path / "source" / "tokenizer.json"))
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "source")
    export_hf(make_model("qwen3"), tmp_path / "own", processors=[own])
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "own").backend_tokenizer
    assert (saved.padding["length"], saved.truncation["max_length"]) == (8, 8)


def test_export_saves_processors(tmp_path, make_model) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    export_hf(make_model("qwen3"), tmp_path / "x", processors=[Tokenizer(), None])
    found = {path.name for path in (tmp_path / "x").iterdir()}
    assert found == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert transformers_logging.get_verbosity() >= transformers_logging.ERROR


def test_unsavable_processor_raises(tmp_path):
    class Full:
        def save_pretrained(self, folder):
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"Full cannot be saved to '.*hf': No space left .*\n  hint: make room"):
        export_hf(torch.nn.Linear(2, 2), tmp_path / "hf", processors=[Full()])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
