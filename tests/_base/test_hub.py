"""Models and data sets of the Hugging Face hub."""

import errno
import os

import pytest

from opslot._base.errors import ConfigError
from opslot._base.hub import is_repo_id, local_data, local_model

FILES = (
    "config.json",
    "chat_template.jinja",
    "model-00001-of-00001.safetensors",
    "spk_dict.pt",
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
    expected = {"config.json", "chat_template.jinja", "model-00001-of-00001.safetensors", "spk_dict.pt"}
    assert names_in(small) == expected
    assert (small / "config.json").read_text() == "contents of config.json"
    local_model("org/name")
    assert sorted(hub.downloads) == sorted(expected)


def test_data_files(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "a.jsonl", "data/b.jsonl", "data/c.parquet")
    found = local_data("hf://datasets/org/name/**/*.jsonl")
    assert found.endswith("/**/*.jsonl")
    assert sorted(hub.downloads) == ["a.jsonl", "data/b.jsonl"]


def test_data_files_in_deeper_folders_are_not_downloaded(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "a/1.jsonl", "a/b/2.jsonl", "a/b/c/3.jsonl")
    local_data("hf://datasets/org/name/a/*.jsonl")
    assert hub.downloads == ["a/1.jsonl"]


@pytest.mark.parametrize("revision", ["main", "refs/convert/parquet"])
def test_revision_of_a_data_set_ends_before_the_path(hub, tmp_path, revision):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "data/train/a.jsonl")
    hub.revisions.add(revision)
    found = local_data(f"hf://datasets/org/name@{revision}/data/train/*.jsonl")
    assert found.endswith("/data/train/*.jsonl")
    assert hub.downloads == ["data/train/a.jsonl"]


def test_config_and_weights_are_of_one_commit(hub, tmp_path):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *FILES)
    small = local_model("org/name", weights=False)
    hub.revisions.discard("main")
    assert local_model("org/name") == small


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        ("org/missing", "the repository does not exist, or it is private", "check the name"),
        ("org/gated", "its terms are not accepted", "accept them on {endpoint}/org/gated, and log in"),
        ("org/name@v2", "the revision does not exist", "check what follows the @"),
        ("org/a--b", "Cannot have -- or .. in repo_id: 'org/a--b'.", "check the name"),
    ],
)
def test_models_that_cannot_be_downloaded_raise(hub, tmp_path, name, found, hint):
    hub.repositories = {f"models/org/{n}": write(tmp_path / "remote", "config.json") for n in ("name", "gated")}
    hub.gated = {"models/org/gated"}
    with pytest.raises(ConfigError, match="neither a local path nor a model") as raised:
        local_model(name)
    assert f"found: {found}\n" in str(raised.value)
    assert f"hint: {hint.format(endpoint=hub.endpoint)}" in str(raised.value)


def test_model_without_safetensors_raises(hub, tmp_path):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", "config.json", "pytorch_model.bin")
    local_model("org/name", weights=False)
    with pytest.raises(ConfigError, match="'org/name' has no weights in safetensors on the Hugging Face hub"):
        local_model("org/name")


def test_terms_of_a_data_set_are_on_its_page(hub, tmp_path):
    hub.repositories["datasets/org/gated"] = write(tmp_path / "remote", "a.jsonl")
    hub.gated = {"datasets/org/gated"}
    with pytest.raises(ConfigError, match=f"accept them on {hub.endpoint}/datasets/org/gated, and"):
        local_data("hf://datasets/org/gated/*.jsonl")


def test_full_disk_raises(hub, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"No space left on device\n  hint: set HF_HOME to a folder"):
        local_model("org/name")


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
    with pytest.raises(ConfigError, match="does not name files"):
        local_data(name)
