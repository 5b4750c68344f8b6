"""Other projects that opslot is measured against: their kernels as users call them, and their training models.

The only place outside `ops` that imports kernel vendors: what stands here is compared with, never chosen. A kernel of
theirs that is a registered implementation of an op (`liger_kernel`, `quack`, ...) does not stand here again.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from opslot._base.device import has_package
from opslot._base.errors import ConfigError, KernelError


@dataclass(frozen=True)
class Peer:
    """A project to compare with.

    Attributes:
        package: the module that must be importable.
        distribution: what to install for it.
        contenders: names of its training models in a comparison of steps, each with arguments of `build`.
    """

    name: str
    package: str
    distribution: str
    contenders: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def load(self) -> ModuleType:
        """The module of this package that holds the peer's KERNELS and `build`."""
        return importlib.import_module(f"{__name__}.{self.name}")


BASELINES = {
    peer.name: peer
    for peer in (
        Peer("hf", "transformers", "transformers", (("hf", ()), ("hf+compile", (("compiled", True),)))),
        Peer("liger", "liger_kernel", "liger-kernel", (("liger", ()),)),
        Peer("quack", "quack", "quack-kernels"),
        Peer("veomni", "veomni", "veomni", (("veomni", ()),)),
    )
}


def check_baselines(names: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
    """Refuse peers that do not exist or are not installed; those in `elsewhere` have a path of their own.

    Raises:
        ConfigError: names every one of them.
    """
    problems = []
    for name in names:
        if name not in BASELINES:
            problems.append(f"{name!r} is no peer; use {', '.join(BASELINES)}")
        elif name not in elsewhere and not has_package(BASELINES[name].package):
            peer = BASELINES[name]
            problems.append(
                f"{name} is not installed; pip install {peer.distribution}, or name a folder that holds it with "
                f"--peer-path {name}=DIR"
            )
    if problems:
        raise ConfigError("peers to compare with:\n" + "\n".join(f"- {p}" for p in problems))


def load_peers(names: Iterable[str]) -> None:
    """Import the peers' kernels.

    Raises:
        ConfigError: one of them is installed, but does not import here.
    """
    for name in names:
        try:
            BASELINES[name].load()
        except Exception as error:
            raise ConfigError(
                f"the peer {name} is installed but cannot be imported: {type(error).__name__}: {error}",
                hint="leave it out of --against, or mend its installation",
            ) from error


def peer_kernels(names: Iterable[str], op_name: str, variant: str) -> dict[str, Callable[..., Any]]:
    """The peers' kernels for an op variant, in the op's signature, by "<peer>: <what>"."""
    found = {}
    for name in names:
        for what, kernel in BASELINES[name].load().KERNELS.get((op_name, variant), {}).items():
            found[f"{name}: {what}"] = _refusing(kernel, name)
    return found


def _refusing(kernel: Callable[..., Any], peer: str) -> Callable[..., Any]:
    """A peer that raises serves less than the op asks of opslot's kernels, which is no wrong number."""

    @functools.wraps(kernel)
    def call(**arguments: Any) -> Any:
        try:
            return kernel(**arguments)
        except Exception as error:
            # Neither is a matter of what the peer serves; after the second nothing else runs in this process.
            if "out of memory" in str(error).lower() or "CUDA error" in str(error):
                raise
            raise KernelError(f"{peer} raised {type(error).__name__}: {error}") from error

    return call


__all__ = ["BASELINES", "Peer", "check_baselines", "load_peers", "peer_kernels"]
