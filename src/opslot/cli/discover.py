"""`opslot discover`: the slots of an architecture, and the parts of it that keep Transformers' implementation."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, PatchError
from opslot._base.files import write_text
from opslot._base.hub import local_model
from opslot.models._registry import folder_of_models
from opslot.models.discovery import Discovery, discover, find_patch
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.names import architecture_from, is_elsewhere, modeling_module
from opslot.patchgen.source import installed_release
from opslot.patchgen.writing import patch_source
from opslot.slots import format_table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from opslot.verify import ArchitectureCheck, CheckOutcome


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
        if options.verify or wanted or output or options.fingerprints:
            what = "--verify, --checks, --device, --dtype, --fingerprints and -o are for one architecture"
            raise ConfigError(what, hint="name it instead of --all")
        return _all(options.json)
    arch, config = _arch_of(name, options.trust_remote_code)
    report = _report_of(arch)
    if options.fingerprints:
        report["fingerprints"] = _fingerprints(arch, [row["symbol"] for row in report["skipped"]])
    if output and not report["problem"]:
        _write(arch, output)
    if not options.json:
        print(_table(report), flush=True)
    if options.verify or wanted:
        # Checks may take minutes: the result of each is printed when it ends.
        if not options.json:
            print("\nchecks on a model with random weights:", flush=True)
            wanted["report"] = _print_outcome
        check = _verify(config, arch, wanted)
        report |= {"verified": check.ok, "check": check.to_dict()}
        if not options.json:
            print(check.summary())
    if options.json:
        print(json.dumps(report, indent=2))
    return 0 if report["matches"] and not report["problem"] and report.get("verified", True) else 1


def _print_outcome(outcome: CheckOutcome) -> None:
    """Print the row of a check, with the widths of the longest name and result."""
    detail = next(iter(outcome.detail.splitlines()), "")
    print(f"{outcome.name:10}  {outcome.result:11}  {detail}".rstrip(), flush=True)


def _arch_of(name: str, trust_remote_code: bool) -> tuple[str, Path | PreTrainedConfig | str | None]:
    """The architecture that is named, and the config or model_type of a model that is.

    Args:
        name: a folder's name under `transformers/models`, a model_type, a model's config, or another module.
        trust_remote_code: allow code that ships with the model to run.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    path, file = local_model(name, weights=False), None
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
            name = data["model_type"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{file} is not a config.json with a model_type",
                found=str(error),
                hint="give the folder of a Hugging Face model, or its config.json",
            ) from error
        if "auto_map" in data and (trust_remote_code or name not in CONFIG_MAPPING_NAMES):
            return _shipped(file, trust_remote_code)
    elif "." in name and name not in CONFIG_MAPPING_NAMES and all(map(str.isidentifier, name.split("."))):
        return architecture_from(_imported(name)), None
    if name in CONFIG_MAPPING_NAMES:
        arch = folder_of_models(name)
        if not installed_release().path(modeling_module(arch)).is_file():
            raise ConfigError(
                f"transformers {installed_release().version} has no model class for model_type {name!r}",
                hint="name the model_type of the classes that it is loaded with",
            )
        return arch, file or name
    if not installed_release().path(modeling_module(name)).is_file():
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, 3)
        raise ConfigError(
            f"transformers {installed_release().version} has no architecture {name!r}",
            hint=(
                f"did you mean {', '.join(near)}?"
                if near
                else "give a folder under transformers/models, a model's folder, or a module's name with dots"
            ),
        )
    return name, file


def _shipped(file: Path, trust_remote_code: bool) -> tuple[str, PreTrainedConfig]:
    """The architecture in code that ships with a model, and its config."""
    from opslot.models import load_config
    from opslot.verify.random_model import class_of

    if not trust_remote_code:
        raise ConfigError(
            f"the model of {file} is in Python code that ships with it, which runs only if you allow it",
            hint="if you trust its author, give --trust-remote-code",
        )
    config = load_config(file, trust_remote_code=True)
    return architecture_from(class_of(config).__module__), config


def _imported(name: str) -> str:
    """The name of a module, imported from the working directory or an installed package."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name).__name__
    except ImportError as error:
        raise ConfigError(
            f"the module {name} cannot be imported", found=str(error), hint="name it as Python imports it"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


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


def _verify(config: Path | PreTrainedConfig | str | None, arch: str, wanted: dict[str, Any]) -> ArchitectureCheck:
    from opslot.models import load_config
    from opslot.verify import check_architecture

    if config is None and is_elsewhere(arch):
        raise ConfigError(
            f"no config of a model in {modeling_module(arch)}",
            hint="give the folder of a model, or call opslot.verify.check_architecture with its config",
        )
    given = load_config(config) if isinstance(config, Path) else config
    return check_architecture(arch if given is None else given, **wanted)


def _report_of(arch: str) -> dict[str, Any]:
    """What is found in an architecture, in the other modules outside Transformers that its module imports too."""
    report = _report(discover(arch))
    parts = installed_release().module(modeling_module(arch)).parts
    for other in (_report(discover(architecture_from(part))) for part in parts):
        for kind in ("matches", "skipped"):
            report[kind] += [row for row in other[kind] if row not in report[kind]]
        report["problem"] = report["problem"] or other["problem"]
    return report


def _fingerprints(arch: str, symbols: list[str]) -> dict[str, str]:
    """The fingerprints of functions, and of the methods of classes, but `__init__`, by name."""
    release = installed_release()
    module = release.module(modeling_module(arch))
    found: dict[str, str] = {}
    for view in map(ModuleView, [module, *map(release.module, module.parts)]):
        for name in view.upstream.definitions:
            owner, _, method = name.partition(".")
            if not {name, owner}.isdisjoint(symbols) and name not in view.classes and method != "__init__":
                found[name] = view.fingerprint(name) or ""
    return found


def _report(found: Discovery) -> dict[str, Any]:
    try:
        problem = ""
        if found.matches:
            generate(_patch(found.arch), installed_release())
    except PatchError as error:
        problem = str(error)
    return {
        "architecture": modeling_module(found.arch) if is_elsewhere(found.arch) else found.arch,
        "transformers": installed_release().version,
        "matches": [{"symbol": match.symbol, "op": str(match)} for match in found.matches],
        "skipped": [{"symbol": skip.symbol, "op": skip.op, "reason": skip.reason} for skip in found.skips],
        "problem": problem,
    }


def _table(report: dict[str, Any]) -> str:
    elsewhere = "." in report["architecture"]
    parts = [report["architecture"] + ("" if elsewhere else f" in transformers {report['transformers']}")]
    if report["matches"]:
        parts += format_table(("match", "op"), [(row["symbol"], row["op"]) for row in report["matches"]])
    else:
        parts.append("no code that opslot has a form of")
    if report["skipped"]:
        rows = [(row["symbol"], row["op"], row["reason"]) for row in report["skipped"]]
        kept = "its own" if elsewhere else "Transformers'"
        parts += ["", *format_table((f"skipped ({kept} implementation)", "op", "because it"), rows)]
    if report.get("fingerprints"):
        parts += ["", *format_table(("skipped", "fingerprint"), list(report["fingerprints"].items()))]
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
