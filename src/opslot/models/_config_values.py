"""Values of a config that Transformers accepts and that cannot work: they fail later, or train to NaN."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _Range(NamedTuple):
    field: re.Pattern[str]
    holds: Callable[[float], bool]
    expected: str


# Fields whose values are numbers; those that are null, boolean or a list are not checked.
_RANGES = (
    _Range(re.compile(r"dropout|pdrop|drop_rate|layerdrop"), lambda value: 0 <= value < 1, "a number in [0, 1)"),
    _Range(re.compile(r"(norm|rms).*_eps"), lambda value: 0 <= value < math.inf, "a finite number from 0 on"),
    _Range(re.compile(r"rope_theta$"), lambda value: 0 < value < math.inf, "a finite number above 0"),
    _Range(re.compile(r"^sliding_window(_size)?$"), lambda value: value > 0, "a number above 0, or null"),
)
_ACTIVATION = re.compile(r"(^|_)(hidden_act|hidden_activation|activation_function)$")


def check_values(config: PreTrainedConfig, source: str) -> None:
    """Check a config of Transformers and those nested in it; other classes may give a field another meaning.

    Args:
        source: where the config comes from, for the error.

    Raises:
        ConfigError: a value is outside its range, or names nothing that Transformers has.
    """
    problems = []
    names: Any = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        problems.append(("architectures", names, "a list of class names"))
    for prefix, part in _parts(config):
        if type(part).__module__.startswith("transformers.models."):
            problems += [(f"{prefix}{name}", value, expected) for name, value, expected in _problems(part)]
    if problems:
        raise ConfigError(
            f"{source} is not a valid {config.model_type} config",
            found=", ".join(f"{name}={value!r}" for name, value, _ in problems),
            hint="; ".join(f"set {name} to {expected}" for name, _, expected in problems),
        )


def _parts(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    from transformers import PreTrainedConfig

    yield prefix, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, f"{prefix}{name}.")


def _problems(config: PreTrainedConfig) -> Iterator[tuple[str, Any, str]]:
    """Name, value and what is expected instead, of each invalid field."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_types = {"default", getattr(config, "default_rope_type", "default"), *ROPE_INIT_FUNCTIONS}
    for name, value in _fields(config):
        if isinstance(value, str):
            valid = ACT2FN if _ACTIVATION.search(name) else rope_types if name.endswith("rope_type") else None
            if valid is not None and value not in valid:
                near = difflib.get_close_matches(value, valid, 3)
                yield name, value, f"one of {', '.join(near or sorted(valid))}"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            for rule in _RANGES:
                if rule.field.search(name) and not rule.holds(value):
                    yield name, value, rule.expected


def _fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    values = dict(vars(config))
    if values.get("use_sliding_window") is False:
        values.pop("sliding_window", None)
    pending = [("rope_parameters.", values.pop("rope_parameters", None))]
    yield from values.items()
    while pending:
        prefix, entry = pending.pop()
        for name, value in entry.items() if isinstance(entry, Mapping) else ():
            yield prefix + name, value
            # Parameters by the type of a layer.
            pending.append((f"{prefix}{name}.", value))


def padding_problem(config: Mapping[str, Any], prefix: str = "") -> str:
    """The `pad_token_id` outside the vocabulary in a config or in one nested in it; "" without one.

    Only an embedding with a padding index needs it: released configs of models without one have others.
    """
    padding, size = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(padding, int) and isinstance(size, int) and not -size <= padding < size:
        return f"{prefix}pad_token_id={padding} with {prefix}vocab_size={size}"
    nested = (padding_problem(value, f"{prefix}{name}.") for name, value in config.items() if isinstance(value, dict))
    return next(filter(None, nested), "")
