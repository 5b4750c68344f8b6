"""From YAML and command line to `RunConfig`, with every mistake reported at once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from opslot._base.errors import ConfigError, count_of, list_problems
from opslot.trainer.config import RunConfig
from opslot.trainer.field_hints import known_elsewhere

USAGE = "opslot train [CONFIG.yaml] [--section.field VALUE ...] [--traceback]"

EXAMPLES = """examples:
  opslot train configs/text.yaml
  opslot train --task sft --model.model_path models/Qwen3-0.6B --data.train_path chats.jsonl
  opslot train run.yaml --train.max_steps 200 --train.lr 1e-3
  opslot train run.yaml --train.checkpoint.resume_from latest
  opslot train run.yaml --model.ops_implementation eager
  opslot train run.yaml --model.ops_implementation.rms_norm_implementation triton
  opslot train --model.model_path models/Qwen3-0.6B --data.train_path 'corpus/**/*.jsonl' --train.output_dir outputs/run
  torchrun --nproc-per-node 4 -m opslot train run.yaml --train.ep_size 4
"""


_HALF = (
    "float16 parameters cannot be trained, since optimizer updates underflow; use float32 parameters with "
    "train.fsdp.param_dtype: float16 or bfloat16, or bfloat16 parameters"
)
# YAML reads these numbers as strings.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_VALUE_HINTS = {("model.torch_dtype", name): _HALF for name in ("float16", "fp16", "half", "torch.float16")}


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
        values = _read_yaml(Path(argv.pop(0)))
    problems: list[str] = []
    schema = _leaf_types(RunConfig)
    given = _checked_values(values, schema, problems)
    _check_overrides(argv, schema, given, problems)
    if problems:
        raise ConfigError(list_problems(f"the configuration has {count_of(problems)}", problems, shown=30))
    return _built(RunConfig, given)


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


def build_parser(*, every_field: bool = True) -> argparse.ArgumentParser:
    """The parser of which `opslot train` prints the help: of every field, or of the common ones."""
    more = "" if every_field else "\nThese are the common fields; `opslot train --help-all` lists all."
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="opslot train",
        usage=USAGE,
        description="Train on texts, chats, media or labels. Fields come from a YAML file, the command line, or both.",
        epilog=EXAMPLES + more,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help message and exit.")
    _add_fields(parser, parser, RunConfig, "", every_field)
    return parser


def _add_fields(parser: argparse.ArgumentParser, group: Any, cls: Any, prefix: str, every_field: bool) -> None:
    """Add the fields of a section to the help, and after them those of the sections in it."""
    described = _descriptions(cls)
    kinds = typing.get_type_hints(cls)
    inner = [name for name, kind in kinds.items() if dataclasses.is_dataclass(kind)]
    for name in (name for name in kinds if name not in inner and (every_field or prefix + name in COMMON)):
        kind, default = kinds[name], getattr(cls, name)
        shown = "null" if default is None else default
        # The values of these are listed, by argparse or in the text.
        type_name = "" if kind is bool or _choices(kind) else f"type: {_type_name(kind)}, "
        options: dict[str, Any] = {"metavar": name.upper()}
        if bool in (kind, *typing.get_args(kind)):
            options = {"choices": ("true", "false") if kind is bool else ("true", "false", "null")}
        elif typing.get_origin(kind) is typing.Literal:
            options = {"choices": _choices(kind)}
        text = f"{described[name]} ({type_name}default: {shown})".replace("%", "%%")
        group.add_argument(f"--{prefix}{name}", help=text, **options)
    for name in inner:
        title = described[name] if prefix else (kinds[name].__doc__ or "").partition("\n")[0]
        _add_fields(parser, parser.add_argument_group(title.rstrip(".")), kinds[name], f"{prefix}{name}.", every_field)


def _descriptions(cls: Any) -> dict[str, str]:
    """What the docstring of a section says of each field."""
    texts = re.split(r"^        (\w+): ", (cls.__doc__ or "").partition("Args:\n")[2], flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(texts[1::2], texts[2::2], strict=True)}


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
    """Dotted keys and values; descends only into mappings that are sections of the schema."""
    sections = {name.rsplit(".", depth)[0] for name in schema for depth in range(1, name.count(".") + 1)}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name in sections:
            yield from _flatten(value, schema, f"{name}.")
        elif value is None and name in sections:
            continue
        else:
            yield name, value


def _checked_values(values: dict[str, Any], schema: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The values of fields in a YAML file, by dotted name."""
    given: dict[str, Any] = {}
    seen: set[str] = set()
    for name, value in _flatten(values, schema):
        if name in seen:
            problems.append(f"{name} is given twice, nested and with dots; remove one of them")
        seen.add(name)
        if name not in schema:
            problems.append(_section(name, value, schema) or _unknown(name, schema))
            continue
        try:
            given[name] = _converted(schema[name], value)
        except ValueError:
            problems.append(_wrong_type(name, value, schema))
    return given


def _check_overrides(argv: list[str], schema: dict[str, Any], given: dict[str, Any], problems: list[str]) -> None:
    """Add the fields on the command line to `given`."""
    position = 0
    while position < len(argv):
        option = argv[position]
        name, equals, value = option.removeprefix("--").partition("=")
        position += 1
        if not option.startswith("--"):
            problems.append(f"{option!r} is not an option; set fields with --section.field VALUE")
            continue
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                problems.append(f"{option} needs a value")
                continue
            value = argv[position]
            position += 1
        field = next((leaf for leaf in schema if name == leaf or name.startswith(f"{leaf}.")), None)
        if field is None or (name != field and "dict" not in str(schema[field])):
            problems.append(_section(name, value, schema) or _unknown(name, schema))
            continue
        found: Any = None if value == "null" else value
        try:
            if name != field:
                known = given.get(field)
                found = {name.removeprefix(f"{field}."): _from_text(Any, value)}
                given[field] = _converted(schema[field], {**known, **found} if isinstance(known, dict) else found)
            else:
                given[field] = _from_text(schema[field], value)
        except ValueError:
            problems.append(_wrong_type(field, found, schema))


def _from_text(kind: Any, text: str) -> Any:
    """The value of a field from the command line: YAML other than strings, or else the text itself."""
    try:
        value = yaml.load(text, _UniqueKeys)
    except (ValueError, yaml.YAMLError, RecursionError):
        value = text
    if text == "null":
        return _converted(kind, None)
    with contextlib.suppress(ValueError):
        if text and not isinstance(value, str):
            return _converted(kind, value)
    return _converted(kind, text)


def _converted(kind: Any, value: Any) -> Any:
    """`value` as the type `kind`.

    Raises:
        ValueError: it is of another type.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    if kind is Any or (origin is typing.Literal and value in options):
        return value
    if origin in (typing.Union, types.UnionType):
        for option in options:
            with contextlib.suppress(ValueError):
                return _converted(option, value)
    elif origin is list and isinstance(value, list):
        return [_converted(options[0], item) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {str(key): _converted(options[1], item) for key, item in value.items()}
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind in (int, float) and isinstance(value, str) and value[-1:].isdigit():
        return kind(value)
    elif kind is type(None) and value in (None, "null"):
        return None
    elif type(value) is kind:
        return value
    raise ValueError(f"{value!r} is not of type {_type_name(kind)}")


def _built(cls: Any, given: dict[str, Any], prefix: str = "") -> Any:
    """A section with the values that are given, by dotted name."""
    values = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            values[name] = _built(kind, given, f"{prefix}{name}.")
        elif prefix + name in given:
            values[name] = given[prefix + name]
    return cls(**values)


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
    near = near or difflib.get_close_matches(name, schema, 1, cutoff=0.75)
    if not near:
        near = same or difflib.get_close_matches(name, schema, 1, cutoff=0.5)
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
    return f"{name}: expected {expected}, found {value!r}" + (f"; {hint}" if hint else "")
