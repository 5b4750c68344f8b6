"""Models and data sets of the Hugging Face hub."""

import errno
import os
from pathlib import Path

import pytest

from opslot._base import hub as hub_module
from opslot._base.errors import ConfigError, DataError
from opslot._base.hub import (
    _downloaded_data,
    _downloaded_model,
    commit_of,
    data_folder,
    downloaded,
    hub_name,
    is_repo_id,
    local_data,
    local_model,
    require_safetensors,
)
from tests.hub import COMMIT, NEWER_COMMIT

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


def test_revision_of_a_data_set_with_an_escaped_slash(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "data/a.jsonl")
    hub.revisions.add("my/branch")
    local_data("hf://datasets/org/name@my%2Fbranch/data/*.jsonl")
    assert hub.downloads == ["data/a.jsonl"]


def test_data_set_without_such_files_raises(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "README.md", "data/train.jsonl")
    with pytest.raises(ConfigError, match=r"no file of the data set matches .*\n  found: data/train\.jsonl\n"):
        local_data("hf://datasets/org/name/*.parquet")


@pytest.mark.parametrize(
    ("names", "found", "hint"),
    [
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin; pickled weights", "from_pretrained('org/name')"),
        (["config.json", "model.Q4.gguf"], "config.json, model.Q4.gguf", "GGUF files are for inference"),
        (
            ["config.json", "model.fp16.safetensors", "pytorch_model.bin"],
            "only variants of the weights: model.fp16.safetensors",
            "from_pretrained('org/name', variant='fp16').save_pretrained",
        ),
        (
            ["config.json", "model.bf16-00001-of-00002.safetensors", "model.bf16-00002-of-00002.safetensors"],
            "only variants of the weights: model.bf16-00001-of-00002.safetensors",
            "variant='bf16'",
        ),
        (["config.json", "consolidated.safetensors"], "config.json, consolidated", "names of the model's own library"),
    ],
)
def test_weights_in_other_formats_raise(hub, tmp_path, names, found, hint):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *names)
    with pytest.raises(ConfigError, match="org/name has no safetensors") as raised:
        local_model("org/name")
    assert f"found: {found}" in str(raised.value)
    assert hint in str(raised.value)
    assert hub.downloads == []
    assert local_model("org/name", weights=False).is_dir()


def test_repository_without_files_of_a_model_raises(hub, tmp_path):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", "model.gguf")
    with pytest.raises(ConfigError, match=r"none of the files of a Transformers model\n  found: model\.gguf"):
        local_model("org/name", weights=False)


@pytest.mark.parametrize(
    "url", ["https://huggingface.co/org/name", "hf://org/name", "https://hf.co/org/name/tree/main"]
)
def test_url_of_a_model_raises(url):
    with pytest.raises(ConfigError, match=r"hint: a model of the Hugging Face hub is named org/name$"):
        local_model(url)


@pytest.mark.parametrize("url", ["https://huggingface.co/datasets/org/name", "hf://org/name/a.jsonl"])
def test_url_of_a_data_set_raises(url):
    with pytest.raises(ConfigError, match="such as hf://datasets/org/name/"):
        local_data(url)


def test_cache_that_is_not_writable_raises(hub, tmp_path, monkeypatch):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", "config.json")
    cache = write(tmp_path, "file") / "file"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    with pytest.raises(ConfigError, match="hint: set HF_HOME to a folder that can be written"):
        local_model("org/name", weights=False)


def test_offline_without_cache_raises(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="found: HF_HUB_OFFLINE is set") as raised:
        local_model("org/name")
    assert "hint: unset HF_HUB_OFFLINE" in str(raised.value)


def test_offline_with_cache(hub, tmp_path, monkeypatch):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *FILES)
    hub.repositories["datasets/org/name"] = write(tmp_path / "data", "a.jsonl")
    folder, data = local_model("org/name"), local_data("hf://datasets/org/name/*.jsonl")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _downloaded_model.cache_clear()
    _downloaded_data.cache_clear()
    assert local_model("org/name") == folder
    assert local_data("hf://datasets/org/name/*.jsonl") == data


def test_cache_without_the_weights_raises(hub, tmp_path, monkeypatch):
    """When offline, older releases of huggingface_hub return it."""
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *FILES)
    folder = local_model("org/name", weights=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(folder))
    with pytest.raises(ConfigError, match="org/name is in the cache without its weights"):
        local_model("org/name")


def test_files_of_a_model_are_listed_once_before_its_downloads(hub, tmp_path, monkeypatch):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", *FILES)
    listed = []
    files_of = hub_module._files_of
    monkeypatch.setattr(hub_module, "_files_of", lambda *given: listed.append(given) or files_of(*given))
    require_safetensors("org/name")
    local_model("org/name", weights=False)
    local_model("org/name")
    assert listed == [("org/name", None, "model")]


@pytest.mark.parametrize(
    ("name", "repository", "pinned"),
    [
        ("org/name", "org/name", "org/name@{}"),
        ("org/name@refs/pr/1", "org/name@refs/pr/1", "org/name@{}"),
        ("hf://datasets/org/name/a/*.txt", "hf://datasets/org/name", "hf://datasets/org/name@{}/a/*.txt"),
        ("hf://datasets/org/name@v1/*.txt", "hf://datasets/org/name@v1", "hf://datasets/org/name@{}/*.txt"),
        ("hf://datasets/org/name@a%2Fb/c", "hf://datasets/org/name@a/b", "hf://datasets/org/name@{}/c"),
        ("hf://datasets/org/name", "hf://datasets/org/name", "hf://datasets/org/name@{}/"),
    ],
)
def test_names_with_a_commit(name, repository, pinned):
    parts = hub_name(name)
    assert parts.repository == repository
    assert not parts.has_commit
    assert parts.at(COMMIT) == pinned.format(COMMIT)
    assert hub_name(parts.at(COMMIT)).has_commit


@pytest.mark.parametrize("name", ["./org/name", "data/*.txt", "hf://datasets/org", "a/b/c"])
def test_names_that_are_not_of_the_hub(name):
    assert hub_name(name) is None


def test_commit_of_a_branch_without_a_connection_is_the_last_one_read(hub, tmp_path, monkeypatch):
    hub.repositories["models/org/name"] = write(tmp_path / "remote", "config.json")
    hub.repositories["datasets/org/name"] = tmp_path / "remote"
    model, data = hub_name("org/name"), hub_name("hf://datasets/org/name/*.txt")
    assert commit_of(model) == commit_of(data) == COMMIT
    hub.move("models/org/name", tmp_path / "remote")
    assert commit_of(model) == NEWER_COMMIT
    assert commit_of(data) == COMMIT
    assert commit_of(hub_name("org/name@v2")) is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert commit_of(model) == NEWER_COMMIT
    assert commit_of(data) == COMMIT
    assert commit_of(hub_name("org/other")) is None


def test_files_beside_data_are_downloaded_as_they_are_read(hub, tmp_path):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "data/a.jsonl", "images/1.png", "images/2.png")
    folder = Path(local_data("hf://datasets/org/name/data/*.jsonl")).parent
    assert data_folder("hf://datasets/org/name/data") == folder
    for _ in range(2):
        assert downloaded(folder / "../images/1.png").read_text() == "contents of images/1.png"
    assert hub.downloads == ["data/a.jsonl", "images/1.png"]
    with pytest.raises(FileNotFoundError, match="the data set org/name has no such file"):
        downloaded(folder / "../images/3.png")


def test_files_of_other_folders_are_not_downloaded(hub, tmp_path):
    missing = tmp_path / "images/1.png"
    assert downloaded(missing) == missing


def test_file_beside_data_without_a_connection_raises(hub, tmp_path, monkeypatch):
    hub.repositories["datasets/org/name"] = write(tmp_path / "remote", "a.jsonl", "1.png")
    folder = data_folder("hf://datasets/org/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"1\.png of the data set org/name cannot be downloaded") as raised:
        downloaded(folder / "1.png")
    assert "found: HF_HUB_OFFLINE is set" in str(raised.value)
    assert "hint: unset HF_HUB_OFFLINE" in str(raised.value)


@pytest.mark.parametrize("name", ["hf://datasets/org", "hf://datasets/org/missing"])
def test_folder_of_no_data_set_raises(hub, name):
    with pytest.raises(ConfigError, match="is not a folder of a data set"):
        data_folder(name)
