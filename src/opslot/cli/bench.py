"""`opslot bench`: parse the options, print the result."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opslot.bench.options import BASELINES, OPS, OUTPUT, STEPS, BenchOptions
from opslot.cli.arguments import at_least, device, names, pairs, path

_EPILOG = """examples:
  opslot bench --op rms_norm                         one op, at its own shapes
  opslot bench --tune --model path/to/model          measure this machine at a model's shapes, for auto
  opslot bench --model path/to/model --baselines hf,liger --compile --html result.html
  opslot bench --model qwen3 --layers 4 --steps-only --curve 200"""


# How the value of an option is read, by the type of its field.
_TYPES = {"int": int, "int | None": int, "str | None": str, "tuple[str, ...]": names}
_PAIRS = "Mapping[str, str]"


def add_bench(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand, whose options are stored under the names of the fields of `BenchOptions`."""
    bench = add(
        "bench",
        help="time every kernel that can run here, beside its check and the roofline",
        epilog=_EPILOG,
    )
    groups: dict[str, Any] = {name: bench.add_argument_group(name) for name in (OPS, STEPS, BASELINES, OUTPUT)}
    for field in dataclasses.fields(BenchOptions):
        settings: dict[str, Any] = {"dest": field.name, "default": field.default, **field.metadata["settings"]}
        if field.type == "bool":
            settings["action"] = "store_false" if field.default else "store_true"
        elif field.type == _PAIRS:
            settings |= {"action": "append", "default": []}
        elif field.metadata["least"] is not None:
            settings["type"] = at_least(field.metadata["least"])
        else:
            settings.setdefault("type", device if field.name == "device" else _TYPES[str(field.type)])
        flag = field.metadata["flag"] or f"--{field.name.replace('_', '-')}"
        groups.get(field.metadata["group"], bench).add_argument(flag, **settings)
    output = groups[OUTPUT]
    output.add_argument(
        "--output", type=path, metavar="FILE", help="write the result as JSON, with machine, versions and commit"
    )
    output.add_argument("--plot", type=path, metavar="FILE", help="draw the result (PNG or SVG)")
    output.add_argument("--html", type=path, metavar="FILE", help="write one page that holds everything")
    output.add_argument(
        "--merge",
        type=path,
        nargs="+",
        metavar="FILE",
        help="measure nothing; make one result of these that --output wrote",
    )
    output.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the result, or where a merged one was written; exit code 1 when the check of a registered kernel fails."""
    from opslot.bench.files import OutputFiles
    from opslot.bench.result import merge, read, recorded_command, to_json
    from opslot.bench.run import progress_to_stderr, run_bench
    from opslot.bench.table import result_text

    files = OutputFiles(options.output, options.plot, options.html)
    if options.merge:
        result = merge(read(Path(file)) for file in options.merge)
        files.write(result)
        if options.output and not options.json:
            print(f"merged {len(options.merge)} files with {len(result.runs)} runs into {options.output}")
            return 0
    else:
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(BenchOptions)}
        set_fields = "FIELD=VALUE, e.g. rms_norm_implementation=eager"
        given["ops_implementation"] = pairs("--set", set_fields, options.ops_implementation)
        folders = pairs("--baseline-path", "NAME=DIR", options.baseline_paths)
        given["baseline_paths"] = {name: path(folder) for name, folder in folders.items()}
        command = recorded_command("opslot", *options.argv)
        result = run_bench(BenchOptions(**given), files, progress_to_stderr(), command)
    print(to_json(result) if options.json else result_text(result))
    return 1 if not options.merge and any(row.failed_check for row in result.ops) else 0
