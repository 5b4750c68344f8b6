"""`opslot bisect`: find the slot and layer of a model that break parity with Transformers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import opslot
from opslot._base.device import usable_device
from opslot._base.hub import local_model
from opslot.cli.explain import model_arguments
from opslot.models import load_config
from opslot.models._layers import with_layers
from opslot.models._multimodal.modalities import feature_module
from opslot.verify.random_model import text_ids


def run(options: argparse.Namespace) -> int:
    """Check the model that MODEL_OR_YAML names on random tokens of text; exit code 1 if a slot breaks parity.

    Uses the weights beside config.json; random ones if there are none or --layers is given.
    """
    batch, length, layers = options.batch, options.length, options.layers
    given = model_arguments(options)
    source, configured = given["config_path"], given.pop("run_device", None)
    if layers:
        config = load_config(source, trust_remote_code=given["trust_remote_code"])
        given["config_kwargs"] = with_layers(config.to_dict(), layers)
    else:
        given["weights_path"] = _weights(source)
    place = usable_device(options.device or configured or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    built = opslot.build_foundation_model(**given, init_device=str(place))
    generator = torch.Generator().manual_seed(options.seed)
    text = text_ids(built.config)
    tokens = text[torch.randint(len(text), (batch, length), generator=generator)].to(place)
    if feature_module(built) is not None:
        print("checked on text alone; opslot.bisect(model, batch) takes images, video and audio", file=sys.stderr)
    found = opslot.bisect(built, {"input_ids": tokens, "labels": tokens})
    print(json.dumps({**asdict(found), "ok": found.ok}, indent=2) if options.json else found)
    return 0 if found.ok else 1


def _weights(source: str | Path) -> Path | None:
    folder = local_model(source)
    return folder if folder.is_dir() and any(folder.glob("*.safetensors")) else None
