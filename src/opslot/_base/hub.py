"""Models and data sets of the Hugging Face hub, as local files.

Files are downloaded once per machine, into Hugging Face's cache. `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and
`HF_HUB_OFFLINE` work as in Hugging Face's libraries.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot._base.files import missing_path_hint
from opslot._base.launcher import is_first_local_rank

DATASETS = "hf://datasets/"
_ID = r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_MODEL = re.compile(_ID + r"(@(?P<revision>[\w./-]+))?")
_FILES = (".json", ".yaml", ".yml")
# A path follows the revision, so of revisions with a slash only the hub's own are recognized.
_DATA = re.compile(DATASETS + _ID + r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?/(?P<files>.+)")
# Configs, tokenizers, processors, and code that ships with a model.
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# Qwen2.5-Omni's speakers are copied to an export.
_WEIGHTS = ("*.safetensors", "spk_dict.pt")
# The same weights in other layouts.
_COPIES = ("*/*.safetensors", "consolidated*")
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def is_repo_id(name: str | os.PathLike[str]) -> bool:
    """Whether `name` has the form of a model of the hub, ORG/NAME or ORG/NAME@REVISION, and is not a local path."""
    text = os.fspath(name)
    return _MODEL.fullmatch(text) is not None and not text.endswith(_FILES) and not Path(text).exists()


def split_repo_id(name: str) -> tuple[str, str | None]:
    """ORG/NAME and the revision of a name for which `is_repo_id` holds."""
    match = _MODEL.fullmatch(name)
    assert match is not None, name
    return match["id"], match["revision"]


def local_model(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """A local path with its "~" expanded; for a model of the hub, the folder that it is downloaded to.

    Args:
        weights: False leaves out the weights.

    Raises:
        ConfigError: a model of the hub that cannot be downloaded, or that has no safetensors.
    """
    if not is_repo_id(name):
        return Path(name).expanduser()
    return _downloaded_model(os.fspath(name), weights=weights)


@functools.cache
def _downloaded_model(name: str, *, weights: bool) -> Path:
    repo, revision = split_repo_id(name)
    patterns = [*_SMALL]
    if weights:
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
    if weights and not any(folder.glob(_WEIGHTS[0])):
        raise ConfigError(
            f"{name!r} has no weights in safetensors on the Hugging Face hub",
            hint="save them in a folder with Transformers' from_pretrained and save_pretrained, and give that folder",
        )
    return folder


def local_data(name: str) -> str:
    """A local path or glob unchanged; for hf://datasets/ORG/NAME[@REVISION]/GLOB, the glob of the downloaded files.

    Raises:
        ConfigError: no files are named, or they cannot be downloaded.
    """
    return _downloaded_data(name) if name.startswith(DATASETS) else name


@functools.cache
def _downloaded_data(name: str) -> str:
    match = _DATA.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"{name} does not name files of a data set of the Hugging Face hub",
            hint=f"write {DATASETS}ORG/NAME/FILES, where FILES is a path or a glob such as **/*.parquet",
        )
    files = match["files"]
    # In a glob, "**/" also matches no folder, and "*" no slash; both differ in the patterns of huggingface_hub.
    patterns = [files, files.replace("**/", "")]
    has_deeper = "**" in files or files.endswith("/")
    deeper = [] if has_deeper else ["*/" * (files.count("/") + 1) + "*"]
    try:
        folder = _download(
            match["id"], match["revision"], repo_type="dataset", allow_patterns=patterns, ignore_patterns=deeper
        )
    except Exception as error:  # as for models
        found, hint = _problem(error, match["id"], "dataset")
        raise ConfigError(f"{name} cannot be downloaded from the Hugging Face hub", found=found, hint=hint) from error
    local = str(folder / files)
    if not glob.glob(local, recursive=True):
        raise ConfigError(
            f"no file of the data set matches {name}", hint=f"see its files on {_page(match['id'], 'dataset')}"
        )
    return local


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
    from huggingface_hub import errors

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
    download = f"`hf download {repo}{option} --local-dir {repo.split('/')[1]}`"
    return reason, f"check the connection, or run {download} on another machine and give that folder"
