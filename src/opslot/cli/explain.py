"""`opslot explain`: the kernel table of a model that need not be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import opslot
from opslot._base.errors import ConfigError
from opslot.cli._pairs import pairs


def run(model: str, assignments: list[str], dtype: str | None, as_json: bool) -> int:
    """Print the table of the model that `model` names, built without memory; exit code 0."""
    source, fields, default_dtype = read_source(model)
    fields |= pairs("--set", "FIELD=VALUE, e.g. rms_norm_implementation=eager", assignments)
    built = opslot.build_foundation_model(
        source, torch_dtype=dtype or default_dtype, init_device="meta", ops_implementation=fields
    )
    report = opslot.explain(built)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    return 0


def read_source(model: str) -> tuple[Any, dict[str, Any], str | None]:
    """Config source, ops_implementation and dtype of a model folder, a config.json or a training YAML."""
    path = Path(model)
    if path.suffix not in (".yaml", ".yml"):
        return path, {}, None
    from opslot.trainer import load_config

    config = load_config(path)
    source = config.model.config_path or config.model.model_path
    if not source:
        raise ConfigError(f"{model} names no model; set model.config_path or model.model_path there")
    chosen = config.model.ops_implementation or {}
    if isinstance(chosen, str):
        chosen = {} if chosen == "auto" else {"preset": chosen}
    return source, dict(chosen), config.model.torch_dtype
