"""Baselines: other libraries' kernels as their users call them, and their training models.

The only package outside `ops` that imports kernel vendors. What is defined here is compared with, never selected. A
library's kernel that is registered as an implementation of an op (`liger_kernel`, `quack`, ...) is not repeated here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from opslot._base.device import has_package
from opslot._base.errors import ConfigError, KernelError, list_problems


@dataclass(frozen=True)
class Baseline:
    """A library to compare with.

    Attributes:
        name: as `--baselines` takes it; a module of this package has that name.
        package: the package that must be importable.
        distribution: what to install for it.
        models: names of its training models in a comparison of training steps, each with arguments of `build`.
    """

    name: str
    package: str
    distribution: str
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def load(self) -> ModuleType:
        """The module of this package that holds the library's KERNELS and `build`."""
        return importlib.import_module(f"{__name__}.{self.name}")


BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline(
            "hf",
            "transformers",
            "transformers",
            {
                "Transformers": {},
                "Transformers + FlashAttention 4": {"attention": "flash_attention_4"},
                "Transformers + torch.compile": {"compiled": True},
            },
        ),
        Baseline(
            "liger",
            "liger_kernel",
            "liger-kernel",
            {"Liger-Kernel": {}, "Liger-Kernel + FlashAttention 4": {"attention": "flash_attention_4"}},
        ),
        Baseline("quack", "quack", "quack-kernels"),
        Baseline("veomni", "veomni", "veomni", {"VeOmni": {}}),
    )
}


def baseline_of(implementation: str) -> str:
    """The name of the baseline that has a training model of this name; "" for none."""
    return next((b.name for b in BASELINES.values() if implementation in b.models), "")


def check_baselines(names: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
    """Check that baselines exist and are installed; those in `elsewhere` have a `--baseline-path`.

    Raises:
        ConfigError: names every one that does not.
    """
    problems = []
    for name in names:
        if name not in BASELINES:
            problems.append(f"unknown baseline {name!r}; expected one of {', '.join(BASELINES)}")
        elif name not in elsewhere and not has_package(BASELINES[name].package):
            problems.append(
                f"{name} is not installed; pip install {BASELINES[name].distribution}, or name a folder that holds it "
                f"with --baseline-path {name}=DIR"
            )
    if problems:
        raise ConfigError(list_problems("--baselines", problems))


def load_baselines(names: Iterable[str]) -> None:
    """Import the baselines' kernels.

    Raises:
        ConfigError: one of them is installed but fails to import.
    """
    for name in names:
        try:
            BASELINES[name].load()
        except Exception as error:
            raise ConfigError(
                f"the baseline {name} is installed but cannot be imported",
                found=f"{type(error).__name__}: {error}",
                hint="leave it out of --baselines, or fix its installation",
            ) from error


def baseline_kernels(names: Iterable[str], op_name: str, variant: str) -> dict[str, Callable[..., Any]]:
    """The baselines' kernels for an op variant, in the op's signature, by "<baseline>: <what>"."""
    found = {}
    for name in names:
        for what, kernel in BASELINES[name].load().KERNELS.get((op_name, variant), {}).items():
            found[f"{name}: {what}"] = _raising_kernel_error(kernel, name)
    return found


def _raising_kernel_error(kernel: Callable[..., Any], baseline: str) -> Callable[..., Any]:
    """A baseline that raises does not support the input, which is not a wrong result."""

    @functools.wraps(kernel)
    def call(**arguments: Any) -> Any:
        try:
            return kernel(**arguments)
        except Exception as error:
            # Neither means an unsupported input; after the second nothing else runs in this process.
            if "out of memory" in str(error).lower() or "CUDA error" in str(error):
                raise
            raise KernelError(
                f"{baseline} raised {type(error).__name__}: {error}", hint=f"leave {baseline} out of --baselines"
            ) from error

    return call
