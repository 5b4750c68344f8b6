"""`patchgen.lock`: the supported architectures, with the slots and the upstream symbols of each in each release."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version

from opslot._base.errors import PatchError
from opslot._base.files import write_text
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import InheritMethod, SlotCalls
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.releases import find_release
from opslot.patchgen.source import Release
from opslot.patchgen.upstream import Symbol

T = TypeVar("T")

_ABSENT = "absent"
_FORMAT = 2


@dataclass(frozen=True)
class Problem:
    """A difference from the lock: a lost slot, a changed symbol, or a patch that does not apply.

    Attributes:
        arch: the architecture, or several with commas between them.
        release: of Transformers.
        symbol: upstream's class, method or function; empty for the patch as a whole.
        message: what is wrong with it.
    """

    arch: str
    release: str
    symbol: str
    message: str

    def __str__(self) -> str:
        place = f" {self.symbol}" if self.symbol else ""
        return f"{self.arch}{place} on transformers {self.release}: {self.message}"


@dataclass
class Lock:
    """What is known of each architecture in each release.

    Attributes:
        archs: by architecture and release, the digest of each watched symbol.
        slots: by architecture and release, the expected slots (`PatchConfig.slots`).
        lines: the line hashes behind each digest.
    """

    archs: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    slots: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock; a missing file is an empty lock."""
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise PatchError(
                    f"{path} has format {data['format']}, this opslot reads {_FORMAT}",
                    hint="use the lock of this version, or write it again with --fix",
                )
            lock = cls(lines={digest: hashes.split() for digest, hashes in data["lines"].items()})
            for arch, entry in data["archs"].items():
                versions = entry["releases"].split()
                symbols = {name: _expand(steps, versions) for name, steps in entry["symbols"].items()}
                lock.archs[arch] = {
                    version: {name: values[version] for name, values in symbols.items() if values[version]}
                    for version in versions
                }
                slots = _expand(entry["slots"], versions)
                lock.slots[arch] = {version: tuple(slots[version]) for version in versions}
            return lock
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise PatchError(f"{path} is damaged ({error})", hint="restore it, or write it again with --fix") from error

    def save(self, path: Path) -> None:
        """Write the lock; equal locks are equal bytes, and digests that no release uses are left out.

        A value is written for the first release that has it, and holds until the next that is written.
        """
        used = {digest for releases in self.archs.values() for entry in releases.values() for digest in entry.values()}
        archs = {}
        for arch, releases in sorted(self.archs.items()):
            versions = sorted(releases, key=Version)
            slots = self.slots.get(arch, {})
            archs[arch] = {
                "releases": " ".join(versions),
                "slots": _steps({version: list(slots.get(version, ())) for version in versions}),
                "symbols": {
                    name: _steps({version: releases[version].get(name) for version in versions})
                    for name in sorted({name for entry in releases.values() for name in entry})
                },
            }
        lines = {digest: " ".join(self.lines[digest]) for digest in sorted(used - {_ABSENT})}
        text = json.dumps({"format": _FORMAT, "archs": archs, "lines": lines}, indent=1)
        write_text(path, text + "\n")

    def record(self, arch: str, version: str, symbols: dict[str, Symbol | None], slots: Iterable[str]) -> None:
        """Take over a release's symbols and slots."""
        entry = {}
        for name, symbol in symbols.items():
            entry[name] = symbol.digest if symbol else _ABSENT
            if symbol:
                self.lines[symbol.digest] = symbol.line_digests
        self.archs.setdefault(arch, {})[version] = entry
        self.slots.setdefault(arch, {})[version] = tuple(sorted(slots))

    def agrees(self, arch: str, version: str, symbols: dict[str, Symbol | None], slots: Iterable[str]) -> bool:
        """Whether the nearest locked release has the same symbols and slots, so that the same edits apply."""
        nearest = self.nearest(arch, version)
        if nearest is None:
            return False
        digests = {name: symbol.digest if symbol else _ABSENT for name, symbol in symbols.items()}
        return digests == self.archs[arch][nearest] and set(slots) == set(self.slots[arch][nearest])

    def expected_slots(self, arch: str, version: str) -> tuple[str, ...]:
        """The slots of an architecture in a release, or in the nearest that the lock has; none for another one."""
        nearest = self.nearest(arch, version)
        return self.slots[arch][nearest] if nearest else ()

    def nearest(self, arch: str, version: str) -> str | None:
        """The locked release to compare with: this one, else the last before it, else the first after it."""
        locked = sorted(self.archs.get(arch, {}), key=Version)
        before = [known for known in locked if Version(known) <= Version(version)]
        return before[-1] if before else (locked[0] if locked else None)


def lock_path() -> Path:
    """The path of the lock: beside this module in an installed package, else at the repository's root."""
    packaged = Path(__file__).with_name("patchgen.lock")
    return packaged if packaged.is_file() else Path(__file__).parents[3] / "patchgen.lock"


def watched_symbols(patch: PatchConfig, release: Release) -> dict[str, Symbol | None]:
    """Upstream's text of each symbol that a patch changes or depends on, as `module:symbol`; None where absent."""
    inherited = {edit.target for edit in patch.edits if isinstance(edit, InheritMethod)}
    names = {name for edit in patch.edits for name in edit.symbols}.union(patch.dependencies)
    called = {edit.target for edit in patch.edits if isinstance(edit, SlotCalls)}
    names |= set(ModuleView(release.module(patch.source_module)).callers(*called)) if called else set()
    watched: dict[str, Symbol | None] = {}
    for name in names - inherited:
        if "." not in name.rpartition(":")[2] or name.rpartition(".")[0] not in names:
            module, _, symbol = name.rpartition(":")
            module = module or patch.source_module
            watched[f"{module}:{symbol}"] = release.module(module).symbol(symbol)
    return dict(sorted(watched.items()))


def survey(
    arch: str, patch: PatchConfig, release: Release, lock: Lock | None = None
) -> tuple[dict[str, Symbol | None], list[Problem]]:
    """The symbols that a patch relies on in a release, and every edit of it that does not apply there.

    With a lock that agrees, the edits are known to apply.
    """
    from opslot.patchgen.engine import apply_all

    try:
        symbols = watched_symbols(patch, release)
        if lock is not None and lock.agrees(arch, release.version, symbols, patch.slots):
            return symbols, []
        _, problems = apply_all(patch, release)
    except PatchError as problem:
        return {}, [Problem(arch, release.version, "", f"the patch does not apply: {problem}")]
    return symbols, [Problem(arch, release.version, "", f"the patch does not apply: {problem}") for problem in problems]


def check(arch: str, patch: PatchConfig, release: Release, lock: Lock, *, download: bool = True) -> list[Problem]:
    """Every difference between the lock and an architecture in a release: lost slots, and changed symbols.

    A release that the lock lacks is compared with the nearest that it has.
    """
    version = lock.nearest(arch, release.version)
    symbols, problems = survey(arch, patch, release, lock)
    if version is None:
        return [*problems, Problem(arch, release.version, "", "not in the lock; run `patchgen --check --fix`")]

    locked = lock.archs[arch][version]

    def add(name: str, message: str) -> None:
        problems.append(Problem(arch, release.version, name.partition(":")[2] or name, message))

    for slot in lock.slots[arch][version]:
        if slot not in patch.slots:
            symbol, _, op = slot.partition(" ")
            add(symbol, f"lost the slot {op} that it has in {version}")
    for slot in patch.slots:
        if slot not in lock.slots[arch][version]:
            symbol, _, op = slot.partition(" ")
            add(symbol, f"has the slot {op}, and the lock does not say so; run `patchgen --check --fix`")
    for name in sorted({*symbols, *locked}):
        found = symbols[name] if name in symbols else _symbol(name, release)
        if name not in locked:
            add(name, f"the patch relies on it, and the lock has no entry of {version}; run `patchgen --check --fix`")
        elif locked[name] != (found.digest if found else _ABSENT):
            lines = lock.lines.get(locked[name], [])
            difference = _difference(name, found, version, release.version, lines, download)
            add(name, f"differs from the locked {version}\n{difference}")
        elif name not in symbols:
            add(name, "locked, but no patch relies on it any more; run `patchgen --check --fix`")
    return problems


def _symbol(name: str, release: Release) -> Symbol | None:
    module, _, symbol = name.partition(":")
    try:
        return release.module(module).symbol(symbol)
    except PatchError:
        return None


def _steps(values: dict[str, T]) -> dict[str, T]:
    """The value of the first release, and of each in which it changes."""
    steps: dict[str, T] = {}
    for version, value in values.items():
        if not steps or value != list(steps.values())[-1]:
            steps[version] = value
    return steps


def _expand(steps: dict[str, T], versions: list[str]) -> dict[str, T]:
    """The value of each release."""
    values: dict[str, T] = {}
    for version in versions:
        values[version] = steps[version] if version in steps else list(values.values())[-1]
    return values


def _difference(
    name: str, symbol: Symbol | None, locked: str, version: str, locked_lines: list[str], download: bool
) -> str:
    """The changed lines: a diff if the locked release's text is available, else their numbers."""
    if symbol is None:
        return f"    {name} is gone"
    old = _locked_symbol(name, locked, locked_lines, download and locked != version)
    if old is not None:
        lines = difflib.unified_diff(
            [text for _, text in old.code_lines],
            [text for _, text in symbol.code_lines],
            f"transformers {locked} {name} (line {old.first_line})",
            f"transformers {version} {name} (line {symbol.first_line})",
            lineterm="",
            n=2,
        )
        return "\n".join(f"    {line}" for line in lines)
    changed = _changed_lines(locked_lines, symbol)
    note = f"    (the text of {locked} is not available; these lines are new or changed)"
    return "\n".join([note, *(f"    line {number}: {text}" for number, text in changed)])


def _locked_symbol(name: str, version: str, locked_lines: list[str], download: bool) -> Symbol | None:
    """The symbol as it was locked, if the release is available and has the locked text."""
    module, _, symbol_name = name.partition(":")
    try:
        symbol = find_release(version, download=download).module(module).symbol(symbol_name)
    except PatchError:
        return None
    return symbol if symbol is not None and symbol.line_digests == locked_lines else None


def _changed_lines(locked_lines: list[str], symbol: Symbol) -> list[tuple[int, str]]:
    matcher = difflib.SequenceMatcher(None, locked_lines, symbol.line_digests, autojunk=False)
    changed: list[tuple[int, str]] = []
    for kind, first, last, start, stop in matcher.get_opcodes():
        if kind == "delete":
            after = symbol.code_lines[start - 1][0] if start else symbol.first_line
            changed.append((after, f"({last - first} locked line(s) are gone after this one)"))
        elif kind != "equal":
            changed.extend(symbol.code_lines[start:stop])
    return changed
