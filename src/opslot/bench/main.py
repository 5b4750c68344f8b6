"""`opslot bench`: who is fastest where, beside the floor and the check's verdict; and what `auto` learns from it."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import opslot
from opslot._base.device import best_device, facts_of, usable_device
from opslot._base.dtypes import dtype_name, floating_dtype
from opslot._base.errors import ConfigError
from opslot._base.pairs import pairs
from opslot.bench import BenchRow, Site, as_dict, bench, environment, read_row, sites_of, timings_of
from opslot.bench.baselines import check_baselines
from opslot.bench.page import page
from opslot.bench.plots import PICTURES, draw
from opslot.bench.steps import Task, compare_steps, loss_curve, peer_environment
from opslot.bench.table import curve_line, ops_table, shown_ms, steps_table
from opslot.bench.text import text_batches
from opslot.models import MODEL_CONFIG_REGISTRY, load_config, serve_model_type
from opslot.models._layers import with_layers
from opslot.slots import KERNEL_REGISTRY, OpsImplementationConfig, write_profile

_BEGUN = time.monotonic()
# The last token of a row predicts nothing, so a row has two.
_LEAST = {"layers": 1, "tokens": 1, "batch": 1, "length": 2, "steps": 0, "limit": 1}
# What kernels claim; in float64 there is nothing more exact to judge them by.
_DTYPES = ("bfloat16", "float16", "float32")
# Rows and sequence length of a training step, by kind of device.
_SIZES = {"cuda": (2, 8192), "cpu": (2, 256)}


def run(options: argparse.Namespace, argv: Iterable[str] = ()) -> int:
    """Measure, print and write what was asked for; exit code 1 when the check of a registered kernel fails."""
    if options.merge:
        return _merge(options, shlex.join(["opslot", *argv]))
    setting = _Setting(options)
    result = _Result(options, shlex.join(["opslot", *argv]), environment(setting.device))

    def say(line: str) -> None:
        # Told between the ops, and while one is proven: what is complete is kept, whatever comes.
        if result.has_news():
            result.write()
            if options.tune:
                write_profile(timings_of(result.rows), facts_of(setting.device))
        _say(line)

    # A scheduler's limit, too, leaves what was measured.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for row in setting.rows(say):
            _say(f"{row.op}/{row.variant}, {row.case}: {row.kernel} {shown_ms(row)} ms")
            result.rows.append(row)
    finally:
        result.write()
        signal.signal(signal.SIGTERM, before)
    if not result.rows and not options.model and not options.peers_only:
        raise ConfigError(
            f"op {', '.join(map(repr, setting.op_names))} has no cases worth timing; "
            "run `opslot kernels` for the ops that exist"
        )
    if options.tune:
        _say(_keep(result.rows, setting.device))
    for result.steps in setting.steps():
        result.write()
    if options.curve:
        result.curve = setting.curve()
        result.write()
    print(json.dumps(result.as_dict(), indent=1) if options.json else result)
    registered = {spec.name for spec in KERNEL_REGISTRY.specs()}
    return 1 if any(row.verdict.startswith("WRONG") and row.kernel in registered for row in result.rows) else 0


class _Result:
    """What was measured so far, written after each part: an hour's work is not lost to what comes last."""

    def __init__(self, options: argparse.Namespace, command: str, machine: dict[str, Any]) -> None:
        self.options, self.command = options, command
        self.machine = machine | ({"commit": options.commit} if options.commit else {})
        self.rows: list[BenchRow] = []
        self.steps: list[dict[str, Any]] = []
        self.curve: dict[str, Any] | None = None
        self._written = 0

    def has_news(self) -> bool:
        """Whether there are rows that no file holds yet."""
        return len(self.rows) > self._written

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "environment": self.machine,
            "rows": [as_dict(row) for row in self.rows],
            **({"steps": self.steps} if self.steps else {}),
            **({"curve": self.curve} if self.curve else {}),
        }

    def add(self, data: dict[str, Any]) -> None:
        """Take in what an earlier run wrote; its rows and models replace those of the same name."""
        rows = [read_row(row) for row in data["rows"]]
        new = {(row.site, row.kernel) for row in rows}
        self.rows = [row for row in self.rows if (row.site, row.kernel) not in new] + rows
        steps = data.get("steps", [])
        named = {step["model"] for step in steps}
        self.steps = [step for step in self.steps if step["model"] not in named] + steps
        self.curve = data.get("curve") or self.curve

    def write(self) -> None:
        """The files that were asked for, with all there is."""
        options = self.options
        self._written = len(self.rows)
        if options.output:
            Path(options.output).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        if options.picture:
            draw(self.rows, self.steps, self.curve, self.machine, Path(options.picture))
        if options.html:
            Path(options.html).write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """Everything as one HTML page."""
        return page(self.rows, self.steps, self.curve, self.machine, self.command)

    def __str__(self) -> str:
        parts = [
            ops_table(self.rows) if self.rows else "",
            steps_table(self.steps) if self.steps else "",
            *_traces(self.steps),
            curve_line(self.curve) if self.curve else "",
        ]
        return "\n\n".join(part for part in parts if part)


def _merge(options: argparse.Namespace, command: str) -> int:
    """Make one result of several that were written with --output on one machine, measuring nothing."""
    found = []
    for file in options.merge:
        try:
            found.append(json.loads(Path(file).read_text()))
            alone = _Result(options, command, found[-1]["environment"])
            alone.add(found[-1])
            # Reads every field that the outputs need: whose file lacks one is told here.
            alone.page()
        except OSError as error:
            raise ConfigError(f"--merge {file!r} cannot be read: {error.strerror}; give files of --output") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"--merge {file!r} is no result of `opslot bench --output`: {error!r}") from error
    devices = {data["environment"]["device"] for data in found}
    if len(devices) > 1:
        raise ConfigError(f"--merge: the results are of different devices: {', '.join(sorted(devices))}")
    _check_files(options)
    machines = [data["environment"] for data in found]
    result = _Result(options, command, machines[-1] | _all_of(machines, "commit") | _all_of(machines, "date"))
    for data in found:
        result.add(data)
    result.write()
    print(json.dumps(result.as_dict(), indent=1) if options.json else result)
    return 0


def _all_of(machines: list[dict[str, Any]], field: str) -> dict[str, str]:
    """What the results say of `field`, in their order; nothing where none says anything."""
    said = dict.fromkeys(machine[field] for machine in machines if machine.get(field))
    return {field: ", ".join(said)} if said else {}


class _Setting:
    """What the options ask for, checked before anything is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        for name, least in _LEAST.items():
            value = getattr(options, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name} {value}: it takes {least} or more")
        self.device = usable_device(options.device or best_device().torch_type)
        dtype = options.dtype or ("float32" if self.device.type == "cpu" else "bfloat16")
        self.dtype = floating_dtype(dtype, f"--dtype {dtype!r}")
        self.dtype_name = dtype_name(self.dtype)
        if self.dtype_name not in _DTYPES:
            raise ConfigError(
                f"--dtype {dtype!r}: kernels are judged against float64, in {', '.join(_DTYPES)}; use one of these"
            )
        self.op_names = [name.strip() for name in options.op.split(",")] if options.op is not None else []
        for name in self.op_names:
            KERNEL_REGISTRY.op(name)
        _check_files(options)
        self.peer_paths = pairs("--peer-path", "PEER=DIR", options.peer_path)
        for peer, folder in self.peer_paths.items():
            if not Path(folder).is_dir():
                raise ConfigError(f"--peer-path {peer}={folder}: there is no such folder")
        self.peers = [name for name in (options.against or "").split(",") if name]
        if missing := [peer for peer in self.peer_paths if peer not in self.peers]:
            raise ConfigError(f"--peer-path {missing[0]}=...: it is not compared with; add it to --against")
        check_baselines({*self.peers, *self.peer_paths}, elsewhere=self.peer_paths)
        self.ops = pairs("--set", "FIELD=VALUE, e.g. rms_norm_implementation=eager", options.set)
        OpsImplementationConfig.make(self.ops)
        self.model = read_model(options.model, options.layers) if options.model else None
        if self.model is None:
            for name in ("layers", "curve", "step_only"):
                if getattr(options, name):
                    raise ConfigError(f"--{name.replace('_', '-')} needs --model CONFIG")
        if options.step_only and not options.steps and not options.curve:
            raise ConfigError("--step-only --steps 0 measures nothing; give --steps or --curve a number")
        if options.curve and options.curve < 4:
            raise ConfigError(f"--curve {options.curve}: a curve needs at least 4 steps")
        rows, length = _SIZES.get(self.device.type, _SIZES["cuda"])
        self.batch, self.length = options.batch or rows, options.length or length
        if options.curve and self.model is not None:
            _say("loss curve: tokens")
            self.text = text_batches(options.curve, self.batch, self.length, self.model["vocab_size"])
        if options.tune:
            # Adds nothing yet, but a profile that cannot be written is told before anything is measured.
            write_profile([], facts_of(self.device))
        by_shape = options.tune or self.model is not None or self.device.type == "cpu"
        self.tokens = options.tokens or (self.batch * self.length if by_shape else None)

    def rows(self, say: Callable[[str], None]) -> Iterator[BenchRow]:
        """The ops' rows: first those of this process, then those of peers that need one of their own."""
        options = self.options
        if options.step_only:
            return
        here = [p for p in self.peers if p not in self.peer_paths]
        yield from bench(
            self.op_names,
            device=self.device,
            dtype=self.dtype,
            sites=self._sites(),
            tokens=self.tokens,
            against=here,
            compiled=not options.tune and not options.no_compile,
            own=not options.peers_only,
            say=say,
        )
        for peer in self.peers:
            if peer in self.peer_paths:
                say(f"{peer}, in a process of its own")
                yield from self._rows_of(peer)

    def _sites(self) -> list[Site] | None:
        if self.model is None:
            return None
        from transformers import AutoConfig

        config = AutoConfig.for_model(**self.model)
        built = opslot.build_foundation_model(
            config, torch_dtype=self.dtype, init_device="meta", ops_implementation="eager"
        )
        return sites_of(built, self.device, self.dtype)

    def _rows_of(self, peer: str) -> list[BenchRow]:
        """The rows of a peer's kernels, measured in a process where its folder comes first."""
        options = self.options
        command = [sys.executable, "-m", "opslot", "bench", "--peers-only", "--json", "--against", peer]
        command += ["--device", str(self.device), "--dtype", self.dtype_name, "--steps", "0"]
        for name, value in (("op", options.op), ("model", options.model), ("layers", options.layers)):
            command += [f"--{name}", str(value)] if value else []
        command += ["--tokens", str(self.tokens)] if self.tokens else []
        environment = peer_environment(self.peer_paths[peer])
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        # The peer may have printed before and after.
        begin = done.stdout.find('{\n "environment"')
        if begin < 0:
            _say(f"{peer} failed: {done.stderr.strip()[-800:]}")
            return []
        rows = json.JSONDecoder().raw_decode(done.stdout, begin)[0]["rows"]
        return [read_row(row) for row in rows]

    def _task(self) -> Task:
        assert self.model is not None
        options = self.options
        name = Path(options.model).stem if Path(options.model).suffix else Path(options.model).name
        return Task(
            f"{name}, {options.layers} layer{'s' if options.layers > 1 else ''}" if options.layers else name,
            self.model,
            self.batch,
            self.length,
            options.steps,
            self.dtype_name,
            str(self.device),
            self.ops,
            self.peer_paths,
            options.trace,
            options.limit,
        )

    def steps(self) -> Iterator[list[dict[str, Any]]]:
        """The contenders' results so far, after each of them."""
        options = self.options
        if self.model is not None and options.steps > 0 and not options.tune and not options.op:
            yield from compare_steps(self._task(), self.peers, _say)

    def curve(self) -> dict[str, Any]:
        assert self.model is not None
        return loss_curve(self._task(), self.text, _say)


def read_model(source: str, layers: int | None = None) -> dict[str, Any]:
    """A Transformers config as plain data: from a folder with config.json, that file, or a model type's defaults.

    Raises:
        ConfigError: none of these, or a broken file.
    """
    path = Path(source)
    if path.exists():
        load_config(path)
        data = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    elif serve_model_type(source):
        data = {"model_type": source}
    else:
        raise ConfigError(
            f"--model {source!r} is neither a folder with config.json, nor such a file, nor a model type; "
            f"model types are {', '.join(MODEL_CONFIG_REGISTRY)}"
        )
    if layers:
        data |= with_layers(data, layers)
    # Filled in, so that every contender reads the same sizes whatever its release's defaults are.
    data.setdefault("vocab_size", MODEL_CONFIG_REGISTRY.get(data["model_type"])()().vocab_size)
    return data


def _keep(rows: list[BenchRow], device: torch.device) -> str:
    timings = timings_of(rows)
    if not timings:
        raise ConfigError("nothing was measured that a profile could hold: no op asked for has sites with known shapes")
    path = write_profile(timings, facts_of(device))
    lines = [f"wrote {path}; `auto` takes the fastest of:"]
    for t in timings:
        shape = ", ".join(f"{k} {v}" for k, v in t.shape.items())
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(t.ms.items(), key=lambda item: item[1]))
        lines.append(f"  {t.op}/{t.variant} ({shape}): {times or 'nothing ran'}")
        lines += [f"    left out: {name}: {why}" for name, why in t.failed.items()]
    return "\n".join(lines)


def _traces(steps: list[dict[str, Any]]) -> list[str]:
    # The table of what was chosen; why the others were not is in the JSON, and in `opslot explain`.
    found = [s["kernels"].partition("\n\n")[0] for s in steps if s["contender"] == "opslot" and s.get("kernels")]
    return found + [f"{s['contender']}\n{s['trace']}" for s in steps if "trace" in s]


def _check_files(options: argparse.Namespace) -> None:
    """What would fail when all is measured: files that cannot be written, and a picture that cannot be drawn."""
    named: dict[Path, str] = {}
    for name in ("output", "picture", "html"):
        if (file := getattr(options, name)) is None:
            continue
        path = Path(file).resolve()
        if path in named:
            raise ConfigError(f"--{named[path]} and --{name} name the same file, {file!r}; give each its own")
        named[path] = name
        _check_writable(f"--{name}", file)
    if options.picture and Path(options.picture).suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture {options.picture!r} must end in {' or '.join(PICTURES)}")


def _check_writable(option: str, file: str) -> None:
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{option} {file!r} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {file!r}: the folder {path.parent} does not exist; make it first")
    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {file!r} cannot be written: {error.strerror}") from error


def _say(line: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {line}", file=sys.stderr, flush=True)
