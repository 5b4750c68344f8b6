"""The `opslot` command.

A subcommand is `run(options)` in the module of its name, which is imported when it runs, so that help is instant.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from opslot import __version__
from opslot._base.errors import ConfigError, OpslotError
from opslot.cli.arguments import at_least, count, device, names, path, rate, seed, temperature
from opslot.cli.bench import add_bench

_Add = Callable[..., argparse.ArgumentParser]

_EPILOG = """examples:
  opslot train config.yaml --train.lr 1e-5          train a model
  opslot data preview config.yaml                   samples, with the trained tokens marked
  opslot generate outputs/run/hf --prompt "Hi"      answer a prompt with a checkpoint
  opslot report outputs/run                         one HTML page about a run
  opslot explain config.yaml                        the kernels that it trains with, and why
  opslot kernels --op rms_norm                      what can run here
  opslot discover mistral                           the slots of an architecture, and what is skipped
  opslot verify                                     check every kernel that can run here
  opslot bisect path/to/model                       name the slot that breaks parity
  opslot bench --op moe_experts                     time its kernels beside the roofline
  opslot convert SRC DST --layout stacked           rewrite an MoE checkpoint's experts
  opslot merge outputs/run/hf merged/               a checkpoint with the run's LoRA adapters added
  opslot patchgen --list                            the architectures and their patches

exit codes: 0 done, 1 a check or a run failed, 2 wrong usage or bad input, 130 SIGINT, 143 SIGTERM
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and prints one clear message for every expected error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    if show_traceback and arguments[:1] == ["train"]:
        # It prints its errors itself.
        arguments.append("--traceback")
    # It warns, when PEFT imports it, of a missing kernel for inference on CPUs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        _require_text(arguments)
        return _dispatch(arguments)
    except OpslotError as error:
        if show_traceback:
            traceback.print_exc()
        print(f"opslot: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if show_traceback:
            traceback.print_exc()
        print("opslot: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has ended.
        sys.stderr.close()
        return 0


def _require_text(arguments: list[str]) -> None:
    """Raise ConfigError for bytes on the command line that are not text, which tokenizers and YAML do not take."""
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="ignore").decode():
            raise ConfigError(
                "an argument is not text in UTF-8",
                found=ascii(os.fsencode(argument))[2:-1],
                hint="type it in UTF-8; of a file or folder, rename it",
            )


def _dispatch(arguments: list[str]) -> int:
    # These two own their whole command line, --help included.
    if arguments[:1] == ["train"]:
        from opslot.trainer import cli_train

        return cli_train(arguments[1:])
    if arguments[:1] == ["patchgen"]:
        from opslot.patchgen.cli import main as patchgen

        return patchgen(arguments[1:])
    if not arguments:
        _parser().print_help(sys.stderr)
        return 2
    options, rest = _parser().parse_known_args(arguments)
    if rest and options.command != "data":
        _parser().parse_args(arguments)
    options.argv, options.rest = arguments, rest
    return int(importlib.import_module(f"opslot.cli.{options.command}").run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "opslot",
        description="Select, check and train with a kernel for each op of a Transformers model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"opslot {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    add = functools.partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter)
    add("train", help="train a model on texts, chats, media or labels", add_help=False)
    _add_data(add)
    _add_generate(add)
    _add_report(add)
    _add_kernels(add)
    _add_explain(add)
    _add_discover(add)
    _add_verify(add)
    _add_bisect(add)
    add_bench(add)
    _add_convert(add)
    _add_merge(add)
    add("patchgen", help="generate and check patched modeling files", add_help=False)
    return parser


def _add_data(add: _Add) -> None:
    data = add("data", help="show what a training configuration trains on")
    preview = data.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "preview",
        help="print samples with their trained parts marked",
        usage="opslot data preview [CONFIG.yaml] [--section.field VALUE ...] [--samples N] [--tokens]",
        epilog=(
            "examples:\n  opslot data preview run.yaml\n  opslot data preview run.yaml --samples 5 --tokens\n"
            "  opslot data preview --task sft --model.model_path Qwen/Qwen3-0.6B --data.train_path chats.jsonl"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    preview.add_argument("--samples", type=count, default=3, metavar="N", help="documents to print; default 3")
    preview.add_argument("--tokens", action="store_true", help="print tokens instead of text")
    preview.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="mark with a color or with [[ ]]"
    )


def _medium(kind: str, text: str) -> tuple[str, str]:
    return kind, path(text)


def _add_generate(add: _Add) -> None:
    generate = add(
        "generate",
        help="generate from a checkpoint, with its chat template",
        epilog=(
            'examples:\n  opslot generate outputs/run/hf --prompt "What is 2+2?"\n'
            "  opslot generate outputs/run/hf --prompt 'def f(' --raw --temperature 0.7\n"
            '  opslot generate outputs/vlm/hf --image shapes.png --prompt "How many circles?"'
        ),
    )
    generate.add_argument(
        "model", type=path, help="a folder with weights, or LoRA adapters, and tokenizer, or a model of the hub"
    )
    generate.add_argument("--prompt", action="append", required=True, help="may be repeated")
    for kind in ("image", "video", "audio"):
        generate.add_argument(
            f"--{kind}",
            action="append",
            dest="media",
            type=functools.partial(_medium, kind),
            metavar="FILE",
            help="before every prompt, in the order given; may be repeated",
        )
    generate.add_argument("--max-pixels", type=count, default=None, metavar="N", help="as data.max_pixels in training")
    generate.add_argument(
        "--max-frames", type=count, default=None, metavar="N", help="as data.max_frames in training; default 64"
    )
    generate.add_argument("--max-fps", type=rate, default=None, metavar="R", help="as data.max_fps in training")
    generate.add_argument(
        "--use-audio-in-video", action="store_true", help="as data.use_audio_in_video in training (omni models)"
    )
    generate.add_argument("--system", default=None, help="system message")
    generate.add_argument("--raw", action="store_true", help="continue the prompt without the chat template")
    generate.add_argument("--max-new-tokens", type=count, default=256, metavar="N", help="default 256")
    generate.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="of sampling; default 0, the most likely tokens",
    )
    generate.add_argument("--seed", type=seed, default=0, help="of sampling")
    generate.add_argument("--device", type=device, default=None, help="cpu or cuda; default a GPU where there is one")
    _add_trust(generate)


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trust-remote-code", action="store_true", help="run code that ships with the checkpoint")


def _add_report(add: _Add) -> None:
    report = add(
        "report",
        help="write one HTML page about a training run",
        epilog="examples:\n  opslot report outputs/run\n  opslot report outputs/run -o run.html",
    )
    report.add_argument("folder", type=path, metavar="RUN", help="train.output_dir of the run")
    report.add_argument("-o", "--output", type=path, metavar="FILE", help="default RUN/report.html")


def _add_kernels(add: _Add) -> None:
    kernels = add(
        "kernels",
        help="list every kernel and whether it can run here",
        epilog="examples:\n  opslot kernels\n  opslot kernels --op moe_experts --json",
    )
    kernels.add_argument("--op", metavar="NAME", help="only this op")
    kernels.add_argument("--json", action="store_true", help="print JSON")


def _add_model(command: argparse.ArgumentParser) -> None:
    """The options for the model, its kernels and its dtype."""
    command.add_argument(
        "model",
        type=path,
        metavar="MODEL_OR_YAML",
        help="a folder with config.json, that file, a model of the hub (ORG/NAME), or a training YAML",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of ops_implementation; may be repeated",
    )
    command.add_argument("--dtype", default=None, help="compute dtype, e.g. bfloat16; default the model's")
    _add_trust(command)


def _add_explain(add: _Add) -> None:
    explain = add(
        "explain",
        help="show which kernel each part of a model uses, and why",
        epilog=(
            "examples:\n  opslot explain config.yaml                a training configuration\n"
            "  opslot explain path/to/model              a folder with config.json\n"
            "  opslot explain Qwen/Qwen3-0.6B            a model of the Hugging Face hub\n"
            "  opslot explain qwen3_moe                  a model type, with its default sizes\n"
            "  opslot explain path/to/model --set rms_norm_implementation=eager --json"
        ),
    )
    _add_model(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")


def _add_discover(add: _Add) -> None:
    discover = add(
        "discover",
        help="show the slots of an architecture, and the parts that keep Transformers' implementation",
        epilog=(
            "examples:\n  opslot discover mistral\n  opslot discover path/to/model\n"
            "  opslot discover mistral --verify              also check a tiny random model\n"
            "  opslot discover mistral --checks eager,auto   only some of the checks\n"
            "  opslot discover mistral --device cuda --dtype bfloat16   check the kernels of a GPU\n"
            "  opslot discover mistral -o patch.py           also write the equivalent patch file\n"
            "  opslot discover my_package.modeling_mine      a module of your own\n"
            "  opslot discover --all                         every architecture of the installed Transformers"
        ),
    )
    discover.add_argument(
        "architecture",
        type=path,
        nargs="?",
        help="a folder under transformers/models, a model_type, a folder with config.json, a model of the hub, or a "
        "dotted module name",
    )
    discover.add_argument(
        "--trust-remote-code", action="store_true", help="run code that ships with the model, and read it"
    )
    discover.add_argument("--all", action="store_true", dest="every", help="all architectures, one line each")
    discover.add_argument(
        "--verify",
        action="store_true",
        help="check a tiny random model, or one of the given config.json, against Transformers: loss and gradients, "
        "packed sequences, fsdp, sp and ep on two processes, checkpoints",
    )
    discover.add_argument(
        "--checks",
        type=names,
        metavar="NAMES",
        help="only these checks (separated by commas): eager, auto, packed, compiled, frozen, fsdp, sp, ep, checkpoint",
    )
    discover.add_argument("--device", help="check auto, packed and compiled there, e.g. on cuda; default cpu")
    discover.add_argument("--dtype", help="check auto, packed and compiled in it, e.g. in bfloat16; default float32")
    discover.add_argument(
        "--fingerprints",
        action="store_true",
        help="also the fingerprints of the functions and methods that are skipped",
    )
    discover.add_argument("-o", "--output", type=path, metavar="FILE", help="write the equivalent patch file")
    discover.add_argument("--json", action="store_true", help="print JSON")


def _add_verify(add: _Add) -> None:
    verify = add(
        "verify",
        help="check every kernel that can run here: forward and gradients against fp64",
        epilog=(
            "examples:\n  opslot verify\n  opslot verify --op rms_norm,swiglu_mlp --kernel triton --json\n"
            "  TRITON_INTERPRET=1 opslot verify --op swiglu_mlp      Triton kernels without a GPU, slowly"
        ),
    )
    verify.add_argument("--op", type=names, metavar="NAMES", help="only these ops (separated by commas)")
    verify.add_argument("--kernel", metavar="NAME", help="only kernels of this name")
    verify.add_argument(
        "--device",
        type=device,
        default=None,
        help="cpu, cuda or npu; default the best that each kernel runs on",
    )
    verify.add_argument(
        "--dtype",
        type=names,
        default=(),
        metavar="NAMES",
        help="only bfloat16, float16 or float32 (separated by commas)",
    )
    verify.add_argument("--seed", type=seed, default=0, help="of the random inputs")
    verify.add_argument(
        "--workers",
        type=at_least(0),
        metavar="N",
        help="processes that check; default as many as help on a GPU, else none",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")


def _add_bisect(add: _Add) -> None:
    bisect = add(
        "bisect",
        help="name the slot and layer whose kernel breaks parity with Transformers' code",
        epilog=(
            "examples:\n"
            "  opslot bisect path/to/model                        what auto chooses, with the weights in that folder\n"
            "  opslot bisect path/to/model --layers 4 --set rms_norm_implementation=triton --dtype bfloat16"
        ),
    )
    _add_model(bisect)
    bisect.add_argument("--layers", type=count, metavar="N", help="another number of layers, and random weights")
    bisect.add_argument(
        "--device", type=device, default=None, help="cpu, cuda or npu; default a GPU where there is one"
    )
    bisect.add_argument("--batch", type=count, default=2, metavar="N", help="samples; default 2")
    bisect.add_argument("--length", type=at_least(2), default=64, metavar="N", help="tokens per sample; default 64")
    bisect.add_argument("--seed", type=seed, default=0, help="of the random tokens and weights")
    bisect.add_argument("--json", action="store_true", help="print JSON")


def _add_convert(add: _Add) -> None:
    convert = add(
        "convert",
        help="rewrite an MoE checkpoint with its experts in another layout",
        epilog=(
            "examples:\n  opslot convert hub/Qwen3-30B-A3B stacked/ --layout stacked     one tensor for all experts\n"
            "  opslot convert stacked/ hub/ --layout per_expert              back to the hub's layout"
        ),
    )
    convert.add_argument("source", type=path, help="a Hugging Face folder with safetensors, or a model of the hub")
    convert.add_argument("destination", type=path, help="a folder that does not exist yet or is empty")
    convert.add_argument("--layout", required=True, help="per_expert, stacked or transposed")
    convert.add_argument("--max-shard-size", default="5GB", help="of a file; default 5GB")


def _add_merge(add: _Add) -> None:
    merge = add(
        "merge",
        help="write a checkpoint that has LoRA adapters added to its weights",
        epilog=(
            "examples:\n  opslot merge outputs/run/hf merged/\n"
            "  opslot merge outputs/run/hf merged/ --base models/Qwen3-8B      if the base model was moved"
        ),
    )
    merge.add_argument("adapter", type=path, help="a folder with adapter_config.json and adapter_model.safetensors")
    merge.add_argument("destination", type=path, help="folder of the merged checkpoint")
    merge.add_argument("--base", type=path, help="folder of the base model; default what the adapter's config names")
    merge.add_argument("--max-shard-size", default="5GB", help="of a file; default 5GB")
    _add_trust(merge)
