"""`opslot port`: what slots are found in the code of an architecture that nobody patched by hand."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError, PatchError
from opslot.models import ARCHITECTURES
from opslot.models.discovery.engine import Port, port
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release
from opslot.slots import format_table


def run(name: str | None, every: bool, as_json: bool) -> int:
    """Print the parts of an architecture that have slots and those that stay upstream's.

    Exit code 1 when nothing was found, or when something was found in a module that cannot be generated with it.
    """
    if (name is None) != every:
        raise ConfigError("name one architecture, e.g. `opslot port mistral`, or give --all")
    if every:
        return _all(as_json)
    assert name is not None
    found = port(_arch_of(name))
    problem = _problem(found)
    if as_json:
        print(json.dumps(_plain(found, problem), indent=2))
    else:
        print(_shown(found, problem))
    return 0 if found.slots and not problem else 1


def _arch_of(name: str) -> str:
    """The folder under `transformers/models` that a folder's name, a model_type or a model's config names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            name = json.loads(file.read_text())["model_type"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{file} is no config.json with a model_type: {error}") from error
    if name in CONFIG_MAPPING_NAMES:
        return model_type_to_module_name(name)
    if not (installed_release().root / "models" / name / f"modeling_{name}.py").is_file():
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, 3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ConfigError(f"transformers {installed_release().version} has no architecture {name!r}{hint}")
    return name


def _problem(found: Port) -> str:
    try:
        generate(found.patch, installed_release())
    except PatchError as error:
        return str(error)
    return ""


def _shown(found: Port, problem: str) -> str:
    version = installed_release().version
    if not found.slots:
        return f"{found.arch} in transformers {version}: none of its code is like what opslot knows\n" + _left(found)
    parts = [
        f"{found.arch} in transformers {version}",
        *format_table(("part", "op"), [(finding.symbol, finding.op) for finding in found.slots]),
        _left(found),
    ]
    if problem:
        parts.append(f"but the module cannot be generated with these slots:\n{problem}")
    elif found.arch in ARCHITECTURES:
        parts.append(f"opslot has a patch of its own for {found.arch}, which is what it uses.")
    else:
        parts.append("opslot.apply, opslot.build_foundation_model and opslot train use these slots.")
    return "\n".join(part for part in parts if part)


def _left(found: Port) -> str:
    rows = [(finding.symbol, finding.op, finding.left) for finding in found.findings if finding.left]
    return "\n".join(["", *format_table(("stays upstream's", "op", "because it"), rows), ""]) if rows else ""


def _all(as_json: bool) -> int:
    release = installed_release()
    reports = []
    for folder in sorted((release.root / "models").iterdir()):
        if not (folder / f"modeling_{folder.name}.py").is_file():
            continue
        found = port(folder.name)
        if found.slots:
            reports.append(_plain(found, _problem(found)))
            if not as_json:
                print(_line(reports[-1]), flush=True)
    bad = [report["architecture"] for report in reports if report["problem"]]
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        failed = f", {len(bad)} of which cannot be generated" if bad else ""
        print(f"transformers {release.version}: slots in {len(reports)} architectures{failed}")
    for name in bad:
        print(f"opslot port {name} says why it cannot be generated", file=sys.stderr)
    return 1 if bad else 0


def _line(report: dict[str, Any]) -> str:
    ops = ", ".join(dict.fromkeys(slot["op"] for slot in report["slots"]))
    return f"{report['architecture']:24} {'FAILED' if report['problem'] else ops}"


def _plain(found: Port, problem: str) -> dict[str, Any]:
    return {
        "architecture": found.arch,
        "transformers": installed_release().version,
        "slots": [{"part": finding.symbol, "op": finding.op} for finding in found.slots],
        "left": [{"part": f.symbol, "op": f.op, "why": f.left} for f in found.findings if f.left],
        "problem": problem,
    }
