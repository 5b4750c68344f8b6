"""`opslot explain`: the kernel table of a model, which is built on meta."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import opslot
from opslot._base.errors import ConfigError
from opslot._base.hub import is_repo_id
from opslot.cli.arguments import pairs
from opslot.models._registry import serve_model_type


def run(options: argparse.Namespace) -> int:
    """Print the table of the model that MODEL_OR_YAML names, or of a model type's default sizes; exit code 0."""
    arguments = model_arguments(options)
    if not Path(options.model).exists() and not is_repo_id(options.model):
        if not serve_model_type(options.model):
            raise ConfigError(
                f"{options.model!r} is neither a model's config, nor a YAML file, nor a model type",
                found="no such file or folder",
                hint="give a folder with config.json, that file, a model of the Hugging Face hub as ORG/NAME, a YAML "
                "file of opslot train, or a model type such as qwen3",
            )
        from transformers import AutoConfig

        arguments["config_path"] = AutoConfig.for_model(options.model)
    report = opslot.explain(opslot.build_foundation_model(**arguments, init_device="meta"))
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What MODEL_OR_YAML and the options for it name, as arguments of `build_foundation_model`.

    Raises:
        ConfigError: a YAML that names no model, or a --set that is not FIELD=VALUE.
    """
    chosen = pairs("--set", "FIELD=VALUE, e.g. rms_norm_implementation=eager", options.set)
    path = Path(options.model)
    if path.suffix not in (".yaml", ".yml"):
        return {
            "config_path": path,
            "torch_dtype": options.dtype,
            "ops_implementation": chosen,
            "trust_remote_code": options.trust_remote_code,
        }
    from opslot.trainer import load_config

    config = load_config(path)
    folder = config.model.config_path or config.model.model_path
    if not folder:
        raise ConfigError(f"{options.model} names no model", hint="set model.config_path or model.model_path there")
    ops = config.model.ops_implementation or {}
    return {
        "config_path": folder,
        "torch_dtype": options.dtype or config.train.fsdp.param_dtype or config.model.torch_dtype,
        "ops_implementation": ({"preset": ops} if isinstance(ops, str) else dict(ops)) | chosen,
        "run_device": None if config.model.device == "auto" else config.model.device,
        "trust_remote_code": config.model.trust_remote_code or options.trust_remote_code,
    }
