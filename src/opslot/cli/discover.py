"""`opslot discover`: the slots of an architecture, and the parts of it that keep Transformers' implementation."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, PatchError
from opslot._base.files import write_text
from opslot.models.discovery import Discovery, discover, find_patch
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release, modeling_module
from opslot.patchgen.writing import patch_source
from opslot.slots import format_table

if TYPE_CHECKING:
    from opslot.verify import ArchitectureCheck


def run(options: argparse.Namespace) -> int:
    """Print what is found in an architecture; with --verify, check a tiny model of it; with -o, write its patch.

    Exit code 1 if there are no slots, if the module cannot be generated with them, or if the check fails.
    """
    name, output = options.architecture, options.output
    wanted = {"checks": options.checks, "device": options.device, "dtype": options.dtype}
    wanted = {argument: value for argument, value in wanted.items() if value}
    if (name is None) != options.every:
        what = f"{name} and --all exclude each other" if options.every else "no architecture named"
        raise ConfigError(what, hint="name one, e.g. `opslot discover mistral`, or give --all")
    if options.every:
        if options.verify or wanted or output:
            what = "--verify, --checks, --device, --dtype and -o are for one architecture"
            raise ConfigError(what, hint="name it instead of --all")
        return _all(options.json)
    arch, config_file = _arch_of(name)
    report = _report(discover(arch))
    if output and not report["problem"]:
        _write(arch, output)
    check = _verify(config_file, arch, wanted) if options.verify or wanted else None
    if check is not None:
        report |= {"verified": check.ok, "check": check.to_dict()}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(_table(report) if check is None else f"{_table(report)}\n\n{check}")
    return 0 if report["matches"] and not report["problem"] and report.get("verified", True) else 1


def _arch_of(name: str) -> tuple[str, Path | None]:
    """The folder under `transformers/models` that a folder's name, a model_type or a model's config names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    path, file = Path(name), None
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            name = json.loads(file.read_text())["model_type"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{file} is not a config.json with a model_type",
                found=str(error),
                hint="give the folder of a Hugging Face model, or its config.json",
            ) from error
    if name in CONFIG_MAPPING_NAMES:
        return model_type_to_module_name(name), file
    if not installed_release().path(modeling_module(name)).is_file():
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, 3)
        raise ConfigError(
            f"transformers {installed_release().version} has no architecture {name!r}",
            hint=(
                f"did you mean {', '.join(near)}?"
                if near
                else "discovery reads Transformers; a class of your own declares its slots (docs/architectures.md)"
            ),
        )
    return name, file


def _patch(arch: str) -> PatchConfig:
    patch = find_patch(arch, installed_release())
    assert patch is not None
    return patch


def _write(arch: str, output: str) -> None:
    try:
        write_text(Path(output), patch_source(_patch(arch)))
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}", found=error.strerror or str(error), hint="name another file"
        ) from error
    print(f"wrote {output}", file=sys.stderr)


def _verify(file: Path | None, arch: str, wanted: dict[str, Any]) -> ArchitectureCheck:
    from opslot.models import load_config
    from opslot.verify import check_architecture

    return check_architecture(arch if file is None else load_config(file), **wanted)


def _report(found: Discovery) -> dict[str, Any]:
    try:
        problem = ""
        if found.matches:
            generate(_patch(found.arch), installed_release())
    except PatchError as error:
        problem = str(error)
    return {
        "architecture": found.arch,
        "transformers": installed_release().version,
        "matches": [{"symbol": match.symbol, "op": str(match)} for match in found.matches],
        "skipped": [{"symbol": skip.symbol, "op": skip.op, "reason": skip.reason} for skip in found.skips],
        "problem": problem,
    }


def _table(report: dict[str, Any]) -> str:
    parts = [f"{report['architecture']} in transformers {report['transformers']}"]
    if report["matches"]:
        parts += format_table(("match", "op"), [(row["symbol"], row["op"]) for row in report["matches"]])
    else:
        parts.append("no code that opslot has a form of")
    if report["skipped"]:
        rows = [(row["symbol"], row["op"], row["reason"]) for row in report["skipped"]]
        parts += ["", *format_table(("skipped (Transformers' implementation)", "op", "because it"), rows)]
    if report["problem"]:
        parts += ["", f"The module cannot be generated with these slots:\n{report['problem']}"]
    return "\n".join(parts)


def _all(as_json: bool) -> int:
    release = installed_release()
    reports = []
    for folder in sorted((release.root / "models").iterdir()):
        if not release.path(modeling_module(folder.name)).is_file():
            continue
        report = _report(discover(folder.name))
        if report["matches"]:
            reports.append(report)
            if not as_json:
                ops = ", ".join(dict.fromkeys(match["op"] for match in report["matches"]))
                print(f"{report['architecture']:24} {'FAILED' if report['problem'] else ops}", flush=True)
    bad = [report["architecture"] for report in reports if report["problem"]]
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        failed = f", {len(bad)} of which cannot be generated" if bad else ""
        print(f"transformers {release.version}: slots in {len(reports)} architectures{failed}")
    for name in bad:
        print(f"`opslot discover {name}` shows why it cannot be generated", file=sys.stderr)
    return 1 if bad else 0
