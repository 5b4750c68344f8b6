"""`patchgen.lock`: what upstream's symbols looked like when the patches were last checked, and what changed since."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opslot._base.errors import PatchError
from opslot._base.files import write_text
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.engine import apply_all, watched_symbols
from opslot.patchgen.releases import find_release, version_key
from opslot.patchgen.source import Release, Symbol

_ABSENT = "absent"
_FORMAT = 1


@dataclass(frozen=True)
class Problem:
    """One thing that stands against a release: a patch that does not apply, or a symbol that changed.

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
    """The digest of each watched symbol by architecture and release, and the line hashes behind each digest."""

    archs: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock; a missing file is an empty lock."""
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise PatchError(f"{path} has format {data['format']}, this opslot reads {_FORMAT}")
            lines = {digest: hashes.split() for digest, hashes in data["lines"].items()}
            return cls(data["archs"], lines)
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise PatchError(f"{path} is damaged ({error}); restore it, or write it again with --fix") from error

    def save(self, path: Path) -> None:
        """Write the lock; equal locks are equal bytes, and digests that no release uses are left out."""
        used = {digest for releases in self.archs.values() for entry in releases.values() for digest in entry.values()}
        archs = {
            arch: {version: releases[version] for version in sorted(releases, key=version_key)}
            for arch, releases in sorted(self.archs.items())
        }
        lines = {digest: " ".join(self.lines[digest]) for digest in sorted(used - {_ABSENT})}
        text = json.dumps({"format": _FORMAT, "archs": archs, "lines": lines}, indent=1)
        write_text(path, text + "\n")

    def record(self, arch: str, version: str, symbols: dict[str, Symbol | None]) -> None:
        """Take over a release's symbols."""
        entry = {}
        for name, symbol in symbols.items():
            entry[name] = symbol.digest if symbol else _ABSENT
            if symbol:
                self.lines[symbol.digest] = symbol.line_digests
        self.archs.setdefault(arch, {})[version] = entry

    def nearest(self, arch: str, version: str) -> str | None:
        """The locked release to compare with: this one, else the last before it, else the first after it."""
        locked = sorted(self.archs.get(arch, {}), key=version_key)
        before = [known for known in locked if version_key(known) <= version_key(version)]
        return before[-1] if before else (locked[0] if locked else None)


def lock_path() -> Path:
    """Where the lock lies: beside this module in an installed package, else at the repository's root."""
    packaged = Path(__file__).with_name("patchgen.lock")
    return packaged if packaged.is_file() else Path(__file__).parents[3] / "patchgen.lock"


def survey(arch: str, patch: PatchConfig, release: Release) -> tuple[dict[str, Symbol | None], list[Problem]]:
    """The symbols that a patch relies on in a release, and every edit of it that does not apply there."""
    try:
        document, problems = apply_all(patch, release)
        symbols = watched_symbols(document)
    except PatchError as problem:
        return {}, [Problem(arch, release.version, "", f"the patch does not apply: {problem}")]
    return symbols, [Problem(arch, release.version, "", f"the patch does not apply: {problem}") for problem in problems]


def check(arch: str, patch: PatchConfig, release: Release, lock: Lock, *, download: bool = True) -> list[Problem]:
    """Everything that stands against using `patch` on `release`, by the lock.

    A release that the lock lacks is compared with the nearest that it has.
    """
    symbols, problems = survey(arch, patch, release)
    version = lock.nearest(arch, release.version)
    if version is None:
        return [*problems, Problem(arch, release.version, "", "not in the lock; run `patchgen --check --fix`")]
    locked = lock.archs[arch][version]
    for name, symbol in symbols.items():
        digest = symbol.digest if symbol else _ABSENT
        if name not in locked:
            message = f"the patch relies on it, and the lock has no entry of {version}; run `patchgen --check --fix`"
        elif locked[name] == digest:
            continue
        else:
            message = f"differs from the locked {version}\n" + _difference(
                name, symbol, version, release.version, lock.lines.get(locked[name], []), download
            )
        problems.append(Problem(arch, release.version, name.partition(":")[2], message))
    for name in locked.keys() - symbols.keys() if symbols else ():
        message = "locked, but no patch relies on it any more; run `patchgen --check --fix`"
        problems.append(Problem(arch, release.version, name.partition(":")[2], message))
    return problems


def _difference(
    name: str, symbol: Symbol | None, locked: str, version: str, locked_lines: list[str], download: bool
) -> str:
    """The changed lines: a diff when the locked release's text can be had, else their numbers."""
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
    note = f"    (the text of {locked} is not at hand; these lines are new or changed)"
    return "\n".join([note, *(f"    line {number}: {text}" for number, text in changed)])


def _locked_symbol(name: str, version: str, locked_lines: list[str], download: bool) -> Symbol | None:
    """The symbol as it was locked, if the release can be had and still says what the lock says."""
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
