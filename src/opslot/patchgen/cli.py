"""The `patchgen` command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from opslot._base.errors import OpslotError, PatchError
from opslot._base.files import write_text
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.materialization import find_patch, known_archs, materialize, require_patch
from opslot.patchgen.releases import find_release
from opslot.patchgen.source import Release, installed_release

if TYPE_CHECKING:
    from opslot.patchgen.lock import Problem

_EXAMPLES = """\
examples:
  patchgen qwen3                         generate into the cache and print the file's path
  patchgen qwen3 --diff                  show what the patch changes in upstream's module
  patchgen qwen3 -o build --diff -v      write modeling_qwen3.py and modeling_qwen3.diff to build/
  patchgen mypackage.my_patch --dry-run  see whether a patch of your own applies
  patchgen --list                        architectures that have a patch
  patchgen --check                       has the installed Transformers changed what the patches rely on?
  patchgen --check --transformers 5.9.0 5.17.0 5.23.0
  patchgen --check --fix                 accept what is there now: write patchgen.lock

exit status: 0 fine, 1 a patch does not apply or upstream has drifted, 2 wrong use
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
        return max(_generate(arch, patch, release, args) for arch, patch in targets for release in releases)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader has gone; nothing more can be printed
        return 0
    except Exception as error:
        if args.traceback:
            raise
        unforeseen = "" if isinstance(error, OpslotError) else f"{type(error).__name__} (see --traceback): "
        print(f"patchgen: {unforeseen}{error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="patchgen",
        description="Generate patched Transformers modeling modules, and watch upstream for drift.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("module", nargs="*", help="an architecture, or a Python module that holds a PatchConfig")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write modeling_<arch>.py to DIR")
    parser.add_argument("--diff", action="store_true", help="show, or with -o write, the diff against upstream")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each patch")
    parser.add_argument("--dry-run", action="store_true", help="apply the patches and write nothing")
    parser.add_argument("--all", action="store_true", help="every architecture that has a patch")
    parser.add_argument("--list", action="store_true", help="list the architectures that have a patch")
    parser.add_argument("--check", action="store_true", help="compare upstream with patchgen.lock")
    parser.add_argument("--fix", action="store_true", help="write patchgen.lock")
    parser.add_argument(
        "--transformers",
        nargs="+",
        default=[],
        metavar="VERSION",
        help="releases to use instead of the installed one; downloaded when needed",
    )
    parser.add_argument("--lock", type=Path, metavar="FILE", help="use another lock file")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="use another cache (default: $OPSLOT_CACHE)")
    parser.add_argument("--traceback", action="store_true", help="show where in opslot an error arose")
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


def _targets(args: argparse.Namespace) -> list[tuple[str, PatchConfig]]:
    if args.module:
        return [_target(name) for name in args.module]
    return [(arch, require_patch(arch)) for arch in known_archs()]


def _target(name: str) -> tuple[str, PatchConfig]:
    """Architecture and patch for a command-line argument."""
    if "." not in name:
        patch = find_patch(name)
        if patch is not None:
            return name, patch
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise PatchError(f"importing {name} failed: {error}") from error
        known = ", ".join(known_archs())
        raise PatchError(f"{name!r} is neither a patched architecture ({known}) nor an importable module") from error
    patches = [value for value in vars(module).values() if isinstance(value, PatchConfig)]
    if len(patches) != 1:
        raise PatchError(f"{name} has to hold one PatchConfig, found {len(patches)}")
    return patches[0].source_module.split(".")[-2], patches[0]


def _list() -> int:
    patches = {arch: require_patch(arch) for arch in known_archs()}
    width = max((len(patch.source_module) for patch in patches.values()), default=0)
    for arch, patch in patches.items():
        print(f"{arch:12}  {len(patch.edits):3} patches  {patch.source_module:{width}}  {patch.description}")
    return 0


def _generate(arch: str, patch: PatchConfig, release: Release, args: argparse.Namespace) -> int:
    from opslot.patchgen.engine import generate

    generated = generate(patch, release)
    if args.verbose:
        print(f"{arch}: {patch.source_module} of transformers {release.version}")
        for number, edit in enumerate(patch.edits, 1):
            print(f"  Patch.{number}: {edit.summary}")
    upstream_name = f"transformers-{release.version}/{patch.target_file}"
    diff = "".join(
        difflib.unified_diff(
            generated.upstream_text.splitlines(keepends=True),
            generated.text.splitlines(keepends=True),
            upstream_name,
            f"opslot/generated/{patch.target_file}",
        )
    )
    if args.dry_run:
        print(f"{arch}: all {len(patch.edits)} patches apply to transformers {release.version}")
    elif args.output is not None:
        path = args.output / patch.target_file
        try:
            write_text(path, generated.text)
            if args.diff:
                write_text(path.with_suffix(".diff"), diff)
        except OSError as error:
            raise PatchError(f"cannot write {path}: {error.strerror}") from error
        print(path)
    elif not args.diff:
        print(materialize(arch, patch, release))
    if args.diff and args.output is None:
        sys.stdout.write(diff)
    return 0


def _check(targets: list[tuple[str, PatchConfig]], releases: list[Release], args: argparse.Namespace) -> int:
    from opslot.patchgen.lock import Lock, check, lock_path, survey

    path = args.lock or lock_path()
    lock = Lock.load(path)
    found = 0
    for release in releases:
        of_release: list[Problem] = []
        for arch, patch in targets:
            if args.fix:
                symbols, problems = survey(arch, patch, release)
                if not problems:
                    lock.record(arch, release.version, symbols)
            else:
                problems = check(arch, patch, release, lock)
            of_release += problems
            if not problems and args.verbose:
                print(f"{arch} on transformers {release.version}: fine")
        for problem in _once(of_release):
            found += 1
            print(problem)
    if args.fix and not args.dry_run:
        try:
            lock.save(path)
        except OSError as error:
            raise PatchError(f"cannot write {path}: {error.strerror}") from error
        print(f"wrote {path}")
    versions = ", ".join(release.version for release in releases)
    print(f"{_counted(len(targets), 'architecture')}, transformers {versions}: {_counted(found, 'problem')}")
    return 1 if found else 0


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Problems of one release, those that say the same of several architectures as one that names them all."""
    archs: dict[Problem, list[str]] = {}
    for problem in problems:
        archs.setdefault(replace(problem, arch=""), []).append(problem.arch)
    return [replace(problem, arch=", ".join(named)) for problem, named in archs.items()]


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
