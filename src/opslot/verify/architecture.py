"""`check_architecture`: what opslot makes of an architecture, compared with Transformers on a tiny random model.

In float32, with samples of text and, where the model takes them, of images, videos, audio, and all of them, `CHECKS`:
- eager: with every slot bound to eager, loss and all gradients equal Transformers' bit for bit;
- auto: with the kernels asked for, loss and all gradients are compared with an fp64 reference (`bisect`), and a failure
  names the slot and the layer; with `auto`, kernels that it selects at larger sizes only run too;
- packed: documents packed into one sample give the loss and gradients of the documents alone;
- compiled: the model under torch.compile(fullgraph=True) gives the loss and gradients that it has uncompiled, with
  packed documents and with padding of text; where Triton's kernels can run, those that take lengths run;
- frozen: with each part of the model frozen in turn, its parameters get no gradient, and the others that of
  Transformers;
- fsdp, sp, ep: two processes (gloo) give the loss and gradients of one;
- checkpoint: Transformers' `from_pretrained` reads what opslot saves and the reverse, value for value.

packed, fsdp, sp and ep leave out a load-balancing loss and a z-loss, which are not sums over documents or ranks.

On a GPU and in 16 bits auto, packed and compiled, with the kernels of that GPU and sizes that they take. In 16 bits,
gradients of packed documents may be twice as far from those in float32 as Transformers' own are, and those of a
compiled model twice as far as the uncompiled one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from opslot._base.device import usable_device
from opslot._base.dtypes import dtype_name, floating_dtype
from opslot._base.errors import ConfigError, OpslotError, error_text
from opslot.models import apply
from opslot.slots import BindingReport, format_table
from opslot.verify.config_checks import ANYWHERE, CHECKS, CheckOutcome, ConfigChecks, Ops
from opslot.verify.isolated import Processes
from opslot.verify.media import KINDS, RAISES, MediaSamples, media_samples
from opslot.verify.random_model import random_model, text_ids, trained_part
from opslot.verify.tiny import model_type_of, tiny_configs
from opslot.verify.tiny_sizes import GPU_SIZES
from opslot.verify.tiny_sizes import SIZES as TINY_SIZES
from opslot.verify.two_processes import WORLD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ArchitectureCheck:
    """Result of `check_architecture`.

    Attributes:
        arch: model_type of the checked config.
        outcomes: of each check that ran.
        kernels: the kernel table with the kernels of `ops`; None where the model could not be built or bound.
        error: why no check ran.
        samples: what the checks ran on: "text", "image", "video", "audio", "mixed".
        missing: why there is no sample of a kind.
    """

    arch: str
    outcomes: tuple[CheckOutcome, ...] = ()
    kernels: BindingReport | None = None
    error: str = ""
    samples: tuple[str, ...] = ("text",)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """What failed, one text each; empty where no check failed."""
        failed = tuple(f"{o.name}: {o.detail}" for o in self.outcomes if o.result == "failed")
        return (self.error, *failed) if self.error else failed

    def __getitem__(self, name: str) -> CheckOutcome:
        """The outcome of a check."""
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = {o.name: {"result": o.result, "detail": o.detail} for o in self.outcomes}
        found = {"architecture": self.arch, "ok": self.ok, "error": self.error, "checks": checks}
        return found | {"samples": list(self.samples), "missing": dict(self.missing)}

    def __str__(self) -> str:
        title, *notes = self.summary().splitlines()
        rows = [(o.name, o.result, next(iter(o.detail.splitlines()), "")) for o in self.outcomes]
        table = [] if self.error else format_table(("check", "result", "detail"), rows)
        return "\n".join([title, *table, *notes])

    def summary(self) -> str:
        """The result and all else that the table of checks does not show."""
        has_result = any(o.result == "passed" for o in self.outcomes)
        result = "failed" if not self.ok else "passed" if has_result else "not checked"
        title = f"{self.arch}: {result}"
        if self.error:
            return f"{title}\n{self.error}"
        more = [o.detail for o in self.outcomes if o.result == "failed" and "\n" in o.detail]
        samples = [f"samples: {', '.join(self.samples)}"] if self.samples != ("text",) else []
        absent = [f"no sample of {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join([title, *samples, *absent, *more])


def check_architecture(
    arch_or_config: str | PreTrainedConfig,
    ops: Ops = "auto",
    *,
    checks: Sequence[str] | None = None,
    processes: Processes | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    report: Callable[[CheckOutcome], object] | None = None,
) -> ArchitectureCheck:
    """Run `CHECKS` on a tiny random model of an architecture.

    The checks fsdp, sp and ep start two Python processes that import the calling script: call this under
    `if __name__ == "__main__"`.

    Args:
        arch_or_config: a model_type or a folder under `transformers/models`, for which a tiny config is made; or a
            config, which is used as it is.
        ops: the kernels to check, as `opslot.apply` takes them.
        checks: those of `CHECKS` that run; default all, or on a GPU and in 16 bits "auto", "packed" and
            "compiled".
        processes: two worker processes, to use them for several architectures; None starts them where a check needs
            them.
        device: where the model runs.
        dtype: of its parameters: float32, bfloat16 or float16.
        report: called with the outcome of each check as soon as it ends.

    Returns:
        A failed check is a result, not an exception; so is a model that cannot be built or that has no slots.

    Raises:
        ConfigError: unknown architecture, check, device or dtype, or a check that is for float32 on the CPU.
    """
    device, dtype = usable_device(device), floating_dtype(dtype, f"check_architecture: dtype {dtype!r}")
    checks = _selected_checks(checks, device, dtype)
    name = model_type_of(arch_or_config) if isinstance(arch_or_config, str) else arch_or_config.model_type
    try:
        sizes = TINY_SIZES if device.type == "cpu" else GPU_SIZES
        configs = tiny_configs(name, sizes) if isinstance(arch_or_config, str) else (arch_or_config,)
        config, media, missing = _first_that_runs(configs)
    except OpslotError as error:
        return ArchitectureCheck(name, error=str(error))
    except Exception as error:
        hint = "Transformers' own model of this config raises it"
        if isinstance(arch_or_config, str):
            hint = "Transformers' own model of the tiny config raises it; give `opslot discover` the folder of another"
        return ArchitectureCheck(name, error=error_text(f"raised {type(error).__name__}: {error}", hint=hint))
    try:
        text_ids(config)
        kernels = apply(random_model(config, dtype).to(device), ops)
    except OpslotError as error:
        return ArchitectureCheck(name, error=str(error))
    except Exception as error:
        return ArchitectureCheck(name, error=f"raised {type(error).__name__}: {error}")
    with Processes(WORLD) if processes is None else contextlib.nullcontext(processes) as workers:
        run = ConfigChecks(config, ops, workers, media, device, dtype)
        outcomes = []
        for check in (check for check in CHECKS if check in checks):
            outcomes.append(run.outcome(check))
            if report is not None:
                report(outcomes[-1])
    return ArchitectureCheck(name, tuple(outcomes), kernels, "", tuple(media.batches) if media else ("text",), missing)


def _selected_checks(checks: Sequence[str] | None, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
    usual = device.type == "cpu" and dtype == torch.float32
    allowed = CHECKS if usual else ANYWHERE
    unknown = [name for name in checks or () if name not in CHECKS]
    if unknown:
        raise ConfigError(f"unknown check {unknown[0]!r}", hint=f"use {', '.join(CHECKS)}")
    other = [name for name in checks or () if name not in allowed]
    if other:
        raise ConfigError(
            f"the check {other[0]!r} is for float32 on the CPU",
            found=f"{dtype_name(dtype)} on {device}",
            hint=f"use {', '.join(ANYWHERE)} there",
        )
    return allowed if checks is None else checks


def _first_that_runs(
    configs: Iterable[PreTrainedConfig],
) -> tuple[PreTrainedConfig, MediaSamples | None, Mapping[str, str]]:
    """A config with samples of media: the first whose media Transformers runs, else that with the most.

    Raises:
        Exception: what Transformers raises for the first config, if none builds.
    """
    found: list[tuple[PreTrainedConfig, MediaSamples | None, Mapping[str, str]]] = []
    error: Exception | None = None
    for config in configs:
        try:
            found.append((config, *_media_samples(random_model(config))))
        except Exception as raised:
            error = error or raised
            continue
        if not any(RAISES in reason for reason in found[-1][-1].values()):
            return found[-1]
    if not found:
        assert error is not None, "no config"
        raise error
    return min(found, key=lambda each: len(each[-1]))


def _media_samples(model: Any) -> tuple[MediaSamples | None, Mapping[str, str]]:
    """Samples with images, videos and audio, and why some are missing."""
    found = media_samples(trained_part(model).eval())
    if found is None:
        return None, {}
    return (found if found.batches.keys() & {*KINDS} else None), found.missing
