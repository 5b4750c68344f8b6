"""Values of the commands' options; argparse names the option in their errors."""

from __future__ import annotations

import argparse
import os


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


def seed(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not a valid seed; take a number below 2**32")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or a finite number above 0")
    return number


def rate(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return number


# Named in argparse's error for text that is not a number.
count.__name__ = seed.__name__ = "integer"
temperature.__name__ = rate.__name__ = "number"
