"""Values of the commands' options; argparse names the option in their errors."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from opslot._base.errors import ConfigError


def device(text: str) -> str:
    if text.partition(":")[0] == "meta":
        raise argparse.ArgumentTypeError("on 'meta' nothing is computed; use cpu, cuda, cuda:1 or npu")
    return text


def path(text: str) -> str:
    """A path, with "~" expanded as a shell does outside quotes."""
    return os.path.expanduser(text)


def names(text: str) -> tuple[str, ...]:
    """Separated by commas."""
    return tuple(name.strip() for name in text.split(","))


def number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """An argparse type: reads a number of `kind`, and rejects one for which `accepts` is False.

    Args:
        expected: what the number must be, for the error.
    """

    def read(text: str) -> Any:
        value = kind(text)
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text} must be {expected}")
        return value

    # Named in argparse's error for text that is not a number.
    read.__name__ = "integer" if kind is int else "number"
    return read


def at_least(least: int) -> Callable[[str], Any]:
    return number(int, lambda value: value >= least, f"at least {least}")


count = at_least(1)
seed = number(int, lambda value: abs(value) < 2**32, "a number below 2**32")
temperature = number(float, lambda value: 0 <= value < math.inf, "0 or a finite number above 0")
rate = number(float, lambda value: 0 < value < math.inf, "a finite number above 0")


def pairs(option: str, form: str, items: list[str]) -> dict[str, str]:
    """`items`, each of the form `form` such as "FIELD=VALUE", as a mapping; else ConfigError that names `option`."""
    found = {}
    for item in items:
        name, _, value = item.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {item!r} is not {form}", hint="give a name and a value, with = between them")
        found[name] = value
    return found
