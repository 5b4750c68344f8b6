"""Models and data sets of the Hugging Face hub, as local files.

Files are downloaded into Hugging Face's cache, by processes of one machine once. `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`
and `HF_HUB_OFFLINE` work as in its other libraries.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot._base.files import missing_path_hint
from opslot._base.launcher import is_first_local_rank

DATASETS = "hf://datasets/"
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FILES = (".json", ".yaml", ".yml")
_DATA = re.compile(re.escape(DATASETS) + _ID.pattern + r"/(?P<files>.+)")
# Configs, tokenizers, processors, and code that ships with a model.
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
_WEIGHTS = "*.safetensors"
# The same weights in other layouts.
_COPIES = ("*/*.safetensors", "consolidated*")


def is_repo_id(name: str | os.PathLike[str]) -> bool:
    """Whether `name` may be a model of the hub, ORG/NAME or ORG/NAME@REVISION: no local path, and of that form."""
    text = os.fspath(name)
    return _ID.fullmatch(text) is not None and not text.endswith(_FILES) and not Path(text).exists()


def split_repo_id(name: str) -> tuple[str, str | None]:
    """ORG/NAME and the revision of a name for which `is_repo_id` holds."""
    match = _ID.fullmatch(name)
    assert match is not None, name
    return match["id"], match["revision"]


def local_model(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """A path as it is, with its "~" expanded; of a model of the hub, the folder that it is downloaded to.

    Args:
        weights: False leaves out the weights.

    Raises:
        ConfigError: `name` has the form of a model's name on the hub, and it cannot be downloaded.
    """
    if not is_repo_id(name):
        return Path(name).expanduser()
    return _downloaded_model(os.fspath(name), weights)


@functools.cache
def _downloaded_model(name: str, weights: bool) -> Path:
    repo, revision = split_repo_id(name)
    try:
        return _download(
            repo,
            revision,
            allow_patterns=[*_SMALL, *([_WEIGHTS] if weights else [])],
            ignore_patterns=list(_COPIES),
        )
    except Exception as error:
        found, hint = _problem(error, repo)
        near = missing_path_hint(name)
        raise ConfigError(
            f"{name!r} is neither a local path nor a model that can be downloaded from the Hugging Face hub",
            found=found,
            hint=near if near.startswith("did you mean") else hint,
        ) from error


def local_data(name: str) -> str:
    """A glob or path as it is; of hf://datasets/ORG/NAME[@REVISION]/GLOB, the glob of the files that are downloaded.

    Raises:
        ConfigError: no files are named, or they cannot be downloaded.
    """
    return _downloaded_data(name) if name.startswith(DATASETS) else name


@functools.cache
def _downloaded_data(name: str) -> str:
    match = _DATA.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"{name} names no files of a data set of the Hugging Face hub",
            hint=f"name them as {DATASETS}ORG/NAME/FILES, where FILES is a path or a glob such as **/*.parquet",
        )
    files = match["files"]
    try:
        # "**/" also stands for no folder, which the patterns of the hub's library do not know.
        folder = _download(
            match["id"], match["revision"], repo_type="dataset", allow_patterns=[files, files.replace("**/", "")]
        )
    except Exception as error:
        found, hint = _problem(error, match["id"], " --repo-type dataset")
        raise ConfigError(f"{name} cannot be downloaded from the Hugging Face hub", found=found, hint=hint) from error
    return str(folder / files)


def _download(repo: str, revision: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not is_first_local_rank():
        # All processes of a machine wait for the same files.
        disable_progress_bars()
    return Path(snapshot_download(repo, revision=revision, **options))


def _problem(error: Exception, repo: str, option: str = "") -> tuple[str, str]:
    """What is wrong, and what to do about it.

    Args:
        option: of `hf download`, for this kind of repository.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        terms = f"accept its terms on https://huggingface.co/{repo}, and log in with `hf auth login`"
        return "its terms are not accepted", terms
    if isinstance(error, RepositoryNotFoundError):
        return "there is none of that name, or it is private", "check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision", "check what follows the @"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    download = f"`hf download {repo}{option} --local-dir {repo.split('/')[1]}`"
    hint = f"check the connection, or run {download} on another machine and give that folder"
    return reason[0].removeprefix("Got: "), hint
