"""Find the files of a data set: files, globs and folders that Hugging Face `datasets` saved."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from opslot._base.errors import ConfigError
from opslot._base.files import missing_path_hint
from opslot._base.hub import DATASETS, data_hint, local_data
from opslot._base.logging import get_logger

logger = get_logger(__name__)

_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".jl", ".json"), "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    **dict.fromkeys((".txt", ".md"), "text"),
}
# Compressed JSON Lines are read as they are; other compressed files are not.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSED = {*COMPRESSIONS, ".bz2", ".xz", ".zip"}
# Splits of a saved DatasetDict, by the purpose of the data.
_SPLITS = {"train": ("train",), "eval": ("validation", "test", "eval", "dev")}


def find_files(paths: str | Sequence[str], field: str, problems: list[str], format: str = "auto") -> list[Path]:
    """Existing files for `paths` (files, globs, saved data sets, files of the hub), each once, in order; errors go to
    `problems`.

    A file that is named itself must not be empty; one that a glob finds may be. Where there are problems already, no
    files of the hub are downloaded, which may take long.
    """
    found: list[Path] = []
    named = [paths] if isinstance(paths, str) else list(paths)
    if not any(named):
        problems.append(f"{field} is empty; set it to a text, jsonl or parquet file, or a glob such as corpus/**/*.txt")
        return []
    for name in named:
        if problems and name.startswith(DATASETS):
            continue
        try:
            found += _files_of(local_data(name), field, problems)
        except ConfigError as error:
            problems.append(f"{field}: {error}".replace("\n", "\n  "))
    files = _without_links(dict.fromkeys(found))
    problems += [f"{field}: {problem}" for file in files if (problem := _unknown_format(file, format))]
    return files


def _files_of(name: str, field: str, problems: list[str]) -> list[Path]:
    """The files of one path, glob or saved data set."""
    path = Path(name)
    if path.is_dir():
        return _saved_dataset(path, field, problems)
    if path.exists():
        problem = _unreadable(path)
        problems += [f"{field}: {problem}"] if problem else []
        return [path]
    if not glob.has_magic(name):
        problems.append(f"{field}: no such file: {name}; {_missing_hint(name)}")
        return []
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
    if not matches:
        problems.append(f"{field}: no file matches {name}; searched from {Path.cwd()}")
    problems += [f"{field}: {problem}" for match in matches if (problem := _forbidden(match))]
    return matches


def _missing_hint(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w-]*", name):
        return data_hint(name)
    return missing_path_hint(name)


def _without_links(files: Iterable[Path]) -> list[Path]:
    """`files` without those that are links to another of them."""
    first: dict[tuple[int, int], Path] = {}
    for file in files:
        facts = file.stat()
        same = first.setdefault((facts.st_dev, facts.st_ino), file)
        if same is not file:
            logger.warning("%s and %s are the same file; it is read once", same, file)
    return list(first.values())


def format_of(file: Path, format: str = "auto") -> str | None:
    """How a file is read: "text", "jsonl", "parquet", "arrow" or "tar"; None if the extension does not say."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if format != "auto":
        return format
    if suffixes[-1:] and suffixes[-1] in COMPRESSIONS:
        inner = _FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return inner if inner == "jsonl" else None
    return _FORMATS.get(suffixes[-1]) if suffixes else None


def _unknown_format(file: Path, format: str) -> str | None:
    if format_of(file, format):
        return None
    suffix = file.suffix.lower()
    found = f"the unknown extension {suffix!r}" if suffix else "no extension"
    hint = "decompress it" if suffix in _COMPRESSED else "set data.format to text, jsonl or parquet, or convert it"
    return f"{file} has {found}; known are {', '.join(_FORMATS)}; {hint}"


def _saved_dataset(folder: Path, field: str, problems: list[str]) -> list[Path]:
    """The Arrow files of a folder that `datasets` wrote with save_to_disk."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            wanted = _SPLITS["eval" if "eval" in field else "train"]
            split = next((name for name in wanted if name in splits), None)
            if split is None:
                problems.append(
                    f"{field}: {folder} has the splits {', '.join(splits)} and none of {', '.join(wanted)}; "
                    f"select one as a folder, such as {folder / splits[0]}"
                )
                return []
            return _saved_dataset(folder / split, field, problems)
        if (folder / "state.json").is_file():
            state = json.loads((folder / "state.json").read_text())
            if state.get("_indices_data_files"):
                problems.append(f"{field}: {folder} has an index of selected rows; save it with a newer `datasets`")
                return []
            files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                lacking = ", ".join(missing)
                problems.append(f"{field}: {folder} lacks {lacking}, which its state.json lists; save or copy it again")
            return [file for file in files if file.is_file()]
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        problems.append(
            f"{field}: {folder} is not a readable saved data set ({type(error).__name__}: {error}); save it again"
        )
        return []
    problems.append(f"{field}: {folder} is a folder; select its files with a glob such as {folder}/**/*.txt")
    return []


def no_text(files: Sequence[Path], left_out: bool = False) -> str:
    """The error for files that hold only whitespace, or only samples that are left out."""
    what = "every sample is left out" if left_out else "no text in any of them"
    return f"{_names(files)}: {what}, so there is nothing to train on"


def described_counts(counts: Mapping[str, int]) -> str:
    """Numbers of samples that were changed or left out, by what was done, for an error."""
    return ", ".join(f"{count:,} samples {what}" for what, count in counts.items())


def _unreadable(path: Path) -> str | None:
    if not path.is_file():
        return f"{path} is not a regular file"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return _forbidden(path)


def _forbidden(path: Path) -> str | None:
    return None if os.access(path, os.R_OK) else f"{path} is not readable; check its permissions"


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
