"""The timings of this machine: the profile that `opslot bench --tune` writes and `auto` reads.

One JSON file holds the timings of any number of machines, each with the versions it was measured with. Only those of
this machine and of the versions installed now count: `auto` selects the fastest at a shape, and uses the registry's
priorities at shapes that were not measured. Ranks of one training run that read the same file choose the same kernels.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opslot._base.device import DeviceFacts, cpu_name, package_version
from opslot._base.errors import ConfigError
from opslot._base.files import write_json
from opslot._base.logging import get_logger

logger = get_logger(__name__)

VARIABLE = "OPSLOT_PROFILE"
_FORMAT = 1
_DISTRIBUTIONS = ("opslot", "torch", "triton", "liger-kernel", "quack-kernels", "flash-attn-4", "fla-core", "torch-npu")

_INSTEAD = "delete the file and run `opslot bench --tune`"

_Key = tuple[str, str, str, tuple[tuple[str, int], ...]]


class ProfileError(ConfigError):
    """The profile that OPSLOT_PROFILE names cannot be read."""


@dataclass(frozen=True)
class Timing:
    """Every implementation of one op at one shape.

    Attributes:
        dtype: as torch names it, e.g. "bfloat16".
        shape: what `OpVariant.static_shape` returns for the call site.
        tokens: how many tokens it was measured with.
        ms: forward plus backward, by implementation; "eager" among them unless it could not run. Only
            implementations whose check passed.
        failed: by implementation, why it has no time: its failed check, or its error.
    """

    op: str
    variant: str
    dtype: str
    shape: Mapping[str, int]
    tokens: int
    ms: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> _Key:
        return self.op, self.variant, self.dtype, tuple(sorted(self.shape.items()))


@dataclass(frozen=True)
class Profile:
    """The timings that hold on one device of this machine.

    Attributes:
        path: the file; None when profiles are off or there is none.
        timings: by (op, variant, dtype, shape).
        date: when they were last added to, as YYYY-MM-DD.
        ignored: why the file's timings do not hold here; empty when they do.
    """

    path: Path | None = None
    timings: Mapping[_Key, Timing] = field(default_factory=dict)
    date: str = ""
    ignored: str = ""

    def at(self, op: str, variant: str, dtype: str, shape: Mapping[str, int]) -> Timing | None:
        """The timing at exactly this shape, or None."""
        return self.timings.get((op, variant, dtype, tuple(sorted(shape.items()))))

    def __str__(self) -> str:
        if self.path is None:
            return ""
        if self.ignored:
            return f"profile {self.path} is ignored: {self.ignored}"
        shapes = f"{len(self.timings)} shape{'s' if len(self.timings) != 1 else ''}"
        return f"profile {self.path}: {shapes} measured here, {self.date}"


def profile_path() -> Path | None:
    """The file named by OPSLOT_PROFILE, else the one in the user's cache; None where it is "off"."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "opslot" / "profile.json"


def read_profile(device: DeviceFacts) -> Profile:
    """The profile of `device`, read again only when the file changed.

    Raises:
        ProfileError: OPSLOT_PROFILE names a file that does not exist or is not a profile. The default file is ignored
            then, which is logged once and shown by `explain`.
    """
    path = profile_path()
    if path is None:
        return Profile()
    named = bool(os.environ.get(VARIABLE))
    try:
        stat = path.stat()
    except OSError as error:
        if named:
            raise ProfileError(
                f"{VARIABLE}={str(path)!r} cannot be read: {error.strerror}",
                hint="write it with `opslot bench --tune`, or set it to off",
            ) from error
        return Profile()
    return _read(path, stat.st_mtime_ns, stat.st_size, device, named)


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int, device: DeviceFacts, named: bool) -> Profile:
    """The arguments `changed` and `size` are there to notice another file at the same place."""
    try:
        with _as_a_profile(path):
            machines = _machines(path)
            mine = [m for m in machines if _same_device(m, device)]
            if not mine:
                found = ", ".join(sorted({_show(m) for m in machines})) or "nothing"
                return Profile(path, ignored=f"it holds {found}, this is {_show(machine_of(device))}")
            section = mine[-1]
            differing = _differing_versions(section["versions"], machine_of(device)["versions"])
            if differing:
                return Profile(path, ignored=f"measured with {differing}; run `opslot bench --tune` again")
            timings = [_timing(entry) for entry in section["timings"]]
            return Profile(path, {t.key: t for t in timings}, section["date"])
    except ConfigError as error:
        if named:
            raise ProfileError(
                f"{VARIABLE}: {error}",
                hint=f"{_INSTEAD}, or set {VARIABLE}=off",
            ) from error
        logger.warning("%s; kernels are chosen without it", error)
        return Profile(path, ignored=str(error))


@contextmanager
def _as_a_profile(path: Path) -> Iterator[None]:
    """ConfigError where the block finds something else in the JSON of `path` than `write_profile` writes."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a profile of opslot: {error!r}") from error


def _timing(entry: Mapping[str, Any]) -> Timing:
    """The timing that `_plain` made `entry` of; TypeError or ValueError for what no measurement gives."""
    timing = Timing(**entry)
    if not (isinstance(timing.failed, Mapping) and type(timing.tokens) is int):
        raise TypeError(f"tokens {timing.tokens!r}, failed {timing.failed!r}")
    for name, ms in timing.ms.items():
        if type(ms) not in (int, float) or not 0 < ms < math.inf:
            raise ValueError(f"{timing.op}/{timing.variant}: {name} took {ms!r} ms")
    return timing


def _machines(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("machines"), list):
        raise ConfigError(f"{path} is not a profile of opslot (format {_FORMAT})")
    return data["machines"]


def write_profile(timings: Iterable[Timing], device: DeviceFacts) -> Path:
    """Add `timings` of this machine to the profile; those at the same shapes are replaced, other machines' kept.

    Timings taken with other versions of the packages are dropped: they no longer hold. The file is replaced whole.

    Raises:
        ConfigError: profiles are off, the file is not a profile, or it cannot be written.
    """
    path = profile_path()
    if path is None:
        raise ConfigError(f"{VARIABLE}=off: no profile can be written", hint="unset it, or name a file")
    here = machine_of(device)
    kept: dict[_Key, Timing] = {}
    others = []
    try:
        with _as_a_profile(path):
            for machine in _machines(path) if path.exists() else []:
                if not _same_device(machine, device):
                    others.append(machine)
                elif not _differing_versions(machine["versions"], here["versions"]):
                    kept.update((t.key, t) for t in map(_timing, machine["timings"]))
    except ConfigError as error:
        raise ConfigError(
            f"{error}",
            hint=f"{_INSTEAD}, or name another file with {VARIABLE}",
        ) from error
    kept.update((t.key, t) for t in timings)
    section = {**here, "date": time.strftime("%Y-%m-%d"), "timings": [_plain(t) for t in kept.values()]}
    try:
        write_json(path, {"format": _FORMAT, "machines": [*others, section]})
    except OSError as error:
        raise ConfigError(
            f"the profile {path} cannot be written: {error.strerror}",
            hint=f"name another file with {VARIABLE}",
        ) from error
    return path


def machine_of(device: DeviceFacts) -> dict[str, Any]:
    """What a timing depends on beside op and shape: the device, and the packages that hold kernels."""
    capability = ".".join(map(str, device.capability)) if device.capability else ""
    name = f"{cpu_name()}, {os.cpu_count()} cores" if device.type == "cpu" else device.name
    versions = {name: version for name in _DISTRIBUTIONS if (version := package_version(name))}
    return {"device": name, "capability": capability, "versions": versions}


def _same_device(machine: Mapping[str, Any], device: DeviceFacts) -> bool:
    here = machine_of(device)
    return machine["device"] == here["device"] and machine["capability"] == here["capability"]


def _differing_versions(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """ "torch 2.10.0 (now 2.11.0), ..." or ""."""
    return ", ".join(
        f"{name} {then.get(name, 'absent')} (now {now.get(name, 'absent')})"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    )


def _show(machine: Mapping[str, Any]) -> str:
    return f"{machine['device']} {machine['capability']}".strip()


def _plain(timing: Timing) -> dict[str, Any]:
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in vars(timing).items()}
