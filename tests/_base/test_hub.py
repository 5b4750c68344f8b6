"""Models and data sets of the Hugging Face hub."""

import pytest

from opslot._base.errors import ConfigError
from opslot._base.hub import is_repo_id, local_data, local_model

FILES = (
    "config.json",
    "chat_template.jinja",
    "model-00001-of-00001.safetensors",
    "consolidated.safetensors",
    "original/model.safetensors",
    "pytorch_model.bin",
    "README.md",
)


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"contents of {name}")
    return folder


def names_in(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("org/name.v1-2@main", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("configs/text.yaml", False),
        ("model/config.json", False),
    ],
)
def test_is_repo_id(name, expected):
    assert is_repo_id(name) == expected


def test_local_paths_are_not_downloaded(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, "org/name/config.json"))
    hub.repositories["models/org/name"] = write(tmp_path / "remote", "config.json")
    assert not local_model("org/name").is_absolute()
    assert local_data("org/**/*.json") == "org/**/*.json"
    assert hub.downloads == []


def test_model_files(hub, tmp_path):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *FILES)
    small = local_model("org/name", weights=False)
    assert names_in(small) == {"config.json", "chat_template.jinja"}
    assert local_model("org/name@main") == small
    assert names_in(small) == {"config.json", "chat_template.jinja", "model-00001-of-00001.safetensors"}
    assert (small / "config.json").read_text() == "contents of config.json"
    local_model("org/name")
    assert sorted(hub.downloads) == ["chat_template.jinja", "config.json", "model-00001-of-00001.safetensors"]


def test_data_files(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "a.jsonl", "data/b.jsonl", "data/c.parquet")
    found = local_data("hf://datasets/org/name/**/*.jsonl")
    assert found.endswith("/**/*.jsonl")
    assert sorted(hub.downloads) == ["a.jsonl", "data/b.jsonl"]


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        ("org/missing", "there is none of that name, or it is private", "check the name"),
        ("org/gated", "its terms are not accepted", "accept its terms on https://huggingface.co/org/gated"),
        ("org/name@v2", "it has no such revision", "check what follows the @"),
    ],
)
def test_models_that_cannot_be_downloaded_raise(hub, tmp_path, name, found, hint):
    hub.repositories = {f"models/org/{n}": write(tmp_path / "remote", "config.json") for n in ("name", "gated")}
    hub.gated = {"models/org/gated"}
    with pytest.raises(ConfigError, match="neither a local path nor a model") as raised:
        local_model(name)
    assert f"found: {found}\n" in str(raised.value)
    assert f"hint: {hint}" in str(raised.value)


def test_mistyped_path_names_the_nearest(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, "models/qwen3/config.json"))
    with pytest.raises(ConfigError, match=r"did you mean models/qwen3\?"):
        local_model("models/qwen33")


def test_without_a_connection(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"hf download org/name --local-dir name"):
        local_model("org/name")
    with pytest.raises(ConfigError, match=r"hf download org/data --repo-type dataset --local-dir data"):
        local_data("hf://datasets/org/data/*.parquet")


@pytest.mark.parametrize("name", ["hf://datasets/org", "hf://datasets/org/name", "hf://datasets/org/name@main"])
def test_data_set_without_files_raises(hub, name):
    with pytest.raises(ConfigError, match="names no files"):
        local_data(name)
