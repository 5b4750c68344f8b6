"""Run a benchmark: ops, training steps and the loss curve that the options ask for, written as they are measured."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import opslot
from opslot._base.device import best_device, facts_of, usable_device
from opslot._base.dtypes import dtype_name, floating_dtype
from opslot._base.errors import ConfigError
from opslot._base.hub import local_model
from opslot.bench.baselines import check_baselines
from opslot.bench.files import OutputFiles
from opslot.bench.ops import bench_ops, call_sites_of
from opslot.bench.options import BenchOptions
from opslot.bench.result import Environment, OpRow, Result, Run, read
from opslot.bench.step import compare_steps, known_implementations, loss_curve, process_environment
from opslot.bench.step_inputs import audio_tokens, config_of, image_grid, model_vocab_size, takes_images
from opslot.bench.table import time_cell
from opslot.bench.text import text_batches
from opslot.bench.tune import timings_of, timings_text
from opslot.models import load_config, serve_model_type
from opslot.models._build import ShippedCodeError
from opslot.models._layers import with_layers
from opslot.slots import KERNEL_REGISTRY, OpsImplementationConfig, write_profile

Report = Callable[[str], None]
# What kernels support; float64 is the reference.
_DTYPES = ("bfloat16", "float16", "float32")
# Batch and sequence length of a training step, by kind of device.
_SIZES = {"cuda": (2, 8192), "cpu": (2, 256)}


def run_bench(
    options: BenchOptions, files: OutputFiles | None = None, report: Report | None = None, command: str = ""
) -> Result:
    """Measure what the options ask for, and write the files after each part, so that an interrupt loses little.

    Args:
        report: called with one line of progress at a time.
        command: recorded in the result.

    Raises:
        ConfigError: the options are invalid; nothing has been measured or written.
        KernelError: a kernel left the device unusable; what was measured before it has been written.
    """
    files = files or OutputFiles()
    report = report or (lambda line: None)
    checked = _CheckedOptions(options, report)
    run = Run(command, Environment.current(checked.device, options.commit), list(options.baselines))
    result = Result("opslot bench", [run])
    written = 0

    def between_ops(line: str) -> None:
        nonlocal written
        if len(run.ops) > written:
            written = len(run.ops)
            files.write(result)
            if options.tune:
                write_profile(timings_of(run.ops), facts_of(checked.device))
        report(line)

    # A scheduler ends a job with SIGTERM at its time limit.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for row in _op_rows(checked, between_ops):
            report(f"{row.op}/{row.variant}, {row.case}: {row.kernel} {time_cell(row)} ms")
            run.ops.append(row)
    finally:
        files.write(result)
        signal.signal(signal.SIGTERM, before)
    if not run.ops and not options.models and not options.baselines_only:
        names = ", ".join(map(repr, options.ops))
        raise ConfigError(f"op {names} has no cases to time", hint="run `opslot kernels` for the ops that exist")
    if options.tune:
        report(_write_profile(run.ops, checked.device))
    if options.models and options.steps and not options.tune and not options.ops:
        for rows in compare_steps(checked.models, checked.options, report):
            run.steps[:] = rows
            files.write(result)
    if options.curve:
        curve = loss_curve(checked.models, checked.text, checked.options, report)
        result = Result(result.script, [dataclasses.replace(run, curve=curve)])
        files.write(result)
    return result


class _CheckedOptions:
    """The options, checked before anything is measured, and what they name: the device, the models, the text."""

    def __init__(self, options: BenchOptions, report: Report) -> None:
        self.device = usable_device(options.device or best_device().torch_type)
        dtype = options.dtype or ("float32" if self.device.type == "cpu" else "bfloat16")
        self.dtype = floating_dtype(dtype, f"--dtype {dtype!r}")
        if dtype_name(self.dtype) not in _DTYPES:
            raise ConfigError(
                f"--dtype {dtype!r}: kernels are compared with a float64 reference", hint=f"use {', '.join(_DTYPES)}"
            )
        batch, length = _SIZES.get(self.device.type, _SIZES["cuda"])
        batch, length = options.batch or batch, options.length or length
        # The result names the sizes and the dtype that are the device's defaults, too.
        self.options = dataclasses.replace(
            options, batch=batch, length=length, dtype=dtype_name(self.dtype), device=str(self.device)
        )
        for name in options.ops:
            KERNEL_REGISTRY.op(name)
        self._check_baselines()
        OpsImplementationConfig.make(dict(options.ops_implementation))
        self.models = {_title(model, options.layers): read_model(model, options.layers) for model in options.models}
        self.model = next(iter(self.models.values()), None)
        self._check_steps()
        if options.curve and self.model is not None:
            report("loss curve: tokens")
            self.text = text_batches(options.curve, batch, length, model_vocab_size(self.model))
        if options.tune:
            # Adds nothing, but fails now where the profile cannot be written.
            write_profile([], facts_of(self.device))
        by_shape = options.tune or self.model is not None or self.device.type == "cpu"
        self.tokens = options.tokens or (batch * length if by_shape else None)

    def _check_baselines(self) -> None:
        options = self.options
        for name, folder in options.baseline_paths.items():
            if not Path(folder).is_dir():
                raise ConfigError(
                    f"--baseline-path {name}={folder}: the folder does not exist",
                    hint="install into it with pip install --target",
                )
            if name not in options.baselines:
                raise ConfigError(
                    f"--baseline-path {name}=...: it is not compared with", hint=f"add {name} to --baselines"
                )
        check_baselines(dict.fromkeys(options.baselines), elsewhere=options.baseline_paths)

    def _check_steps(self) -> None:
        options = self.options
        known = known_implementations(options.baselines)
        if unknown := [name for name in options.implementations if name not in known]:
            raise ConfigError(
                "--implementations: unknown names",
                found=", ".join(unknown),
                hint=f"expected some of {', '.join(known)}",
            )
        if self.model is None:
            for name in ("layers", "curve", "steps_only", "compile", "image_size", "audio_seconds"):
                if getattr(options, name):
                    raise ConfigError(f"--{name.replace('_', '-')} requires --model", hint="add --model, e.g. qwen3")
        if len(self.models) < len(options.models):
            raise ConfigError(
                "--model names models that have the same name in the result",
                found=", ".join(options.models),
                hint="name each once, by folders or files of different names",
            )
        if len(self.models) > 1 and (options.curve or not options.steps_only):
            raise ConfigError(
                f"--model names {len(self.models)} models, and only training steps take several",
                hint="add --steps-only and leave out --curve, or name one model",
            )
        if options.steps_only and not options.steps and not options.curve:
            raise ConfigError("--steps-only --steps 0 measures nothing", hint="set --steps or --curve")
        for name in ("image_size", "audio_seconds"):
            if getattr(options, name) and options.curve:
                raise ConfigError(
                    f"--curve trains on text, so it takes no --{name.replace('_', '-')}", hint="leave out one of them"
                )
        for model in self.models.values():
            if options.image_size:
                image_grid(model, options.image_size)
            if options.audio_seconds:
                audio_tokens(model, options.audio_seconds)
        if options.curve and options.curve < 4:
            raise ConfigError(f"--curve {options.curve}: a curve needs at least 4 steps", hint="e.g. --curve 200")


def _op_rows(checked: _CheckedOptions, report: Report) -> Iterator[OpRow]:
    """The ops' rows: first those of this process, then those of baselines with a `--baseline-path`."""
    options = checked.options
    if options.steps_only:
        return
    call_sites = None
    if checked.model is not None:
        config = config_of(checked.model)
        built = opslot.build_foundation_model(config, None, checked.dtype, "meta", "eager")
        call_sites = call_sites_of(built, checked.device, checked.dtype)
    yield from bench_ops(
        options.ops,
        device=checked.device,
        dtype=checked.dtype,
        call_sites=call_sites,
        tokens=checked.tokens,
        baselines=[name for name in options.baselines if name not in options.baseline_paths],
        compiled=options.compile_ops and not options.tune,
        own=not options.baselines_only,
        report=report,
    )
    for baseline in options.baselines:
        if baseline in options.baseline_paths:
            report(f"{baseline}, in a separate process")
            yield from _rows_in_a_process(baseline, options, checked.tokens, report)


def _rows_in_a_process(baseline: str, options: BenchOptions, tokens: int | None, report: Report) -> list[OpRow]:
    """The rows of a baseline's kernels, measured in a process where its folder comes first."""
    command = [sys.executable, "-m", "opslot", "bench", "--baselines-only", "--baselines", baseline, "--steps", "0"]
    given = {
        "op": ",".join(options.ops),
        "model": next(iter(options.models), None),
        "layers": options.layers,
        "tokens": tokens,
        "dtype": options.dtype,
        "device": options.device,
    }
    for name, value in given.items():
        command += [f"--{name}", str(value)] if value else []
    environment = process_environment(options.baseline_paths[baseline])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        done = subprocess.run([*command, "--output", str(file)], capture_output=True, text=True, env=environment)
        # 1 is a failed check.
        if done.returncode in (0, 1) and file.exists():
            return read(file).ops
    report(f"{baseline} failed: {done.stderr.strip()[-800:]}")
    return []


def _title(source: str, layers: int | None) -> str:
    """What results call a model."""
    path = Path(source)
    name = path.stem if path.suffix == ".json" else path.name
    return f"{name}, {layers} layer{'s' if layers > 1 else ''}" if layers else name


def read_model(source: str, layers: int | None = None) -> dict[str, Any]:
    """A Transformers config as plain data: from a folder with config.json, that file, a model of the hub or a model
    type's defaults.

    Raises:
        ConfigError: none of these, or a broken file.
    """
    from transformers import AutoConfig

    path = local_model(source, weights=False)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            load_config(path)
        except ShippedCodeError as error:
            raise ConfigError(
                f"--model {source!r}: its Python code ships with the checkpoint, and opslot bench does not run it",
                hint="measure a model type of Transformers with the same sizes",
            ) from error
        data = json.loads(file.read_text())
    elif serve_model_type(source):
        data = {"model_type": source}
    else:
        raise ConfigError(
            f"--model {source!r} is neither a folder with config.json, nor such a file, nor a model type",
            hint="give such a folder, or a model type such as qwen3",
        )
    if layers:
        data |= with_layers(data, layers)
    # Filled in, so that every implementation reads the same sizes whatever its release's defaults are.
    if "vocab_size" not in data and not takes_images(data):
        default = AutoConfig.for_model(data["model_type"])
        # Encoders of images and audio have none.
        if hasattr(default, "vocab_size"):
            data["vocab_size"] = default.vocab_size
    return data


def _write_profile(rows: list[OpRow], device: torch.device) -> str:
    timings = timings_of(rows)
    if not timings:
        raise ConfigError(
            "nothing was measured that a profile could hold: none of the ops has known static sizes",
            hint="give --model, or other ops",
        )
    path = write_profile(timings, facts_of(device))
    return f"wrote {path}; `auto` selects the fastest of:\n{timings_text(timings)}"


def progress_to_stderr() -> Report:
    """A `report` that prints each line with the seconds since now."""
    begun = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {line}", file=sys.stderr, flush=True)

    return report
