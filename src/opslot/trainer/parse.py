"""From YAML and command line to `RunConfig`, with every mistake reported at once."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from opslot._base.errors import ConfigError, count_of, list_problems
from opslot.trainer.config import RunConfig
from opslot.trainer.field_hints import known_elsewhere
from opslot.trainer.paths import with_home

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

USAGE = "opslot train [CONFIG.yaml] [--section.field VALUE ...] [--traceback]"

EXAMPLES = """examples:
  opslot train configs/text.yaml
  opslot train --task sft --model.model_path Qwen/Qwen3-0.6B --data.train_path chats.jsonl
  opslot train run.yaml --train.max_steps 200 --train.lr 1e-3
  opslot train run.yaml --train.checkpoint.resume_from latest
  opslot train run.yaml --model.ops_implementation eager
  opslot train run.yaml --model.ops_implementation.rms_norm_implementation triton
  opslot train --model.model_path Qwen/Qwen3-0.6B --data.train_path 'corpus/**/*.jsonl' --train.output_dir outputs/run
  torchrun --nproc-per-node 4 -m opslot train run.yaml --train.ep_size 4
"""


_HALF = (
    "float16 parameters cannot be trained, since optimizer updates underflow; use float32 parameters with "
    "train.fsdp.param_dtype: float16 or bfloat16, or bfloat16 parameters"
)
_AUTO_DTYPE = (
    "the checkpoint's dtype is not used; leave the field out for float32 parameters, which compute in "
    "train.fsdp.param_dtype"
)
_VALUE_HINTS = {
    **{("model.torch_dtype", name): _HALF for name in ("float16", "fp16", "half", "torch.float16")},
    ("model.torch_dtype", "auto"): _AUTO_DTYPE,
    ("train.fsdp.param_dtype", "auto"): "leave the field out for the default",
}


def load_config(source: str | Path | Sequence[str]) -> RunConfig:
    """Read the configuration of a run.

    Args:
        source: a YAML file, or command-line arguments: optionally the YAML file, then `--section.field value` options,
            which override it. Of an option given twice, the last one counts.

    Raises:
        ConfigError: the file cannot be read or is not YAML; or every unknown key, with the nearest known one, and
            every value of a wrong type.
    """
    argv = [str(source)] if isinstance(source, str | Path) else [str(argument) for argument in source]
    values: dict[str, Any] = {}
    if argv and not argv[0].startswith("-"):
        values = _read_yaml(Path(os.path.expanduser(argv.pop(0))))
    problems: list[str] = []
    schema = _leaf_types(RunConfig)
    parser = build_parser()
    namespace = _checked_values(values, schema, parser, problems)
    namespace = _checked_overrides(argv, schema, parser, namespace, problems)
    if problems:
        raise ConfigError(list_problems(f"the configuration has {count_of(problems)}", problems, shown=30))
    assert namespace is not None, "fields are independent, so a value that is not valid is a problem above"
    complete = copy.deepcopy(_defaults())
    complete.update(namespace)
    parsed = parser.instantiate_classes(complete)
    sections = {section.name: getattr(parsed, section.name) for section in dataclasses.fields(RunConfig)}
    return with_home(RunConfig(**sections))


# What a first run sets; `opslot train --help-all` lists the others.
COMMON = {
    "task",
    "model.config_path",
    "model.model_path",
    "model.tokenizer_path",
    "model.torch_dtype",
    "model.ops_implementation",
    "data.train_path",
    "data.eval_path",
    "data.text_field",
    "data.chat_template",
    "data.train_on",
    "data.label_field",
    "data.max_seq_len",
    "data.packing",
    "train.output_dir",
    "train.max_steps",
    "train.num_epochs",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.lr",
    "train.lr_scheduler",
    "train.warmup_steps",
    "train.checkpoint.save_steps",
    "train.eval_steps",
    "train.checkpoint.resume_from",
    "train.fsdp.param_dtype",
    "evaluation.prompts",
    "lora.r",
    "lora.target_modules",
    "evaluation.early_stopping_patience",
}


@functools.cache
def build_parser(*, every_field: bool = True) -> ArgumentParser:
    """The parser of `opslot train`; its help lists every field, or the common ones."""
    from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    schema = _leaf_types(RunConfig)

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Keeps the lines of the examples, and shows the type of fields whose values are not listed."""

        def _get_type_str(self, action: Action) -> str | None:
            kind = schema.get(action.dest)
            return None if kind is None or kind is bool or _choices(kind) else _type_name(kind)

    parser = ArgumentParser(
        formatter_class=Formatter,
        prog="opslot train",
        usage=USAGE,
        description="Train on texts, chats, media or labels. Fields come from a YAML file, the command line, or both.",
        epilog=EXAMPLES
        if every_field
        else f"{EXAMPLES}\nThese are the common fields; `opslot train --help-all` lists all.",
        exit_on_error=False,
    )
    documented = RunConfig.__doc__ or ""
    for section in dataclasses.fields(RunConfig):
        kind = typing.get_type_hints(RunConfig)[section.name]
        if dataclasses.is_dataclass(kind):
            parser.add_class_arguments(kind, section.name)
        else:
            about = " ".join(documented.partition(f"{section.name}: ")[2].split())
            parser.add_argument(f"--{section.name}", type=kind, default=section.default, help=about)
    for action in parser._actions:
        if action.dest in schema and not every_field and action.dest not in COMMON:
            action.help = SUPPRESS
        if action.dest != "help" and action.dest not in schema:
            # jsonargparse's options for whole sections, which `_checked_overrides` does not accept.
            action.help = SUPPRESS
        # `_checked_overrides` does not accept jsonargparse's options that append to a list either.
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
    return parser


@functools.cache
def _defaults() -> Namespace:
    """Every field as the parser leaves it if nothing is given, which takes longer than parsing what is given."""
    return build_parser().parse_object({})


def to_yaml(config: RunConfig) -> str:
    """`config` as a YAML file that `load_config` reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def config_changes(then: Any, now: dict[str, Any]) -> list[str]:
    """Fields of two configurations, as `dataclasses.asdict` gives them, that differ, e.g. "train.lr: 0.1 -> 0.2".

    The output folder and the checkpoint to resume from are left out, as are fields that only one of them has.
    """
    schema = _leaf_types(RunConfig)
    before = dict(_flatten(then, schema)) if isinstance(then, dict) else {}
    after = dict(_flatten(now, schema))
    ignored = ("train.output_dir", "train.checkpoint.resume_from")
    return [
        f"{name}: {before[name]} -> {after[name]}"
        for name in schema
        if name in before and name in after and name not in ignored and before[name] != after[name]
    ]


class _UniqueKeys(yaml.SafeLoader):
    """Rejects a mapping with a duplicate key; YAML's own loader silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                first, found = f"{key.value} is given here", "and again here, in the same section; remove one of them"
                raise yaml.constructor.ConstructorError(first, seen[key.value], found, key.start_mark)
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(
            f"no such file: {path}", hint="give a YAML file, or only fields: --section.field VALUE"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not valid YAML:\n  {error}".replace("\n", "\n  "),
            hint="indent with spaces, and quote values that contain ': ' or start with *, &, [, { or @",
        ) from error
    except RecursionError:
        raise ConfigError(
            f"{path} is not a configuration",
            found="YAML that is nested too deeply",
            hint="give the sections model, data and train",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="give a YAML file in UTF-8") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} is not a configuration",
            found=f"a {type(values).__name__}",
            hint="give the sections model, data and train",
        )
    return values


def _leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name and type of every field; sections themselves are not included."""
    leaves: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            leaves.update(_leaf_types(typing.cast("type", kind), f"{prefix}{name}."))
        else:
            leaves[prefix + name] = kind
    return leaves


def _flatten(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; descends into all mappings but those that are fields of the schema."""
    sections = {name.rsplit(".", depth)[0] for name in schema for depth in range(1, name.count(".") + 1)}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (name in sections or (value and name not in schema)):
            yield from _flatten(value, schema, f"{name}.")
        elif value is None and name in sections:
            continue
        else:
            yield name, value


def _checked_values(
    values: dict[str, Any], schema: dict[str, Any], parser: ArgumentParser, problems: list[str]
) -> Namespace | None:
    seen: set[str] = set()
    known = {name: value for name, value in _flatten(values, schema) if name in schema}
    # Parsing takes a while, so values are parsed one by one only if one of them is wrong.
    parsed = _attempt(parser.parse_object, _nested(known))
    for name, value in _flatten(values, schema):
        if name in seen:
            problems.append(f"{name} is given twice, nested and with dots; remove one of them")
        seen.add(name)
        if name not in schema:
            problems.append(_section(name, value, schema) or _unknown(name, schema))
            continue
        if value is None and not _takes_none(schema[name]):
            problems.append(_wrong_type(name, value, schema))
            continue
        if parsed is None and not _is_valid(parser, name, value):
            problems.append(_wrong_type(name, value, schema))
    return parsed


def _checked_overrides(
    argv: list[str],
    schema: dict[str, Any],
    parser: ArgumentParser,
    namespace: Namespace | None,
    problems: list[str],
) -> Namespace | None:
    kept: list[tuple[str, str]] = []
    position = 0
    while position < len(argv):
        option = argv[position]
        name, equals, value = option.removeprefix("--").partition("=")
        position += 1
        if not option.startswith("--"):
            first = ", and give a YAML file before them" if option.endswith((".yaml", ".yml")) else ""
            problems.append(f"{option!r} is not an option; set fields with --section.field VALUE{first}")
            continue
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                problems.append(f"{option} needs a value; write it after the option")
                continue
            value = argv[position]
            position += 1
        field = next((leaf for leaf in schema if name == leaf or name.startswith(f"{leaf}.")), None)
        if field is None or (name != field and "dict" not in str(schema[field])):
            problems.append(_section(name, value, schema) or _unknown(name, schema))
        elif name == field and value == "null" and not _takes_none(schema[field]):
            problems.append(_wrong_type(name, None, schema))
        elif (found := _list_in(value, schema[field])) is not None and not _is_valid(parser, name, found):
            problems.append(_wrong_type(name, found, schema))
        else:
            kept.append((name, value))
    if not kept:
        return namespace
    options = [f"--{name}={value}" for name, value in kept]
    parsed = _attempt(parser.parse_args, options, namespace)
    if parsed is None:
        problems += [
            _wrong_type(name, value, schema)
            for (name, value), option in zip(kept, options, strict=True)
            if _attempt(parser.parse_args, [option]) is None
        ]
    return parsed


def _attempt(parse: Callable[..., Namespace], *arguments: Any) -> Namespace | None:
    import argparse

    try:
        return parse(*arguments, defaults=False)
    except (argparse.ArgumentError, TypeError, ValueError, RecursionError):
        return None


def _is_valid(parser: ArgumentParser, name: str, value: Any) -> bool:
    return _attempt(parser.parse_object, _nested({name: value})) is not None


def _list_in(text: str, kind: Any) -> list[Any] | None:
    """The list that an option gives to a field of lists; the parser takes one with other elements for a text."""
    if not text.lstrip().startswith("[") or "list[" not in str(kind):
        return None
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _takes_none(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": value}}` for `{"a.b": value}`."""
    from jsonargparse import Namespace

    nested = Namespace()
    for name, value in values.items():
        nested[name] = value
    return nested.as_dict()


def _section(name: str, value: Any, schema: dict[str, Any]) -> str | None:
    """The problem of a value given for a whole section; None if there is no such section."""
    fields = [leaf for leaf in schema if leaf.startswith(f"{name}.")]
    return f"{name} is a section, found {value!r}; set its fields, such as {fields[0]}" if fields else None


def _unknown(name: str, schema: dict[str, Any]) -> str:
    last = name.rsplit(".", 1)[-1]
    same = [leaf for leaf in schema if leaf.rsplit(".", 1)[-1] == last]
    elsewhere = None if same else known_elsewhere(name)
    if elsewhere is not None:
        return f"{name} is not a field; {f'use {elsewhere}' if elsewhere else 'opslot does not need it, remove it'}"
    near = same if len(same) == 1 else _in_its_section(name, schema)
    near = near or difflib.get_close_matches(name, schema, 1, cutoff=0.75) or same
    if not near:
        by_last = {leaf.rsplit(".", 1)[-1]: leaf for leaf in schema}
        near = [by_last[found] for found in difflib.get_close_matches(last, by_last, 1, cutoff=0.8)]
    hint = f"; did you mean {near[0]}?" if near else "; `opslot train --help-all` lists the fields"
    return f"{name} is not a field{hint}"


def _in_its_section(name: str, schema: dict[str, Any]) -> list[str]:
    """The field that a name means whose section is given inside another one: lora.r for train.lora.rank."""
    sections = {leaf.partition(".")[0] for leaf in schema if "." in leaf}
    parts = name.split(".")
    start = next((i for i in range(1, len(parts) - 1) if parts[i] in sections), None)
    if start is None:
        return []
    fields = [leaf for leaf in schema if leaf.startswith(f"{parts[start]}.")]
    return difflib.get_close_matches(".".join(parts[start:]), fields, 1, cutoff=0.5)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal, which may be optional; empty for another type."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    literal, *others = typing.get_args(kind) or (None,)
    return (*_choices(literal), "null") if others == [type(None)] and _choices(literal) else ()


def _type_name(kind: Any) -> str:
    """A type as YAML users read it, e.g. "list[str] | null"."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("None", "null")


def _wrong_type(name: str, value: Any, schema: dict[str, Any]) -> str:
    kind = schema.get(name)
    options = _choices(kind)
    expected = "one of " + ", ".join(map(str, options)) if options else _type_name(kind)
    hint = _VALUE_HINTS.get((name, value)) if isinstance(value, str) else None
    if isinstance(value, str) and not hint and (near := difflib.get_close_matches(value, options, 1, cutoff=0.5)):
        hint = f"did you mean {near[0]}?"
    if not isinstance(value, list):
        hint = hint or ("give a list in brackets" if "list[" in str(kind) else None)
    elif "list[str" in str(kind) and any(isinstance(element, int | float | date) for element in value):
        hint = 'put quotes around a text that YAML reads as another value, such as "5"'
    return f"{name}: expected {expected}, found {value!r}" + (f"; {hint}" if hint else "")
