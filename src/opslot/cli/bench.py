"""`opslot bench`: parse the options, print the result."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from opslot._base.pairs import pairs
from opslot.cli.arguments import device, names

_EPILOG = """examples:
  opslot bench --op rms_norm                         one op, at its own shapes
  opslot bench --tune --model path/to/model          measure this machine at a model's shapes, for auto
  opslot bench --model path/to/model --baselines hf,liger --compile --html result.html
  opslot bench --model qwen3 --layers 4 --steps-only --curve 200"""


def add_bench(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand, whose options are stored under the names of the fields of `BenchOptions`."""
    bench = add(
        "bench",
        help="time every kernel that can run here, beside its check and the roofline",
        epilog=_EPILOG,
    )
    bench.add_argument("--dtype", default=None, help="default bfloat16; float32 on a CPU")
    bench.add_argument("--device", type=device, default=None, help="default the best of this machine")
    _add_ops(bench.add_argument_group("ops"))
    _add_steps(bench.add_argument_group("training steps of a model"))
    _add_baselines(bench.add_argument_group("baselines"))
    _add_output(bench.add_argument_group("output"))


def _add_ops(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--op",
        type=names,
        default=(),
        dest="ops",
        metavar="NAMES",
        help="only these ops (separated by commas), in this order, and no training step",
    )
    group.add_argument(
        "--tokens", type=int, metavar="N", help="tokens that ops are timed with; default 16384 on a GPU, 512 on a CPU"
    )
    group.add_argument(
        "--tune", action="store_true", help="add the times to this machine's profile, which auto reads (OPSLOT_PROFILE)"
    )
    group.add_argument(
        "--no-compile-ops", action="store_false", dest="compile_ops", help="leave out torch.compile of eager ops"
    )
    group.add_argument("--baselines-only", action="store_true", help=argparse.SUPPRESS)


def _add_steps(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        nargs="+",
        default=[],
        dest="models",
        metavar="CONFIG",
        help="shapes and training steps of this model: a config.json, its folder, or a model type; several with "
        "--steps-only",
    )
    group.add_argument("--layers", type=int, metavar="N", help="another number of layers")
    group.add_argument("--batch", type=int, metavar="N", help="samples of a training step; default 2")
    group.add_argument(
        "--length", type=int, metavar="N", help="its tokens per sample; default 8192 on a GPU, 256 on a CPU"
    )
    group.add_argument(
        "--image-size",
        type=int,
        default=0,
        metavar="PIXELS",
        help="each sample begins with a square image of this side, and --length counts its text",
    )
    group.add_argument(
        "--audio-seconds",
        type=int,
        default=0,
        metavar="S",
        help="each sample has an audio of S seconds (after its image), and --length counts its text",
    )
    group.add_argument(
        "--steps", type=int, default=8, metavar="N", help="training steps to time; 0 for none; default 8"
    )
    group.add_argument("--steps-only", action="store_true", help="no ops, only training steps (and the loss curve)")
    group.add_argument("--compile", action="store_true", help="also time training steps with torch.compile")
    group.add_argument(
        "--curve",
        type=int,
        metavar="STEPS",
        help="train on text with auto and with Transformers' own code, and compare the losses",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="ops_implementation",
        metavar="FIELD=VALUE",
        help="opslot's ops_implementation in the steps",
    )
    group.add_argument(
        "--timeout",
        type=int,
        default=900,
        metavar="S",
        help="seconds that one implementation's training steps may take; default 900",
    )
    group.add_argument("--trace", action="store_true", help="add torch.profiler's table of a training step")


def _add_baselines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--baselines",
        type=names,
        default=(),
        metavar="NAMES",
        help="compare with hf, liger, quack, veomni (comma-separated)",
    )
    group.add_argument(
        "--baseline-path",
        action="append",
        default=[],
        dest="baseline_paths",
        metavar="NAME=DIR",
        help="a folder of packages that only this baseline imports, before all others",
    )
    group.add_argument(
        "--implementations",
        type=names,
        default=(),
        metavar="NAMES",
        help='training steps of these only, in this order, e.g. "opslot,VeOmni"; default opslot and all of --baselines',
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", metavar="FILE", help="write the result as JSON, with machine, versions and commit")
    group.add_argument("--plot", metavar="FILE", help="draw the result (PNG or SVG)")
    group.add_argument("--html", metavar="FILE", help="write one page that holds everything")
    group.add_argument(
        "--merge", nargs="+", metavar="FILE", help="measure nothing; make one result of these that --output wrote"
    )
    group.add_argument("--commit", metavar="ID", help="commit to record outside a git repository")
    group.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the result, or where a merged one was written; exit code 1 when the check of a registered kernel fails."""
    from opslot.bench.files import OutputFiles
    from opslot.bench.options import BenchOptions
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
        given["baseline_paths"] = pairs("--baseline-path", "NAME=DIR", options.baseline_paths)
        command = recorded_command("opslot", *options.argv)
        result = run_bench(BenchOptions(**given), files, progress_to_stderr(), command)
    print(to_json(result) if options.json else result_text(result))
    return 1 if not options.merge and any(row.failed_check for row in result.ops) else 0
