"""The paths and names of the Hugging Face hub in a configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from opslot.trainer.config import RunConfig

# Fields with a path, or a list of them.
PATHS = (
    "model.config_path",
    "model.model_path",
    "model.tokenizer_path",
    "data.train_path",
    "data.eval_path",
    "data.cache_dir",
    "data.media_dir",
    "data.chat_template",
    "train.output_dir",
    "train.checkpoint.resume_from",
)
# Those that may name something of the hub.
OF_HUB = (
    "model.config_path",
    "model.model_path",
    "model.tokenizer_path",
    "data.train_path",
    "data.eval_path",
    "data.media_dir",
)


def paths_in(config: RunConfig, fields: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The paths in fields of `config`, and those of `data.train`, with the names of their fields."""
    for field in fields:
        yield from ((field, path) for path in listed(attrgetter(field)(config)))
    for number, entry in enumerate(config.data.train or ()):
        yield from ((f"data.train[{number}]", path) for path in listed(entry.get("path")))


def with_paths(config: RunConfig, fields: tuple[str, ...], change: Callable[[str], str]) -> RunConfig:
    """A copy of `config` whose paths in fields, and in `data.train`, are changed."""
    config = copy.deepcopy(config)

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(path) for path in value]
        return change(value) if isinstance(value, str) else value

    for field in fields:
        section, _, name = field.rpartition(".")
        holder = attrgetter(section)(config)
        setattr(holder, name, changed(getattr(holder, name)))
    for entry in config.data.train or ():
        if "path" in entry:
            entry["path"] = changed(entry["path"])
    return config


def with_home(config: RunConfig) -> RunConfig:
    """A copy of `config` with "~" expanded in all paths, which a shell does not do in quotes and in a YAML."""
    return with_paths(config, PATHS, os.path.expanduser)


def listed(value: Any) -> list[str]:
    """The paths of a field that takes one or several."""
    return [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, str)]
