"""Models and data sets of the Hugging Face hub, as local files.

Files are downloaded once per machine, into Hugging Face's cache. `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and
`HF_HUB_OFFLINE` work as in Hugging Face's libraries.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from opslot._base.errors import ConfigError, DataError
from opslot._base.files import missing_path_hint, variant_of, weights_in_other_formats, write_text
from opslot._base.launcher import is_first_local_rank

DATASETS = "hf://datasets/"
_ID = r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_MODEL = re.compile(_ID + r"(@(?P<revision>[\w./-]+))?")
_FILES = (".json", ".yaml", ".yml")
# A path follows the revision, so in a revision other than the hub's own a slash is written as %2F.
_DATA = re.compile(DATASETS + _ID + r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.%-]+))?(/(?P<files>.*))?")
_COMMIT = re.compile("[0-9a-f]{40}")
# A file of a data set in the cache.
_CACHED = re.compile(r"(?P<cache>.+)/datasets--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/(?P<file>.+)")
_URL = re.compile(r"(https?://(huggingface\.co|hf\.co)/|hf://)(datasets/)?" + _ID + r"(/.*)?")
# Configs, tokenizers, processors, and code that ships with a model.
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# Qwen2.5-Omni's speakers are copied to an export.
_WEIGHTS = ("*.safetensors", "spk_dict.pt")
# The same weights in other layouts.
_COPIES = ("*/*.safetensors", "consolidated*")
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


class HubName(NamedTuple):
    """A model of the hub, or files or a folder of a data set, by their name in a configuration.

    Attributes:
        revision: a branch, a tag or a commit; None is the repository's default branch.
        files: of a data set, a path or a glob; None for a model.
    """

    repo: str
    revision: str | None
    files: str | None = None

    @property
    def repo_type(self) -> str | None:
        """As `huggingface_hub` takes it."""
        return None if self.files is None else "dataset"

    @property
    def repository(self) -> str:
        """The name without files: what is read at one commit."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{'' if self.files is None else DATASETS}{self.repo}{revision}"

    @property
    def has_commit(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> str:
        """The name with a commit as its revision."""
        files = "" if self.files is None else f"/{self.files}"
        return f"{self._replace(revision=commit).repository}{files}"


def hub_name(name: str) -> HubName | None:
    """The parts of a name of the hub; None for a local path."""
    if name.startswith(DATASETS):
        data = _DATA.fullmatch(name)
        revision = data and data["revision"] and unquote(data["revision"])
        return HubName(data["id"], revision, data["files"] or "") if data else None
    model = _MODEL.fullmatch(name) if is_repo_id(name) else None
    return HubName(model["id"], model["revision"]) if model else None


def commit_of(name: HubName) -> str | None:
    """The commit that a revision has now, or without a connection had when it was last read; None if it is not found.

    It is recorded in the cache of huggingface_hub, as huggingface_hub does when it downloads files of a revision.
    """
    from huggingface_hub import HfApi, errors

    if name.has_commit:
        return name.revision
    record = _cache_folder(name) / "refs" / (name.revision or "main")
    try:
        info = HfApi().repo_info(name.repo, revision=name.revision or "main", repo_type=name.repo_type, expand=["sha"])
    except errors.RevisionNotFoundError:
        return None
    except Exception:  # the HTTP errors of huggingface_hub differ between its releases
        recorded = record.read_text().strip() if record.is_file() else ""
        return recorded if _COMMIT.fullmatch(recorded) else None
    if info.sha is not None:
        # A cache that cannot be written is an error of the download.
        with contextlib.suppress(OSError):
            write_text(record, info.sha)
    return info.sha


def _cache_folder(name: HubName) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.repo, repo_type=name.repo_type or "model")
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / folder


def is_repo_id(name: str | os.PathLike[str]) -> bool:
    """Whether `name` has the form of a model of the hub, ORG/NAME or ORG/NAME@REVISION, and is not a local path."""
    text = os.fspath(name)
    return _MODEL.fullmatch(text) is not None and not text.endswith(_FILES) and not Path(text).exists()


def local_model(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """A local path with its "~" expanded; for a model of the hub, the folder that it is downloaded to.

    Args:
        weights: False leaves out the weights.

    Raises:
        ConfigError: a model of the hub that cannot be downloaded, or that has no safetensors.
    """
    if url := _URL.fullmatch(os.fspath(name)):
        raise ConfigError(f"{name} is not a path", hint=f"a model of the Hugging Face hub is named {url['id']}")
    if not is_repo_id(name):
        return Path(name).expanduser()
    return _downloaded_model(os.fspath(name), weights=weights)


@functools.cache
def require_safetensors(name: str) -> None:
    """Check a model of the hub before anything is downloaded.

    Raises:
        ConfigError: it has weights in other formats only.
    """
    from huggingface_hub.utils import filter_repo_objects

    model = hub_name(name)
    if model is None or model.repo_type is not None:
        return
    names = _files_of(model.repo, model.revision, "model")
    weights = [*filter_repo_objects(names, allow_patterns=_WEIGHTS[0], ignore_patterns=[*_COPIES])]
    if names and all(map(variant_of, weights)):
        found, hint = weights_in_other_formats(names, model.repo)
        raise ConfigError(f"{name} has no safetensors that Transformers reads", found=found, hint=hint)


@functools.cache
def _downloaded_model(name: str, *, weights: bool) -> Path:
    model = hub_name(name)
    assert model is not None, name
    repo, revision = model.repo, model.revision
    patterns = [*_SMALL]
    if weights:
        require_safetensors(name)
        # Of the commit that the config was read from, also where the branch moved on since.
        revision = _downloaded_model(name, weights=False).name
        patterns += _WEIGHTS
    try:
        folder = _download(repo, revision, allow_patterns=patterns, ignore_patterns=[*_COPIES])
    except Exception as error:  # the HTTP errors of huggingface_hub differ between its releases
        found, hint = _problem(error, repo)
        near = missing_path_hint(name)
        raise ConfigError(
            f"{name!r} is neither a local path nor a model that can be downloaded from the Hugging Face hub",
            found=found,
            hint=f"{near} Otherwise {hint}" if near.startswith("did you mean") else hint,
        ) from error
    if not folder.is_dir():
        raise ConfigError(
            f"{name} has none of the files of a Transformers model",
            found=_some(_files_of(repo, revision, "model")),
            hint="name a model with config.json and safetensors",
        )
    if weights and not any(folder.glob(_WEIGHTS[0])):
        # When offline, older releases of huggingface_hub return what is in the cache.
        raise ConfigError(
            f"{name} is in the cache without its weights, and the Hugging Face hub cannot be reached",
            found=str(folder),
            hint="unset HF_HUB_OFFLINE where it is set, and check the connection",
        )
    return folder


def data_hint(repo: str) -> str:
    """How the files of a data set of the hub are named."""
    return f"for a data set of the Hugging Face hub, name its files, such as {DATASETS}{repo}/**/train*.parquet"


def local_data(name: str) -> str:
    """A local path or glob unchanged; for hf://datasets/ORG/NAME[@REVISION]/GLOB, the glob of the downloaded files.

    Raises:
        ConfigError: no files are named, or they cannot be downloaded.
    """
    if name.startswith(DATASETS):
        return _downloaded_data(name)
    if url := _URL.fullmatch(name):
        raise ConfigError(f"{name} is not a path", hint=data_hint(url["id"]))
    return name


@functools.cache
def _downloaded_data(name: str) -> str:
    parts = hub_name(name)
    if parts is None or not parts.files:
        raise ConfigError(
            f"{name} does not name files of a data set of the Hugging Face hub",
            hint=f"write {DATASETS}ORG/NAME/FILES, where FILES is a path or a glob such as **/train*.parquet",
        )
    repo, revision, files = parts.repo, parts.revision, parts.files
    # In a glob, "**/" also matches no folder, and "*" no slash; both differ in the patterns of huggingface_hub.
    patterns = [files, files.replace("**/", "")]
    has_deeper = "**" in files or files.endswith("/")
    deeper = [] if has_deeper else ["*/" * (files.count("/") + 1) + "*"]
    try:
        folder = _download(repo, revision, repo_type="dataset", allow_patterns=patterns, ignore_patterns=deeper)
    except Exception as error:  # as for models
        found, hint = _problem(error, repo, "dataset")
        raise ConfigError(f"{name} cannot be downloaded from the Hugging Face hub", found=found, hint=hint) from error
    local = str(folder / files)
    if not glob.glob(local, recursive=True):
        raise ConfigError(
            f"no file of the data set matches {name}",
            found=_some(_files_of(repo, revision, "dataset")),
            hint=f"see its files on {_page(repo, 'dataset')}",
        )
    return local


def data_folder(name: str) -> Path:
    """The local folder of hf://datasets/ORG/NAME[@REVISION][/FOLDER], whose files `downloaded` gets as they are read.

    Raises:
        ConfigError: no such repository or revision.
    """
    parts = hub_name(name)
    commit = parts and commit_of(parts)
    if parts is None or commit is None:
        raise ConfigError(
            f"{name} is not a folder of a data set of the Hugging Face hub, or it cannot be reached",
            hint=f"write {DATASETS}ORG/NAME or {DATASETS}ORG/NAME/FOLDER, and check the name and the connection",
        )
    return _cache_folder(parts) / "snapshots" / commit / (parts.files or "")


def downloaded(path: Path) -> Path:
    """`path`; if it is a missing file in the cached folder of a data set of the hub, it is downloaded first.

    Raises:
        FileNotFoundError: the data set has no such file.
        DataError: it cannot be downloaded.
    """
    cached = None if path.exists() else _CACHED.fullmatch(os.path.normpath(path))
    if cached is None:
        return path
    # A medium of a local folder, which is read above, does not need them.
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    repo, file = cached["id"].replace("--", "/"), cached["file"]
    disable_progress_bars()
    try:
        hf_hub_download(repo, file, repo_type="dataset", revision=cached["commit"], cache_dir=cached["cache"])
    except errors.RemoteEntryNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"the data set {repo} has no such file") from error
    except Exception as error:  # as for models
        found, hint = _problem(error, repo, "dataset")
        what = f"{file} of the data set {repo} cannot be downloaded from the Hugging Face hub"
        raise DataError(what, found=found, hint=hint) from error
    return path


def _files_of(repo: str, revision: str | None, repo_type: str) -> list[str]:
    """Names of a repository's files; none where the hub cannot be reached."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, revision=revision or "main", repo_type=repo_type)
    except Exception:
        # The download that follows reports it, unless the files are in the cache.
        return []


def _some(names: list[str]) -> str:
    shown = [name for name in names if not name.startswith(".") and name != "README.md"]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")


def _download(repo: str, revision: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not is_first_local_rank():
        # All processes of a machine wait for the same files.
        disable_progress_bars()
    return Path(snapshot_download(repo, revision=revision, **options))


def _page(repo: str, repo_type: str | None) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{f'{repo_type}s/' if repo_type else ''}{repo}"


def _problem(error: Exception, repo: str, repo_type: str | None = None) -> tuple[str, str]:
    """What was found, and the hint, of an error of a download."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "its terms are not accepted", f"accept them on {_page(repo, repo_type)}, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the repository does not exist, or it is private", "check the name, or log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the revision does not exist", "check what follows the @"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
    if isinstance(error, errors.HFValidationError):
        return reason, "check the name"
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return reason, "set HF_HOME to a folder that can be written and has enough space"
    option = f" --repo-type {repo_type}" if repo_type else ""
    download = f"run `hf download {repo}{option} --local-dir {repo.split('/')[1]}` on another machine"
    if constants.HF_HUB_OFFLINE:
        found = f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} lacks files of it"
        return found, f"unset HF_HUB_OFFLINE, or {download} and give that folder"
    return reason, f"check the connection, or {download} and give that folder"
