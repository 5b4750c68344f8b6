"""The result of a benchmark: the one schema of every file under `benchmarks/results`.

A file holds the runs of one script on one kind of machine. A run is one command on one machine: rows of the same run
may be compared with each other, rows of different runs may not. So a later run replaces whole comparisons of earlier
ones, never single rows of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
import shlex
import subprocess
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch

from opslot._base.device import cpu_name, facts_of, package_version
from opslot._base.errors import ConfigError

# Increased by a change that makes older files unreadable.
SCHEMA = 1
_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "flash-attn-4",
    "fla-core",
    "flash-qla",
    "tilelang",
    "cut-cross-entropy",
    "veomni",
    "peft",
    "bitsandbytes",
    "unsloth",
)
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Environment:
    """The machine and the software of a run.

    Attributes:
        device: e.g. "NVIDIA H200 sm_90".
        cpu: as the operating system names it.
        threads: torch's CPU threads.
        versions: of the packages that matter, by distribution name.
        commit: of opslot; "" when unknown.
        date: YYYY-MM-DD.
    """

    device: str
    cpu: str
    threads: int
    python: str
    versions: dict[str, str]
    commit: str
    date: str

    @classmethod
    def current(cls, device: torch.device | str, commit: str | None = None) -> Environment:
        """This machine; `commit` overrides what git reports."""
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return cls(
            str(facts_of(device)),
            cpu_name(),
            torch.get_num_threads(),
            platform.python_version(),
            {p: v for p in _PACKAGES if (v := package_version(p))},
            commit or found.stdout.strip(),
            time.strftime("%Y-%m-%d"),
        )


@dataclass(frozen=True)
class OpRow:
    """One implementation of an op on one case, forward plus backward.

    Attributes:
        kernel: "eager" (the reference implementation), "torch.compile" (of it), a registered kernel's name, or
            "<baseline>: <what>".
        ms: median milliseconds on the device; None when it failed.
        wall_ms: median milliseconds of one call in a loop that does nothing else, host time included.
        roofline_ms: bytes over peak bandwidth or FLOPs over peak FLOP/s, the larger; None without a cost model.
        peak_mib: memory allocated above the inputs at the peak; None off CUDA.
        check: "ok ..." when outputs and gradients match the fp64 reference, "unsupported: ...", "unchecked: ...",
            "WRONG ..." or the error. A time beside anything but "ok" does not count.
        shape, tokens: the case's static sizes and number of tokens, where the op declares them.
        package: the package that registered the kernel; "" is opslot.
    """

    op: str
    variant: str
    case: str
    kernel: str
    dtype: str
    ms: float | None = None
    wall_ms: float | None = None
    roofline_ms: float | None = None
    peak_mib: float | None = None
    check: str = ""
    shape: dict[str, int] | None = None
    tokens: int | None = None
    # Not in the digests of plots: that of opslot, as in all committed results, changes none.
    package: str = field(default="", repr=False)

    @property
    def origin(self) -> str:
        """The project whose code the kernel is."""
        return self.package or origin_of(self.kernel)

    @property
    def valid(self) -> bool:
        """Whether there is a time beside a passed check."""
        return self.ms is not None and self.check.startswith("ok")

    @property
    def failed_check(self) -> bool:
        """Whether a registered kernel, not a baseline or compiled code, gave wrong results."""
        own = self.kernel not in ("eager", "torch.compile") and ":" not in self.kernel
        return own and self.check.startswith("WRONG")

    @property
    def roofline_fraction(self) -> float | None:
        """Roofline over time: 1.0 is the speed of light of this machine."""
        return self.roofline_ms / self.ms if self.ms and self.roofline_ms else None

    @property
    def comparison(self) -> tuple[str, str, str]:
        """What the implementations that are compared have in common."""
        return self.op, self.variant, self.case


@dataclass(frozen=True)
class StepRow:
    """One implementation's training step of a whole model.

    Attributes:
        model: name of the configuration.
        implementation: "opslot", "opslot + torch.compile", "opslot eager", or a baseline's training model.
        batch, length: samples and tokens per sample of a step, for each data-parallel rank.
        setup: how the model is parallelized, e.g. "fsdp 4, ep 4"; "" on one device.
        gpus: number of devices.
        ms: median milliseconds; None when it failed.
        tokens_per_s: of each device.
        peak_gib: at the peak, of the device with the highest; None off CUDA.
        image_size: side in pixels of the image that each sample has besides `length` tokens of text; 0 for none.
        audio_seconds: of the audio that each sample has besides; 0 for none.
        vision_ms, audio_ms: of it, milliseconds in the vision and in the audio tower; None without one.
        check: "ok" when first and last loss match those of Transformers' own code, or over several devices of another
            library, else what is wrong or missing.
        error: why there is no time.
        kernels: opslot's table of selected kernels.
        trace: torch.profiler's table of one step, with `--trace`.
    """

    model: str
    implementation: str
    batch: int
    length: int
    setup: str = ""
    gpus: int = 1
    ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    check: str = ""
    error: str = ""
    kernels: str = ""
    trace: str = ""
    image_size: int = 0
    audio_seconds: int = 0
    vision_ms: float | None = None
    # Not in the digests of plots, which do not show it.
    audio_ms: float | None = field(default=None, repr=False)

    @property
    def own(self) -> bool:
        """Whether opslot's kernels run in it, as opposed to a baseline or Transformers' own code."""
        return self.implementation.startswith("opslot") and not self.implementation.endswith("eager")

    @property
    def title(self) -> str:
        """The model and its setup, as tables show them."""
        return f"{self.model}, {self.setup}" if self.setup else self.model

    @property
    def valid(self) -> bool:
        """Whether there is a time, and no check that failed."""
        return self.tokens_per_s is not None and not self.check.startswith("WRONG")

    @property
    def loss_difference(self) -> str:
        """Of a check that failed, such as "0.4%"; else "". Of "WRONG: a loss differs by 0.4% from Transformers"."""
        return self.check.partition(" differs by ")[2].partition(" ")[0]

    @property
    def comparison(self) -> tuple[str, int, int, str, int]:
        """What the implementations that are compared have in common."""
        return self.model, self.batch, self.length, self.setup, self.gpus


@dataclass(frozen=True)
class Distance:
    """Differences between two loss curves over the same batches, in nats per token."""

    largest: float
    mean: float
    last: float


@dataclass(frozen=True)
class LossCurve:
    """Losses over the same text with opslot and with Transformers' own code.

    Attributes:
        losses: by "Transformers", "opslot" and "rounding": Transformers again with the samples of each batch reversed.
        distance: of opslot from Transformers.
        rounding: of Transformers from itself, which is what rounding alone does.
    """

    steps: int
    batch: int
    length: int
    learning_rate: float
    losses: dict[str, list[float]]
    distance: Distance
    rounding: Distance


@dataclass(frozen=True)
class Value:
    """One number that is neither an op's time nor a training step's, e.g. an import time.

    Attributes:
        goal: e.g. "<= 150"; "" without one.
    """

    name: str
    value: float
    unit: str
    goal: str = ""


def recorded_command(*arguments: str) -> str:
    """The command that a run records: absolute paths are relative to the current folder, or their last part alone.

    Results are shared, and do not depend on where a machine keeps its files.
    """

    def shown(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        path = Path(value)
        if not path.is_absolute():
            return argument
        here = Path.cwd()
        return f"{name}{equals}{path.relative_to(here) if path.is_relative_to(here) else path.name}"

    return shlex.join(map(shown, arguments))


@dataclass(frozen=True)
class Run:
    """Everything that one command measured on one machine.

    Attributes:
        baselines: what was compared with, as `--baselines` names it: an op without a row of one of them has no
            kernel there, where one that is not listed was not measured.
    """

    command: str
    environment: Environment
    baselines: list[str] = field(default_factory=list)
    ops: list[OpRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    curve: LossCurve | None = None
    values: list[Value] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not (self.ops or self.steps or self.curve or self.values)


@dataclass(frozen=True)
class Result:
    """The runs of one script."""

    script: str
    runs: list[Run] = field(default_factory=list)

    @property
    def ops(self) -> list[OpRow]:
        return [row for run in self.runs for row in run.ops]

    @property
    def steps(self) -> list[StepRow]:
        return [row for run in self.runs for row in run.steps]

    @property
    def values(self) -> list[Value]:
        return [value for run in self.runs for value in run.values]

    @property
    def curve(self) -> LossCurve | None:
        return next((run.curve for run in reversed(self.runs) if run.curve), None)

    def run_of(self, row: OpRow | StepRow) -> Run:
        """The run that a row belongs to."""
        return next(run for run in self.runs if any(row is r for r in (*run.ops, *run.steps)))


def _without(old: Run, new: Run) -> Run:
    """The comparisons of a run that a later one has not measured."""
    ops, steps, values = (
        {r.comparison for r in new.ops},
        {r.comparison for r in new.steps},
        {v.name for v in new.values},
    )
    return dataclasses.replace(
        old,
        ops=[r for r in old.ops if r.comparison not in ops],
        steps=[r for r in old.steps if r.comparison not in steps],
        curve=None if new.curve else old.curve,
        values=[v for v in old.values if v.name not in values],
    )


def merge(results: Iterable[Result]) -> Result:
    """All runs of several results, in their order; a comparison is that of the last run that has it.

    Raises:
        ConfigError: they are of different devices, or of different scripts.
    """
    results = list(results)
    runs = [run for result in results for run in result.runs]
    if len(devices := sorted({run.environment.device for run in runs})) > 1:
        raise ConfigError(
            "the results are of different devices", found=", ".join(devices), hint="merge those of each device"
        )
    if len(scripts := sorted({result.script for result in results})) > 1:
        raise ConfigError(
            "the results are of different scripts", found=", ".join(scripts), hint="merge those of each script"
        )
    kept: list[Run] = []
    for run in runs:
        kept = [rest for old in kept if not (rest := _without(old, run)).empty] + [run]
    return Result(results[0].script, kept)


def to_json(result: Result) -> str:
    """The text of a result file; fields that hold their default are left out."""
    return json.dumps({"schema": SCHEMA, **_plain(result)}, indent=1) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [f for f in dataclasses.fields(value) if getattr(value, f.name) != _default(f)]
        return {f.name: _plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def from_json(text: str) -> Result:
    """The result that `to_json` wrote.

    Raises:
        ValueError: the text is not one; the message names the field.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"no result of schema {SCHEMA}")
    return _record(Result, {k: v for k, v in data.items() if k != "schema"}, "result")


def read(path: Path) -> Result:
    """A result file.

    Raises:
        ConfigError: it cannot be read, or is not a result of this schema.
    """
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read", found=str(error.strerror), hint="give files that --output wrote"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{str(path)!r} is not a benchmark result", found=str(error), hint="give files that --output wrote"
        ) from error


# Evaluating the annotations takes longer than reading the record.
_type_hints = functools.cache(get_type_hints)


def _record(cls: type[_Record], data: Any, where: str) -> _Record:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {type(data).__name__}, not an object")
    hints = _type_hints(cls)  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{where} has unknown fields: {', '.join(unknown)}")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in data and _default(f) is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`, which may be a record, a list, a dict, an optional or a plain type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _value(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, where)  # type: ignore[arg-type]
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: _value(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    expected = (int, float) if hint is float else origin or hint
    if not isinstance(value, expected) or isinstance(value, bool) or (hint is float and not math.isfinite(value)):
        raise ValueError(f"{where} is {value!r}, not a valid {getattr(hint, '__name__', hint)}")
    return value


# Whose code a registered kernel is, where it is not opslot's own.
_ORIGINS = {
    "eager": "Transformers",
    "torch.compile": "torch.compile",
    "torch_fused": "PyTorch",
    "torch_chunked": "PyTorch",
    "grouped_mm": "PyTorch",
    "sdpa": "PyTorch",
    "cudnn": "PyTorch",
    "flex_attention": "PyTorch",
    "liger_kernel": "Liger-Kernel",
    "quack": "quack",
    "fla": "fla",
    "flash_qla": "FlashQLA",
    "flash_attention_2": "FlashAttention",
    "flash_attention_3": "FlashAttention",
    "flash_attention_4": "FlashAttention",
    "hf": "Transformers",
    "liger": "Liger-Kernel",
    "veomni": "VeOmni",
}


def origin_of(kernel: str) -> str:
    """The project whose code a kernel of opslot or a baseline is: its label, or "opslot" for opslot's own."""
    head, separator, _ = kernel.partition(":")
    return _ORIGINS.get(head, head if separator else "opslot")


def by_comparison(rows: Sequence[OpRow]) -> dict[tuple[str, str, str], list[OpRow]]:
    """Rows by what they have in common, the valid ones first, fastest on top."""
    groups: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        groups.setdefault(row.comparison, []).append(row)
    return {key: sorted(group, key=lambda r: (not r.valid, r.ms or math.inf)) for key, group in groups.items()}


def steps_by_comparison(steps: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """Training steps by model and setup, under the name that tables show."""
    groups: dict[str, list[StepRow]] = {}
    for step in steps:
        groups.setdefault(step.title, []).append(step)
    return groups


def eager_ms(group: Sequence[OpRow]) -> float | None:
    """Milliseconds of eager among the implementations of one comparison."""
    return next((r.ms for r in group if r.kernel == "eager" and r.valid), None)
