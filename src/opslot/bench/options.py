"""What a benchmark measures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Groups of options in the help.
OPS, STEPS, BASELINES, OUTPUT = "ops", "training steps of a model", "baselines", "output"


def _option(default: Any, help: str, group: str = "", flag: str = "", least: int | None = None, **settings: Any) -> Any:
    """A field and its option, `flag` where that has another name; `settings` are of `add_argument`."""
    metadata = {"group": group, "flag": flag, "least": least, "settings": {"help": help, **settings}}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure: the options of `opslot bench`, whose help describes them."""

    dtype: str | None = _option(None, "default bfloat16; float32 on a CPU")
    device: str | None = _option(None, "default the best of this machine")

    ops: tuple[str, ...] = _option(
        (), "only these ops (separated by commas), in this order, and no training step", OPS, "--op", metavar="NAMES"
    )
    tokens: int | None = _option(
        None, "tokens that ops are timed with; default 16384 on a GPU, 512 on a CPU", OPS, least=1, metavar="N"
    )
    tune: bool = _option(False, "add the times to this machine's profile, which auto reads (OPSLOT_PROFILE)", OPS)
    compile_ops: bool = _option(True, "leave out torch.compile of eager ops", OPS, "--no-compile-ops")
    # The ops of the baselines alone, in a process of their own.
    baselines_only: bool = _option(False, argparse.SUPPRESS, OPS)

    models: tuple[str, ...] = _option(
        (),
        "shapes and training steps of this model: a config.json, its folder, or a model type; several with "
        "--steps-only",
        STEPS,
        "--model",
        nargs="+",
        type=os.path.expanduser,
        metavar="CONFIG",
    )
    layers: int | None = _option(None, "another number of layers", STEPS, least=1, metavar="N")
    batch: int | None = _option(None, "samples of a training step; default 2", STEPS, least=1, metavar="N")
    length: int | None = _option(
        None, "its tokens per sample; default 8192 on a GPU, 256 on a CPU", STEPS, least=2, metavar="N"
    )
    image_size: int = _option(
        0,
        "each sample begins with a square image of this side, and --length counts its text",
        STEPS,
        least=0,
        metavar="PIXELS",
    )
    audio_seconds: int = _option(
        0,
        "each sample has an audio of S seconds (after its image), and --length counts its text",
        STEPS,
        least=0,
        metavar="S",
    )
    steps: int = _option(8, "training steps to time; 0 for none; default 8", STEPS, least=0, metavar="N")
    steps_only: bool = _option(False, "no ops, only training steps (and the loss curve)", STEPS)
    compile: bool = _option(
        False,
        "also time training steps with model.compile(), also in mode reduce-overhead, and with "
        "opslot.parallelize(model, compile=True), and on a GPU also with cuda_graphs=True",
        STEPS,
    )
    curve: int | None = _option(
        None,
        "train on text with auto and with Transformers' own code, and compare the losses",
        STEPS,
        metavar="STEPS",
    )
    ops_implementation: Mapping[str, str] = _option(
        dict, "opslot's ops_implementation in the steps", STEPS, "--set", metavar="FIELD=VALUE"
    )
    timeout: int = _option(
        900, "seconds that one implementation's training steps may take; default 900", STEPS, least=1, metavar="S"
    )
    trace: bool = _option(False, "add torch.profiler's table of a training step", STEPS)

    baselines: tuple[str, ...] = _option(
        (), "compare with hf, liger, quack, veomni (comma-separated)", BASELINES, metavar="NAMES"
    )
    baseline_paths: Mapping[str, str] = _option(
        dict,
        "a folder of packages that only this baseline imports, before all others",
        BASELINES,
        "--baseline-path",
        metavar="NAME=DIR",
    )
    implementations: tuple[str, ...] = _option(
        (),
        'training steps of these only, in this order, e.g. "opslot,VeOmni"; default opslot and all of --baselines',
        BASELINES,
        metavar="NAMES",
    )

    commit: str | None = _option(None, "commit to record outside a git repository", OUTPUT, metavar="ID")
