"""The `patchgen` command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from opslot._base.errors import OpslotError, PatchError
from opslot._base.files import write_text
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.materialization import find_patch, known_archs, materialize, require_patch
from opslot.patchgen.names import modeling_module
from opslot.patchgen.releases import find_release
from opslot.patchgen.source import Release, installed_release

if TYPE_CHECKING:
    from opslot.patchgen.lock import Problem

_EXAMPLES = """\
examples:
  patchgen qwen3                         generate into the cache and print the file's path
  patchgen qwen3 --diff                  show what changes in upstream's module
  patchgen qwen3 -o build --diff -v      write modeling_qwen3.py and modeling_qwen3.diff to build/
  patchgen mypackage.my_patch --dry-run  see whether a patch of your own applies
  patchgen --list                        the supported architectures and their slots
  patchgen --check                       do they have the same slots and upstream code as in patchgen.lock?
  patchgen --check --transformers 5.9.0 5.17.0 5.24.0
  patchgen mistral --fix                 accept what is there now, or add an architecture: write patchgen.lock

exit status: 0 no problems, 1 a patch does not apply, upstream has drifted or another error, 2 wrong options
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
        _validate(parser, args)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.cache_dir is not None:
        os.environ["OPSLOT_CACHE"] = str(args.cache_dir)
    try:
        if args.list:
            return _list()
        targets = _targets(args)
        releases = [find_release(version) for version in args.transformers] or [installed_release()]
        if args.check or args.fix:
            return _check(targets, releases, args)
        return max(_generate(target, release, args) for target in targets for release in releases)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader has gone; nothing more can be printed
        return 0
    except Exception as error:
        if args.traceback:
            raise
        unforeseen = "" if isinstance(error, OpslotError) else f"{type(error).__name__} (see --traceback): "
        print(f"patchgen: {unforeseen}{error}", file=sys.stderr)
        return 1


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="patchgen",
        description="Generate patched Transformers modeling modules, and watch upstream for drift.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("module", nargs="*", help="an architecture, or a Python module that holds a PatchConfig")
    parser.add_argument("-o", "--output", type=_path, metavar="DIR", help="write modeling_<arch>.py to DIR")
    parser.add_argument("--diff", action="store_true", help="show, or with -o write, the diff against upstream")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each patch")
    parser.add_argument("--dry-run", action="store_true", help="apply the patches and write nothing")
    parser.add_argument("--all", action="store_true", help="every supported architecture")
    parser.add_argument("--list", action="store_true", help="list the supported architectures")
    parser.add_argument("--check", action="store_true", help="compare upstream with patchgen.lock")
    parser.add_argument("--fix", action="store_true", help="write patchgen.lock")
    parser.add_argument(
        "--transformers",
        nargs="+",
        default=[],
        metavar="VERSION",
        help="releases to use instead of the installed one; downloaded when needed",
    )
    parser.add_argument("--lock", type=_path, metavar="FILE", help="use another lock file")
    parser.add_argument("--cache-dir", type=_path, metavar="DIR", help="use another cache (default: $OPSLOT_CACHE)")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def _validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Combinations that make no sense end with status 2."""
    checking = args.check or args.fix
    if not (args.module or args.all or args.list or checking):
        parser.error("name a module, or use --all, --list or --check")
    if args.module and args.all:
        parser.error("name modules or use --all, not both")
    if checking and (args.output or args.diff):
        parser.error("--check and --fix write no module; leave out -o and --diff")
    if args.lock and not checking:
        parser.error("--lock goes with --check or --fix")


@dataclass(frozen=True)
class _Target:
    """An architecture, and its patch where the command names one."""

    arch: str
    own: PatchConfig | None = None

    def patch(self, release: Release) -> PatchConfig:
        return self.own or require_patch(self.arch, release)


def _targets(args: argparse.Namespace) -> list[_Target]:
    if args.module:
        return [_target(name) for name in args.module]
    return [_Target(arch) for arch in known_archs()]


def _target(name: str) -> _Target:
    """What a command-line argument names."""
    if "." not in name and find_patch(name) is not None:
        return _Target(name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise PatchError(f"importing {name} failed: {error}", hint="install what the module imports") from error
        close = ", ".join(difflib.get_close_matches(name, known_archs(), 3))
        raise PatchError(
            f"{name!r} is neither an architecture with slots nor an importable module",
            hint=f"did you mean {close}?" if close else "patchgen --list lists the supported architectures",
        ) from error
    patch = _patch_of(module)
    return _Target(patch.source_module.split(".")[-2], patch)


def _patch_of(module: ModuleType) -> PatchConfig:
    """The module's PatchConfig: `patch` or `config` where it also imports others, which it may extend."""
    patches = {name: value for name, value in vars(module).items() if isinstance(value, PatchConfig)}
    if named := [patches[name] for name in ("patch", "config") if name in patches]:
        return named[0]
    if len(patches) == 1:
        return next(iter(patches.values()))
    arch = module.__name__.removeprefix("transformers.models.").partition(".")[0]
    raise PatchError(
        f"{module.__name__} is not a patch module",
        found=f"{len(patches)} PatchConfigs{': ' if patches else ''}{', '.join(patches)}",
        hint=(
            f"give the architecture: patchgen {arch}"
            if module.__name__.startswith("transformers.models.")
            else 'define `patch = PatchConfig("transformers.models...")` in it'
        ),
    )


def _list() -> int:
    from opslot.patchgen.lock import Lock, lock_path

    lock, release = Lock.load(lock_path()), installed_release()
    rows = {}
    for arch in known_archs():
        slots = lock.expected_slots(arch, release.version) if arch in lock.archs else require_patch(arch).slots
        rows[arch] = sorted({slot.rpartition(" ")[2] for slot in slots})
    width = max(map(len, rows), default=0)
    for arch, ops in rows.items():
        print(f"{arch:{width}}  {', '.join(ops)}")
    return 0


def _generate(target: _Target, release: Release, args: argparse.Namespace) -> int:
    from opslot.patchgen.engine import generate

    arch, patch = target.arch, target.patch(release)
    generated = generate(patch, release)
    if args.verbose:
        print(f"{arch}: {patch.source_module} of transformers {release.version}")
        for number, edit in enumerate(patch.edits, 1):
            print(f"  Patch.{number}: {edit.summary}")
    upstream_name = f"transformers-{release.version}/{patch.target_file}"
    diff = "".join(
        difflib.unified_diff(
            release.module(patch.source_module).text.splitlines(keepends=True),
            generated.splitlines(keepends=True),
            upstream_name,
            f"opslot/generated/{patch.target_file}",
        )
    )
    if args.dry_run:
        print(f"{arch}: all {len(patch.edits)} patches apply to transformers {release.version}")
    elif args.output is not None:
        path = args.output / patch.target_file
        try:
            write_text(path, generated)
            if args.diff:
                write_text(path.with_suffix(".diff"), diff)
        except OSError as error:
            raise _unwritable(path, error) from error
        print(path)
    elif not args.diff:
        print(materialize(arch, target.own, release))
    if args.diff and args.output is None:
        sys.stdout.write(diff)
    return 0


def _check(targets: list[_Target], releases: list[Release], args: argparse.Namespace) -> int:
    from opslot.patchgen.lock import Lock, check, lock_path, survey

    path = args.lock or lock_path()
    if args.check and not args.fix and not path.is_file():
        raise PatchError(f"no lock at {path}", hint="name an existing file, or write it with --fix")
    lock = Lock.load(path)
    found = 0
    for release in releases:
        of_release: list[Problem] = []
        for target in targets:
            arch = target.arch
            if not _is_in(target, release):
                continue
            patch = target.patch(release)
            if args.fix:
                symbols, problems = survey(arch, patch, release, lock)
                if not problems:
                    lock.record(arch, release.version, symbols, patch.slots)
            else:
                problems = check(arch, patch, release, lock)
            of_release += problems
            if not problems and args.verbose:
                print(f"{arch} on transformers {release.version}: no problems")
        for problem in _once(of_release):
            found += 1
            print(problem)
    if args.fix and not args.dry_run:
        try:
            lock.save(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        print(f"wrote {path}")
    versions = ", ".join(release.version for release in releases)
    print(f"{_counted(len(targets), 'architecture')}, transformers {versions}: {_counted(found, 'problem')}")
    return 1 if found else 0


def _unwritable(path: Path, error: OSError) -> PatchError:
    return PatchError(f"cannot write {path}", found=error.strerror or str(error), hint="name another place")


def _is_in(target: _Target, release: Release) -> bool:
    """Whether a release has the architecture at all; newer ones came later."""
    module = target.own.source_module if target.own else modeling_module(target.arch)
    return release.path(module).is_file()


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Problems of one release; equal problems of several architectures become one that names them all."""
    archs: dict[Problem, list[str]] = {}
    for problem in problems:
        archs.setdefault(replace(problem, arch=""), []).append(problem.arch)
    return [replace(problem, arch=", ".join(named)) for problem, named in archs.items()]


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
