"""`opslot explain`: the kernel table of a model, which is built on meta."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opslot
from opslot._base.errors import ConfigError
from opslot._base.pairs import pairs


@dataclass(frozen=True)
class Source:
    """What MODEL_OR_YAML of a command names.

    Attributes:
        config: where the model's config is.
        ops: fields of ops_implementation.
        dtype: compute dtype; None for the config's.
        device: what it runs on; None for this machine's best.
        trust_remote_code: whether a config class beside the checkpoint may run.
    """

    config: str | Path
    ops: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False


def run(options: argparse.Namespace) -> int:
    """Print the table of the model that MODEL_OR_YAML names; exit code 0."""
    source = read_source(options.model)
    built = opslot.build_foundation_model(
        source.config,
        torch_dtype=options.dtype or source.dtype,
        init_device="meta",
        ops_implementation=source.ops | pairs("--set", "FIELD=VALUE, e.g. rms_norm_implementation=eager", options.set),
        run_device=source.device,
        trust_remote_code=source.trust_remote_code,
    )
    report = opslot.explain(built)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


def read_source(model: str) -> Source:
    """Read a model folder, a config.json or a training YAML; ConfigError for a YAML that names no model."""
    path = Path(model)
    if path.suffix not in (".yaml", ".yml"):
        return Source(path)
    from opslot.trainer import load_config

    config = load_config(path)
    folder = config.model.config_path or config.model.model_path
    if not folder:
        raise ConfigError(f"{model} names no model", hint="set model.config_path or model.model_path there")
    chosen = config.model.ops_implementation or {}
    if isinstance(chosen, str):
        chosen = {"preset": chosen}
    return Source(
        folder,
        dict(chosen),
        config.train.fsdp.param_dtype or config.model.torch_dtype,
        None if config.model.device == "auto" else config.model.device,
        config.model.trust_remote_code,
    )
